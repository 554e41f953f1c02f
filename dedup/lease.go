package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// step is an Outcome with what Do needs to go on.
type step struct {
	Outcome
	fingerprint []byte // of the stored request, for Mismatch
}

// attemptLease claims once and, if the claim is ours, does the work in lease
// mode.
func (e *Engine) attemptLease(ctx context.Context, c Claim, work Work) (step, error) {
	claimed := time.Now()
	res, err := e.claim(ctx, c)
	if err != nil {
		return step{}, err
	}
	switch res.State {
	case Won:
	case Abandoned:
		switch e.Abandoned {
		case Fail:
			return e.markUnknown(ctx, c)
		case Recover:
			work = e.recoverWork(c.Key, res.Record)
		case Reexecute:
		}
	default:
		return reported(res), nil
	}
	out, err := e.runLeased(ctx, c, claimed, res.Record.Attempt, work)
	return step{Outcome: out}, err
}

// reported is the outcome of a claim that somebody else holds.
func reported(res Result) step {
	out := Outcome{State: res.State}
	switch res.State {
	case Completed:
		out.Response, out.Stored, out.Attempt = res.Record.Response, true, res.Record.Attempt
	case InProgress:
		out.RetryAfter = retryAfter(res.Record.LeaseLeft)
	}
	return step{Outcome: out, fingerprint: res.Record.Fingerprint}
}

// claim claims in lease mode. A claim whose answer was lost may hold the row,
// and would leave an operation that never ran looking like one that crashed.
// So it is repeated, with the same token, by which it recognises itself; and
// if that fails too, what it may hold is released.
func (e *Engine) claim(ctx context.Context, c Claim) (Result, error) {
	var res Result
	var err error
	for try := range claimTries {
		began := e.began()
		tctx, end := context.WithTimeout(ctx, c.Lease/claimTries) // all of them take at most a lease
		res, err = e.Store.Claim(tctx, c)
		end()
		if err == nil {
			e.observe(ctx, began, Event{Kind: EventClaimed, Key: c.Key, State: res.State, Attempt: res.Record.Attempt})
			return res, nil
		}
		e.storeFailed(ctx, began, "Claim", c.Key, err)
		if errors.Is(err, ErrBusy) || errors.Is(err, ErrInvalidKey) {
			return Result{}, err // certainly nothing written
		}
		if sleep(ctx, storeBackoff<<try) != nil {
			break
		}
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if e.Store.Release(cleanup, c.Key, c.Token) == nil {
		e.waiters.wake(c.Key)
	}
	return Result{}, fmt.Errorf("dedup: claim: %w", err)
}

// How patiently the engine meets a failing store.
const (
	claimTries     = 3
	storeBackoff   = 25 * time.Millisecond
	maxBackoff     = time.Second
	cleanupTimeout = 2 * time.Second
)

// runLeased does the work under the claim c and stores its answer.
func (e *Engine) runLeased(ctx context.Context, c Claim, claimed time.Time, attempt int, work Work) (Outcome, error) {
	defer e.waiters.wake(c.Key)

	wctx, rn, cancel := e.workContext(ctx, c.Key, attempt)
	defer cancel(nil)
	limit, _ := wctx.Deadline()
	hb := e.startHeartbeat(wctx, cancel, c, claimed, limit)
	defer hb.stop()

	returned := false
	defer func() {
		if !returned { // a panic, or runtime.Goexit, on its way through
			e.endLease(ctx, c)
		}
	}()
	began := e.began()
	ans, err := work(wctx)
	returned = true
	e.observe(ctx, began, Event{Kind: EventRan, Key: c.Key, Attempt: attempt, Err: err})

	free := ans.Free || rn.free.Load()
	if hb.isLost() && !free {
		return Outcome{}, ErrLeaseLost
	}
	switch {
	case free:
		e.release(ctx, c)
		return Outcome{State: Won, Response: ans.Response, Attempt: attempt}, err
	case err != nil:
		e.endLease(ctx, c)
		return Outcome{}, err
	}
	if err := e.complete(ctx, c, Completion{Status: StatusCompleted, Response: ans.Response, TTL: c.TTL}); err != nil {
		e.observe(ctx, time.Time{}, Event{Kind: EventOutcomeLost, Key: c.Key, Attempt: attempt, Err: err})
		e.warn(ctx, "the work ran, but its answer is not stored", c.Key)
		return Outcome{}, err
	}
	return Outcome{State: Won, Response: ans.Response, Stored: true, Attempt: attempt}, nil
}

// workContext is the context of one run: apart from the caller's end, bounded
// by the limit, and able to say what it belongs to.
func (e *Engine) workContext(ctx context.Context, key Key, attempt int) (context.Context, *run, context.CancelCauseFunc) {
	rn := &run{key: key, attempt: attempt, mode: e.Mode}
	ctx = context.WithValue(context.WithoutCancel(ctx), runKey{}, rn)
	ctx, stop := context.WithTimeout(ctx, orDefault(e.Limit, DefaultLimit))
	ctx, cancel := context.WithCancelCause(ctx)
	return ctx, rn, func(cause error) {
		cancel(cause)
		stop()
	}
}

// complete stores the outcome before anybody sees it. It keeps trying for as
// long as the lease would last, since after that the answer is lost.
func (e *Engine) complete(ctx context.Context, c Claim, done Completion) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.Lease)
	defer cancel()
	for backoff := storeBackoff; ; backoff = min(2*backoff, maxBackoff) {
		began := e.began()
		err := e.Store.Complete(ctx, c.Key, c.Token, done)
		if err == nil {
			e.observe(ctx, began, Event{Kind: EventStored, Key: c.Key})
			return nil
		}
		e.storeFailed(ctx, began, "Complete", c.Key, err)
		if isLeaseLost(err) {
			return ErrLeaseLost
		}
		if sleep(ctx, backoff) != nil {
			return fmt.Errorf("%w: %w", ErrNotStored, err)
		}
	}
}

// release frees the key, since nothing happened. Where that fails, the lease
// will end and the row count as abandoned: nothing runs twice by it.
func (e *Engine) release(ctx context.Context, c Claim) {
	e.settle(ctx, c.Key, "Release", EventFreed, func(ctx context.Context) error {
		return e.Store.Release(ctx, c.Key, c.Token)
	})
}

// endLease lets the next request see at once that this run ended without an
// outcome, instead of after the lease.
func (e *Engine) endLease(ctx context.Context, c Claim) {
	e.settle(ctx, c.Key, "Renew", EventOutcomeLost, func(ctx context.Context) error {
		return e.Store.Renew(ctx, c.Key, c.Token, 0)
	})
}

func (e *Engine) settle(ctx context.Context, key Key, call string, kind EventKind, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	for backoff := storeBackoff; ; backoff *= 2 {
		began := e.began()
		err := do(ctx)
		if err == nil || isLeaseLost(err) {
			e.observe(ctx, began, Event{Kind: kind, Key: key, Err: err})
			return
		}
		e.storeFailed(ctx, began, call, key, err)
		if sleep(ctx, backoff) != nil {
			return
		}
	}
}

// markUnknown ends an abandoned operation under the policy Fail.
func (e *Engine) markUnknown(ctx context.Context, c Claim) (step, error) {
	defer e.waiters.wake(c.Key)
	if err := e.complete(ctx, c, Completion{Status: StatusUnknown, TTL: c.TTL}); err != nil {
		return step{}, err
	}
	e.markedUnknown(ctx, c.Key)
	return step{Outcome: Outcome{State: Unknown}}, nil
}

func (e *Engine) markedUnknown(ctx context.Context, key Key) {
	e.observe(ctx, time.Time{}, Event{Kind: EventMarkedUnknown, Key: key})
	e.warn(ctx, "an operation was abandoned and its outcome is unknown; see Store.Resolve", key)
}

func (e *Engine) recoverWork(key Key, rec Record) Work {
	return func(ctx context.Context) (Answer, error) {
		r, err := e.Recover(ctx, key, rec)
		return Answer{Response: r}, err
	}
}

func isLeaseLost(err error) bool { return errors.Is(err, ErrLeaseLost) }

// sleep waits for d or until ctx ends, and returns ctx's error then.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
