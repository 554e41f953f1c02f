package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Handler does the work of one event.
//
// Its context names the operation, so that outgoing calls made with
// idempotency.WithStep carry the same key when the event is handled again. An
// error means that the event is not processed and should be delivered again;
// one that wraps [ErrPoison] means that it never can be.
//
// A panic passes through, after whatever was held for the event was let go.
type Handler func(ctx context.Context) error

// Consumer makes sure that each event is handled once. [Inbox], [Lease] and
// [Window] are Consumers. It is safe for concurrent use.
type Consumer interface {
	// Handle runs fn unless the event id was processed before or is being
	// processed now. id is what the sender calls the event: any string that is
	// not empty.
	Handle(ctx context.Context, id string, fn Handler) Result
}

// BatchConsumer is a [Consumer] that has a better way to handle many events
// than one by one.
type BatchConsumer interface {
	Consumer

	// HandleBatch does what the function [HandleBatch] says.
	HandleBatch(ctx context.Context, ids []string, fn BatchHandler) []Result
}

// BatchHandler does the work of the event at position i of the batch.
type BatchHandler func(ctx context.Context, i int) error

// Status says what is to become of a delivery.
type Status uint8

// The statuses. The zero value is none of them, so that a result that nobody
// filled in acknowledges nothing.
const (
	// Done: the event's effect is durable, from this delivery or an earlier
	// one. Acknowledge it.
	Done Status = iota + 1

	// Busy: the handler did not run, because another copy of the event is being
	// handled or because the store could not be asked (Err says why). Deliver
	// it again after RetryAfter. It says nothing against the event, and should
	// not count against it.
	Busy

	// Failed: the handler ran and failed, or what it did could not be made
	// durable. The event is not marked. Deliver it again.
	Failed

	// Poison: the event will not be handled: its handler said that it can't be,
	// or too many tries have failed. Put it with the dead letters.
	Poison
)

// String returns the status's name in lower case.
func (s Status) String() string {
	switch s {
	case Done:
		return "done"
	case Busy:
		return "busy"
	case Failed:
		return "failed"
	case Poison:
		return "poison"
	}
	return "invalid"
}

// Result is what became of one delivery.
type Result struct {
	Status Status

	// Duplicate says, for Done, that the event was processed earlier and the
	// handler did not run now.
	Duplicate bool

	// Attempt counts the runs that were started for the event, where the mode
	// counts them ([Lease]); else 0.
	Attempt int

	// RetryAfter is how long to wait before the next delivery, for Busy.
	RetryAfter time.Duration

	// Err is why the event is not Done; nil if it is. For Failed and Poison it
	// wraps the handler's error, if there was one.
	Err error
}

// Delay is how long a broker should wait before it delivers the event again:
// RetryAfter where it is set, else a second that doubles with each delivery, up
// to a minute. deliveries is the broker's count, 0 if unknown.
func (r Result) Delay(deliveries int) time.Duration {
	if r.RetryAfter > 0 {
		return r.RetryAfter
	}
	return min(time.Second<<min(max(deliveries-1, 0), 6), time.Minute)
}

// Errors in [Result.Err], beside those of the handler and of the store.
var (
	// ErrPoison is wrapped by a handler to say that the event can never be
	// processed, and by the results with the status [Poison].
	ErrPoison = errors.New("consumer: event cannot be processed")

	// ErrBusy: another copy of the event is being processed.
	ErrBusy = errors.New("consumer: event is being processed")

	// ErrNotExecuted: the handler returned no error but called
	// dedup.NotExecuted, so the event is not processed.
	ErrNotExecuted = errors.New("consumer: handler says that nothing was executed")

	// ErrNoID: the event carries no usable id.
	ErrNoID = errors.New("consumer: event has no id")

	// ErrConfig: a field cannot work. Nothing was processed.
	ErrConfig = errors.New("consumer: invalid configuration")
)

// DefaultRetryAfter is how long a busy event is left alone if nothing better is
// known.
const DefaultRetryAfter = time.Second

// Limit stops an event that was delivered too often: the handler it returns
// fails with [ErrPoison], without calling fn, once deliveries is above most.
// deliveries is the broker's count, the current one included; where either is
// 0 or less, fn is returned as it is.
//
// The limit is checked once it is known that the event was not processed
// before, so a processed event is acknowledged however often it comes. The
// broker counts deliveries that were answered [Busy] too, also those of a
// database outage: leave room for them. [Lease.MaxAttempts] counts only starts.
func Limit(fn Handler, deliveries, most int) Handler {
	if most <= 0 || deliveries <= most {
		return fn
	}
	return func(context.Context) error {
		return fmt.Errorf("%w: delivered %d times, the most is %d", ErrPoison, deliveries, most)
	}
}

// HandleBatch handles the events in order and returns one result for each, at
// the same position. One event's failure does not stop the others. An id that
// occurs more than once is handled at its first position, and the later ones
// have the same result. Once ctx has ended, the events that are left are
// reported as [Busy].
//
// If c is a [BatchConsumer], its own method is called.
func HandleBatch(ctx context.Context, c Consumer, ids []string, fn BatchHandler) []Result {
	if b, ok := c.(BatchConsumer); ok {
		return b.HandleBatch(ctx, ids, fn)
	}
	results := make([]Result, len(ids))
	first := make(map[string]int, len(ids))
	for i, id := range ids {
		if j, ok := first[id]; ok {
			results[i] = again(results[j])
			continue
		}
		first[id] = i
		if ctx.Err() != nil {
			results[i] = busy(context.Cause(ctx))
			continue
		}
		results[i] = c.Handle(ctx, id, func(ctx context.Context) error { return fn(ctx, i) })
	}
	return results
}

// again is the result of a second copy within a batch.
func again(r Result) Result {
	r.Duplicate = r.Status == Done
	return r
}

// busy is the result of an event that nobody tried to handle.
func busy(err error) Result {
	return Result{Status: Busy, RetryAfter: DefaultRetryAfter, Err: err}
}

// failed is the result of an event whose handler, or what came after, failed.
func failed(err error) Result {
	if errors.Is(err, ErrPoison) {
		return Result{Status: Poison, Err: err}
	}
	return Result{Status: Failed, Err: err}
}

// invalid is the result where no redelivery can help before somebody changes
// the program or its settings. It is Failed, since the event is not to blame.
func invalid(err error) Result { return Result{Status: Failed, Err: err} }

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

func checkKey(group, id string) (dedup.Key, error) {
	if id == "" {
		return dedup.Key{}, fmt.Errorf("%w: it is empty", ErrNoID)
	}
	k := dedup.Key{Scope: group, ID: ID(id)}
	if err := k.Validate(); err != nil {
		return dedup.Key{}, fmt.Errorf("%w: the group: %w", ErrConfig, err)
	}
	return k, nil
}
