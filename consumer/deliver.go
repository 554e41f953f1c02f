package consumer

import (
	"context"
	"fmt"
)

// Delivery is one message as a broker hands it out, for [Deliver].
type Delivery struct {
	// ID finds the event's id. An event without one is [Poison], since no
	// redelivery will give it one.
	ID func() (string, error)

	// Handle does the work.
	Handle Handler

	// Deliveries is the broker's count, this one included; 0 if unknown. See
	// [Limit].
	Deliveries int

	// MaxDeliveries is after how many deliveries the event is Poison (0:
	// never).
	MaxDeliveries int

	// DeadLetter keeps an event that is Poison, and returns nil once that is
	// durable. It may be called again for the same event. nil for none.
	DeadLetter func(ctx context.Context, r Result) error
}

// Deliver handles a delivery from the id to the dead letter; it is what broker
// adapters have in common. Its result says how to settle the delivery:
//
//   - [Done]: acknowledge it.
//   - [Poison]: acknowledge it too, since DeadLetter has it.
//   - [Busy], [Failed]: have it delivered again after [Result.Delay]. A poison
//     event that DeadLetter did not take is Failed, with an error that wraps
//     [ErrPoison]: nothing is dropped.
func Deliver(ctx context.Context, c Consumer, d Delivery) Result {
	id, err := d.ID()
	if err == nil && id == "" {
		err = ErrNoID
	}
	var r Result
	if err != nil {
		r = Result{Status: Poison, Err: fmt.Errorf("%w: %w", ErrPoison, err)}
	} else {
		r = c.Handle(ctx, id, Limit(d.Handle, d.Deliveries, d.MaxDeliveries))
	}
	return bury(ctx, r, d.DeadLetter)
}

// bury gives a poison event to its DeadLetter.
func bury(ctx context.Context, r Result, deadLetter func(context.Context, Result) error) Result {
	if r.Status != Poison {
		return r
	}
	if deadLetter == nil {
		r.Status = Failed // nobody took it, so the sender must not think so
		return r
	}
	// The end of the caller must not keep a letter from being written.
	if err := deadLetter(context.WithoutCancel(ctx), r); err != nil {
		r.Status = Failed
		r.Err = fmt.Errorf("consumer: dead letter: %w (for: %w)", err, r.Err)
	}
	return r
}
