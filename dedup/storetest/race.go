package storetest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/effectonce/idempotency/dedup"
)

var raceTests = []test{
	{"ConcurrentClaims", concurrentClaims},
	{"ConcurrentTakeovers", concurrentTakeovers},
	{"ConcurrentClaimsOfExpired", concurrentExpired},
	{"CompleteAgainstTakeover", completeAgainstTakeover},
	{"ResolveAgainstTakeover", resolveAgainstTakeover},
	{"ManyKeysAtOnce", manyKeys},
}

const claimants, rounds = 16, 8

// retry calls f again while the store says that it did nothing.
func retry(f func() error) error {
	var err error
	for range 1000 {
		if err = f(); !errors.Is(err, dedup.ErrBusy) && !errors.Is(err, dedup.ErrSerialization) {
			return err
		}
	}
	return err
}

// race lets many claim k at once. Exactly one may get state, the others
// InProgress.
func (e *env) race(k dedup.Key, state dedup.State, attempt int, promise string) {
	e.t.Helper()
	results := make([]dedup.Result, claimants)
	tokens := make([]dedup.Token, claimants)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range claimants {
		tokens[i] = dedup.NewToken()
		wg.Go(func() {
			<-start
			err := retry(func() (err error) {
				results[i], err = e.s.Claim(e.ctx, e.claimOf(k, tokens[i]))
				return err
			})
			if err != nil {
				e.t.Errorf("Claim: %v: a race is no error", err)
			}
		})
	}
	close(start)
	wg.Wait()
	if e.t.Failed() {
		return
	}
	var winners []int
	for i, r := range results {
		switch r.State {
		case state:
			winners = append(winners, i)
			if r.Record.Attempt != attempt {
				e.t.Errorf("Record.Attempt is %d, want %d", r.Record.Attempt, attempt)
			}
		case dedup.InProgress:
		default:
			e.t.Errorf("a claimant got %q, want %q or in progress", r.State, state)
		}
	}
	if len(winners) != 1 {
		e.t.Fatalf("%d of %d concurrent claims are %q, want 1: %s", len(winners), claimants, state, promise)
	}
	if got := e.get(k); got.Token != tokens[winners[0]] || got.Attempt != attempt {
		e.t.Errorf("row has token %v, attempt %d; want the winner's %v, %d", got.Token, got.Attempt, tokens[winners[0]], attempt)
	}
	e.complete(k, tokens[winners[0]], dedup.StatusCompleted, answer("winner"))
}

func concurrentClaims(e *env) {
	for i := range rounds {
		e.race(e.other(fmt.Sprint("-", i)), dedup.Won, 1, "exactly one of concurrent claims wins an absent key")
	}
}

func concurrentTakeovers(e *env) {
	for i := range rounds {
		k := e.other(fmt.Sprint("-", i))
		e.abandoned(k)
		e.race(k, dedup.Abandoned, 2, "exactly one of concurrent claims takes an abandoned row over")
	}
}

func concurrentExpired(e *env) {
	for i := range rounds {
		k := e.other(fmt.Sprint("-", i))
		if i%2 == 0 {
			e.completed(k, answer("old"))
		} else {
			e.abandoned(k)
		}
		e.caps.Expire(e.t, e.s, k)
		e.race(k, dedup.Won, 1, "exactly one of concurrent claims wins an expired key")
	}
}

// both runs two calls at once.
func both(a, b func() error) (errA, errB error) {
	start := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { <-start; errA = retry(a) })
	wg.Go(func() { <-start; errB = retry(b) })
	close(start)
	wg.Wait()
	return errA, errB
}

func completeAgainstTakeover(e *env) {
	for i := range 2 * rounds {
		k := e.other(fmt.Sprint("-", i))
		token, mine := e.abandoned(k), dedup.NewToken()
		var res dedup.Result
		completed, claimed := both(
			func() error { return e.s.Complete(e.ctx, k, token, done("late")) },
			func() (err error) { res, err = e.s.Claim(e.ctx, e.claimOf(k, mine)); return err },
		)
		e.ok(claimed, "Claim", "a race is no error")
		switch {
		case completed == nil && res.State == dedup.Completed:
			e.response(res.Record.Response, answer("late"), "the late answer was stored first")
		case errors.Is(completed, dedup.ErrLeaseLost) && res.State == dedup.Abandoned:
			e.complete(k, mine, dedup.StatusCompleted, answer("second"))
		default:
			e.t.Fatalf("late Complete = %v while Claim is %q: either the answer is stored or the row is taken over, never both, never neither", completed, res.State)
		}
	}
}

func resolveAgainstTakeover(e *env) {
	for i := range 2 * rounds {
		k := e.other(fmt.Sprint("-", i))
		e.abandoned(k)
		r := answer("by the operator")
		var res dedup.Result
		resolved, claimed := both(
			func() error { return e.s.Resolve(e.ctx, k, &r, ttl) },
			func() (err error) { res, err = e.s.Claim(e.ctx, e.claimOf(k, dedup.NewToken())); return err },
		)
		e.ok(claimed, "Claim", "a race is no error")
		switch {
		case resolved == nil && res.State == dedup.Completed:
		case errors.Is(resolved, dedup.ErrNotResolvable) && res.State == dedup.Abandoned:
		default:
			e.t.Fatalf("Resolve = %v while Claim is %q: either the operator decides or the row is taken over, never both, never neither", resolved, res.State)
		}
	}
}

func manyKeys(e *env) {
	var wg sync.WaitGroup
	for i := range claimants {
		wg.Go(func() {
			for j := range rounds {
				k := e.other(fmt.Sprint("-", i, "-", j))
				if err := e.life(k, answer(k.ID)); err != nil {
					e.t.Errorf("key %d of goroutine %d: %v: different keys don't get in each other's way", j, i, err)
				}
			}
		})
	}
	wg.Wait()
}

// life claims, renews, completes and replays k.
func (e *env) life(k dedup.Key, r dedup.Response) error {
	c := e.claimOf(k, dedup.NewToken())
	var res dedup.Result
	claim := func() (err error) { res, err = e.s.Claim(e.ctx, c); return err }
	if err := retry(claim); err != nil || res.State != dedup.Won {
		return fmt.Errorf("call of Claim is %q, %w, want won", res.State, err)
	}
	if err := retry(func() error { return e.s.Renew(e.ctx, k, c.Token, lease) }); err != nil {
		return fmt.Errorf("call of Renew: %w", err)
	}
	completion := dedup.Completion{Status: dedup.StatusCompleted, Response: r, TTL: ttl}
	if err := retry(func() error { return e.s.Complete(e.ctx, k, c.Token, completion) }); err != nil {
		return fmt.Errorf("call of Complete: %w", err)
	}
	c.Token = dedup.NewToken()
	if err := retry(claim); err != nil || res.State != dedup.Completed {
		return fmt.Errorf("call of Claim is %q, %w, want completed", res.State, err)
	}
	return sameResponse(res.Record.Response, r)
}
