package dedup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// attemptTx claims, works and completes in one transaction, and runs all of it
// again when it lost a race against another transaction.
func (e *Engine) attemptTx(ctx context.Context, c Claim, work Work) (step, error) {
	retries := e.Retries
	if retries == 0 {
		retries = DefaultRetries
	}
	for backoff := storeBackoff; ; backoff = min(2*backoff, maxBackoff) {
		s, err := e.transact(ctx, c, work)
		if !errors.Is(err, ErrSerialization) || retries <= 0 {
			return s, err
		}
		retries--
		e.observe(ctx, time.Time{}, Event{Kind: EventTxRetry, Key: c.Key, Err: err})
		if sleep(ctx, backoff) != nil {
			return s, err
		}
	}
}

func (e *Engine) transact(ctx context.Context, c Claim, work Work) (step, error) {
	wctx, rn, cancel := e.workContext(ctx, c.Key, 1)
	defer cancel(nil)

	// A claim that takes longer than a lease is of no more use: a connection on
	// which no answer comes must not hold the caller up for all of the work's
	// time.
	bctx, end := context.WithTimeout(wctx, c.Lease)
	began := e.began()
	tx, res, err := e.Store.(TxStore).Begin(bctx, c)
	end()
	if err != nil {
		e.storeFailed(ctx, began, "Begin", c.Key, err)
		return step{}, fmt.Errorf("dedup: begin: %w", err)
	}
	e.observe(ctx, began, Event{Kind: EventClaimed, Key: c.Key, State: res.State, Attempt: res.Record.Attempt})
	if tx == nil {
		return reported(res), nil
	}
	defer e.waiters.wake(c.Key)
	rn.attempt = res.Record.Attempt

	done := Completion{Status: StatusCompleted, TTL: c.TTL}
	if res.State == Abandoned {
		switch e.Abandoned {
		case Fail:
			done.Status = StatusUnknown
			if _, err := e.commit(wctx, tx, c, done, 0); err != nil {
				return step{}, err
			}
			e.markedUnknown(ctx, c.Key)
			return step{Outcome: Outcome{State: Unknown}}, nil
		case Recover:
			work = e.recoverWork(c.Key, res.Record)
		case Reexecute:
		}
	}

	returned := false
	defer func() {
		if !returned { // a panic, or runtime.Goexit, on its way through
			_ = e.rollback(ctx, tx, c)
		}
	}()
	began = e.began()
	ans, err := work(tx.Context(wctx))
	returned = true
	e.observe(ctx, began, Event{Kind: EventRan, Key: c.Key, Attempt: rn.attempt, Err: err})

	if err != nil || ans.Free || rn.free.Load() {
		if rerr := e.rollback(ctx, tx, c); rerr != nil {
			return step{}, rerr
		}
		return step{Outcome: Outcome{State: Won, Response: ans.Response, Attempt: rn.attempt}}, err
	}
	done.Response = ans.Response
	out, err := e.commit(wctx, tx, c, done, rn.attempt)
	return step{Outcome: out}, err
}

func (e *Engine) commit(ctx context.Context, tx Tx, c Claim, done Completion, attempt int) (Outcome, error) {
	// The work is done; what is left of its time must not decide whether a
	// commit under way is waited for.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), orDefault(e.Lease, DefaultLease))
	defer cancel()
	out := Outcome{State: Won, Response: done.Response, Attempt: attempt}
	began := e.began()
	err := tx.Commit(ctx, done)
	switch {
	case err == nil:
		e.observe(ctx, began, Event{Kind: EventStored, Key: c.Key, Attempt: attempt})
		out.Stored = true
		return out, nil
	case errors.Is(err, ErrTxAborted):
		e.observe(ctx, began, Event{Kind: EventFreed, Key: c.Key, Attempt: attempt, Err: err})
		e.warn(ctx, "the work left its transaction aborted; all was rolled back", c.Key)
		out.Aborted = true
		return out, nil
	case errors.Is(err, ErrSerialization):
		return Outcome{}, err
	}
	e.observe(ctx, began, Event{Kind: EventOutcomeLost, Key: c.Key, Attempt: attempt, Err: err})
	if errors.Is(err, ErrTxEnded) {
		e.warn(ctx, "the work committed or rolled back the transaction that it was given, so the outcome is unknown; leave that to the engine", c.Key)
		return Outcome{}, err
	}
	e.warn(ctx, "commit failed", c.Key, slog.Any("err", err))
	return Outcome{}, fmt.Errorf("%w: %w", ErrNotStored, err)
}

// rollback drops what the transaction holds. Only ErrTxEnded is worth
// reporting: a connection that can't be told to roll back does it by itself.
func (e *Engine) rollback(ctx context.Context, tx Tx, c Claim) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	began := e.began()
	err := tx.Rollback(ctx)
	if errors.Is(err, ErrTxEnded) {
		e.observe(ctx, began, Event{Kind: EventOutcomeLost, Key: c.Key, Err: err})
		e.warn(ctx, "the work committed or rolled back the transaction that it was given, so the outcome is unknown; leave that to the engine", c.Key)
		return err
	}
	if err != nil {
		e.storeFailed(ctx, began, "Rollback", c.Key, err)
	}
	e.observe(ctx, began, Event{Kind: EventFreed, Key: c.Key})
	return nil
}
