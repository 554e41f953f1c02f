package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var cancelTests = []test{
	{"CancelledContext", cancelledContext},
	{"CancelledMeanwhile", cancelledMeanwhile},
}

func cancelledContext(e *env) {
	const promise = "a call under a context that has ended gives an error"
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	token := e.won(e.other("-row"))
	r := answer("x")
	calls := map[string]func() error{
		"Claim":    func() error { _, err := e.s.Claim(ctx, e.claimOf(e.key, dedup.NewToken())); return err },
		"Renew":    func() error { return e.s.Renew(ctx, e.other("-row"), token, lease) },
		"Complete": func() error { return e.s.Complete(ctx, e.other("-row"), token, done("x")) },
		"Release":  func() error { return e.s.Release(ctx, e.other("-row"), token) },
		"Get":      func() error { _, err := e.s.Get(ctx, e.other("-row")); return err },
		"Resolve":  func() error { return e.s.Resolve(ctx, e.other("-row"), &r, ttl) },
		"Purge":    func() error { _, err := e.s.Purge(ctx, 10); return err },
	}
	for name, call := range calls {
		if err := call(); err == nil {
			e.t.Errorf("%s = nil: %s", name, promise)
		} else if errors.Is(err, dedup.ErrLeaseLost) || errors.Is(err, dedup.ErrNotFound) || errors.Is(err, dedup.ErrNotResolvable) {
			e.t.Errorf("%s = %v: the store was not asked, so it must not claim to know", name, err)
		}
	}
	e.absent(e.key, "a claim under a context that had ended before makes no row")
	e.complete(e.other("-row"), token, dedup.StatusCompleted, answer("done"))
	e.want(e.other("-row"), dedup.Completed, "the store goes on as before")
}

// A client that leaves must not wedge its key: whatever the moment, the claim
// repeated with its token finds out, and the row goes on.
func cancelledMeanwhile(e *env) {
	for i := range 30 {
		c := e.claimOf(e.other(fmt.Sprint("-", i)), dedup.NewToken())
		cancelAfter(e.ctx, time.Duration(i)*50*time.Microsecond, func(ctx context.Context) {
			e.s.Claim(ctx, c) //nolint:errcheck // either is right
		})
		e.wantClaim(c, dedup.Won, "a claim that was cancelled at any moment is repeated with its token and wins")
		completion := done("done")
		cancelAfter(e.ctx, time.Duration(i)*50*time.Microsecond, func(ctx context.Context) {
			e.s.Complete(ctx, c.Key, c.Token, completion) //nolint:errcheck // either is right
		})
		e.ok(e.s.Complete(e.ctx, c.Key, c.Token, completion), "Complete", "a Complete that was cancelled at any moment is repeated and succeeds")
		r := e.want(c.Key, dedup.Completed, "the answer was stored")
		e.response(r.Record.Response, completion.Response, "the answer was stored whole")
	}
}

func cancelAfter(ctx context.Context, d time.Duration, f func(context.Context)) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		cancel()
	})
	f(ctx)
	cancel()
	wg.Wait()
}
