package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Window remembers a processed event for a time only, in a store made for that
// (drivers/redis/window). It is for senders that stop redelivering after a
// known time: an event that comes after its window is handled again.
//
// The store's own promises are the limit of this one: a Redis that fails over
// before it has replicated a mark, or that evicts keys, forgets it.
type Window struct {
	Store WindowStore // required

	// Group is the consumer group: each group handles every event. At most 255
	// bytes.
	Group string

	// Window is how long a processed event is remembered. It is required, since
	// it must be longer than the sender goes on redelivering, and only the
	// caller knows how long that is.
	Window time.Duration

	// Lease bounds one run of the handler (30 s if 0): its context ends then,
	// and another copy of the event may be handled, since this one's process
	// may have died. A handler that takes no notice of its context runs beside
	// that copy. It is not renewed; [Lease] renews.
	Lease time.Duration
}

// WindowStore keeps the marks of a [Window]. Each method is one atomic step.
type WindowStore interface {
	// Acquire holds the event for lease. Its State is dedup.Won if token holds
	// it now, dedup.InProgress (with Record.LeaseLeft) if another one does, and
	// dedup.Completed if it was processed. A call repeated with the token that
	// holds the event is Won again.
	Acquire(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) (dedup.Result, error)

	// Finish marks the event as processed, for window. It does so also where
	// nobody holds the event any more, since its work is done. Repeated with the
	// same token it succeeds. dedup.ErrLeaseLost if another token holds the
	// event or has finished it.
	Finish(ctx context.Context, key dedup.Key, token dedup.Token, window time.Duration) error

	// Release forgets the event, since it failed. dedup.ErrLeaseLost if token
	// does not hold it, or has finished it.
	Release(ctx context.Context, key dedup.Key, token dedup.Token) error
}

var _ Consumer = (*Window)(nil)

const (
	defaultLease   = 30 * time.Second
	cleanupTimeout = 2 * time.Second
	firstPause     = 25 * time.Millisecond
	lastPause      = time.Second
)

// Handle implements [Consumer]. The handler is not cut off when ctx ends, but
// by the Lease.
func (w *Window) Handle(ctx context.Context, id string, fn Handler) Result {
	key, err := checkKey(w.Group, id)
	if err != nil {
		return invalid(err)
	}
	switch {
	case w.Store == nil:
		return invalid(fmt.Errorf("%w: Store is nil", ErrConfig))
	case w.Window <= 0:
		return invalid(fmt.Errorf("%w: Window must be set, longer than the sender goes on redelivering", ErrConfig))
	case w.Lease < 0:
		return invalid(fmt.Errorf("%w: Lease must not be negative", ErrConfig))
	}
	token := dedup.NewToken()
	until := time.Now().Add(orDefault(w.Lease, defaultLease)) // never later than the store's end
	res, err := w.Store.Acquire(ctx, key, token, orDefault(w.Lease, defaultLease))
	if err != nil {
		w.release(ctx, key, token) // its answer may have been lost
		return busy(err)
	}
	switch res.State {
	case dedup.Won:
		return w.run(ctx, key, token, until, func(ctx context.Context) error {
			return fn(OperationContext(ctx, w.Group, id))
		})
	case dedup.Completed:
		return Result{Status: Done, Duplicate: true}
	default:
		return Result{Status: Busy, RetryAfter: retryAfter(res.Record.LeaseLeft), Err: ErrBusy}
	}
}

func (w *Window) run(ctx context.Context, key dedup.Key, token dedup.Token, until time.Time, fn Handler) Result {
	marked := false
	defer func() {
		if !marked { // failed, or a panic on its way through
			w.release(ctx, key, token)
		}
	}()
	wctx, cancel := context.WithDeadlineCause(context.WithoutCancel(ctx), until, dedup.ErrLeaseLost)
	defer cancel()
	if err := fn(wctx); err != nil {
		return failed(err)
	}
	if err := w.finish(ctx, key, token); err != nil {
		return Result{Status: Failed, Err: err}
	}
	marked = true
	return Result{Status: Done}
}

// finish marks the event. The work is done, so it keeps trying for as long as a
// lease lasts: giving up means that the work is done once more.
func (w *Window) finish(ctx context.Context, key dedup.Key, token dedup.Token) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), orDefault(w.Lease, defaultLease))
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := w.Store.Finish(ctx, key, token, w.Window)
		if err == nil || errors.Is(err, dedup.ErrLeaseLost) {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w: %w", dedup.ErrNotStored, err)
		case <-t.C:
		}
	}
}

// release is tried once: without it, the lease runs out.
func (w *Window) release(ctx context.Context, key dedup.Key, token dedup.Token) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	_ = w.Store.Release(ctx, key, token)
}

// retryAfter is when to ask again about an event that is held for left yet.
func retryAfter(left time.Duration) time.Duration {
	return min(max(left, 50*time.Millisecond), DefaultRetryAfter)
}
