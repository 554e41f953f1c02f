package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// DefaultRetention is how long it is remembered that an event was processed,
// longer than the usual senders go on redelivering (Stripe: three days).
const DefaultRetention = 7 * 24 * time.Hour

// Lease handles events whose effect is not in the database that remembers them.
// It claims the event, renews the claim while the handler runs, and marks the
// event after. Only Store is required. Its fields must not change after the
// first call of Handle; it must not be copied.
//
// A handler that fails, or whose process dies, runs again with the next
// delivery, with dedup.Attempt(ctx) greater than 1. So it should be idempotent
// by design, or make its calls with derived keys (idempotency.WithStep). It is
// not cut off when the caller's context ends; Limit bounds it.
//
// A handler that calls dedup.NotExecuted and fails gives its start back: it
// does not count against MaxAttempts. That is for failures that say nothing
// about the event, such as a service that can't be reached.
type Lease struct {
	Store dedup.Store

	// Group is the consumer group: each group handles every event. At most 255
	// bytes.
	Group string

	// MaxAttempts is after how many starts an event is [Poison], whether they
	// failed or their process died (0: never). Starts are counted in the Store.
	MaxAttempts int

	// Lease is after how long without a sign of life a run counts as dead (30 s
	// if 0). It is renewed at each third.
	Lease time.Duration

	// Limit bounds one run of the handler (5 min if 0).
	Limit time.Duration

	// Retention is how long a processed event is remembered (7 days if 0). It
	// must be longer than the sender goes on redelivering.
	Retention time.Duration

	// Observer is told of every step, synchronously; nil for none.
	Observer func(ctx context.Context, e dedup.Event)

	// Logger gets a line for what an operator should look into; nil for none.
	Logger *slog.Logger

	once   sync.Once
	engine *dedup.Engine
}

var _ Consumer = (*Lease)(nil)

func (l *Lease) init() {
	l.engine = &dedup.Engine{
		Store: l.Store, Lease: l.Lease, Limit: l.Limit,
		TTL:       orDefault(l.Retention, DefaultRetention),
		Abandoned: dedup.Reexecute,
		Observer:  l.Observer, Logger: l.Logger,
	}
}

// Handle implements [Consumer].
func (l *Lease) Handle(ctx context.Context, id string, fn Handler) Result {
	l.once.Do(l.init)
	key, err := checkKey(l.Group, id)
	if err != nil {
		return invalid(err)
	}
	if err := l.engine.Validate(); err != nil {
		return invalid(fmt.Errorf("%w: %w", ErrConfig, err))
	}
	var attempt int
	var handlerErr error
	out, err := l.engine.Do(ctx, dedup.Request{Key: key, Fingerprint: []byte{}}, func(ctx context.Context) (dedup.Answer, error) {
		attempt = dedup.Attempt(ctx)
		if l.MaxAttempts > 0 && attempt > l.MaxAttempts {
			// Left unfinished, so that Reset can free it.
			handlerErr = fmt.Errorf("%w: started %d times, the most is %d", ErrPoison, attempt-1, l.MaxAttempts)
			attempt--
			return dedup.Answer{}, handlerErr
		}
		handlerErr = fn(OperationContext(ctx, l.Group, id))
		return dedup.Answer{}, handlerErr
	})
	return l.result(out, err, attempt, handlerErr)
}

func (l *Lease) result(out dedup.Outcome, err error, attempt int, handlerErr error) Result {
	if err != nil && attempt == 0 {
		return busy(err) // nothing ran
	}
	if err != nil {
		if handlerErr != nil && !errors.Is(err, handlerErr) {
			err = fmt.Errorf("%w (the handler failed too: %w)", err, handlerErr)
		}
		r := failed(err)
		r.Attempt = attempt
		freed := out.State == dedup.Won // by NotExecuted; the start was given back
		if r.Status == Failed && handlerErr != nil && !freed && l.MaxAttempts > 0 && attempt >= l.MaxAttempts {
			r.Status, r.Err = Poison, fmt.Errorf("%w: the last of %d tries failed: %w", ErrPoison, l.MaxAttempts, handlerErr)
		}
		return r
	}
	switch out.State {
	case dedup.Won:
		if out.Stored {
			return Result{Status: Done, Attempt: out.Attempt}
		}
		return Result{Status: Failed, Attempt: out.Attempt, Err: ErrNotExecuted}
	case dedup.Completed:
		return Result{Status: Done, Duplicate: true, Attempt: out.Attempt}
	case dedup.InProgress:
		return Result{Status: Busy, RetryAfter: out.RetryAfter, Err: ErrBusy}
	case dedup.Unknown:
		return Result{Status: Poison, Err: fmt.Errorf("%w: its outcome is unknown; see dedup.Store.Resolve", ErrPoison)}
	}
	return invalid(fmt.Errorf("%w: the store has %v for this event; is its group's name used for something else?", ErrConfig, out.State))
}

// Reset forgets the tries of an event that failed or is poison, so that its
// dead letter can be sent again. dedup.ErrNotFound if there is nothing to
// forget, dedup.ErrNotResolvable if the event was processed or is running.
func (l *Lease) Reset(ctx context.Context, id string) error {
	key, err := checkKey(l.Group, id)
	if err != nil {
		return err
	}
	if l.Store == nil {
		return fmt.Errorf("%w: Store is nil", ErrConfig)
	}
	return l.Store.Resolve(ctx, key, nil, 0)
}

// Purge forgets at most limit events, of every group in the Store, that are
// past their retention, and returns how many. Fewer than limit means that there
// are no more for now. dedup.Purger does it regularly.
func (l *Lease) Purge(ctx context.Context, limit int) (int, error) {
	if l.Store == nil {
		return 0, fmt.Errorf("%w: Store is nil", ErrConfig)
	}
	return l.Store.Purge(ctx, limit)
}
