package watermillbroker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/effectonce/idempotency/consumer"
)

// ErrProduced: a handler below [Middleware] returned messages. They are
// published after it has returned, when the event is marked already, and would
// be lost if that failed. Nothing was marked. Write them to an outbox in the
// transaction, or use [Subscriber].
var ErrProduced = errors.New("watermillbroker: a handler below Middleware must not return messages")

// Middleware lets a Watermill handler run once for each message. Consumer is
// required. Its Wrap is a message.HandlerMiddleware:
//
//	router.AddMiddleware((&watermillbroker.Middleware{Consumer: inbox}).Wrap)
//
// The error for a poison message wraps consumer.ErrPoison. Put Watermill's
// middleware.PoisonQueueWithFilter outside of it to write dead letters.
type Middleware struct {
	Consumer consumer.Consumer

	// ID finds the event's id ([UUID] if nil).
	ID func(msg *message.Message) (string, error)
}

// UUID returns the message's UUID, which Watermill's publishers keep.
func UUID(msg *message.Message) (string, error) {
	if msg.UUID == "" {
		return "", fmt.Errorf("%w: the message's UUID is empty", consumer.ErrNoID)
	}
	return msg.UUID, nil
}

// Wrap returns a handler that calls h once for each message, with a context
// that the message carries too. It returns nil, so that the message is
// acknowledged, if the event is done. A message whose event is being handled
// right now is held for a moment before its error is returned.
func (m *Middleware) Wrap(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if m.Consumer == nil {
			return nil, fmt.Errorf("watermillbroker: %w: Consumer is nil", consumer.ErrConfig)
		}
		outer := msg.Context()
		r := consumer.Deliver(outer, m.Consumer, consumer.Delivery{
			ID: idOf(msg, m.ID),
			Handle: func(ctx context.Context) error {
				msg.SetContext(ctx)
				defer msg.SetContext(outer)
				produced, err := h(msg)
				if err == nil && len(produced) > 0 {
					err = ErrProduced
				}
				return err
			},
		})
		if r.Status == consumer.Busy {
			hold(outer, nil, r.RetryAfter)
		}
		return nil, r.Err
	}
}

func idOf(msg *message.Message, id func(*message.Message) (string, error)) func() (string, error) {
	if id == nil {
		id = UUID
	}
	return func() (string, error) { return id(msg) }
}

func hold(ctx context.Context, quit <-chan struct{}, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-quit:
	case <-t.C:
	}
}
