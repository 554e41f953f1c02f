package watermillbroker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/effectonce/idempotency/consumer"
)

// DefaultCloseTimeout is [Subscriber.CloseTimeout] if it is 0; that of
// Watermill's router.
const DefaultCloseTimeout = 30 * time.Second

// Subscriber is a message.Subscriber that hands out each message of another one
// once. Inner and Consumer are required. An event is processed when the message
// that was handed out is acknowledged; if it is not, Inner delivers it again.
//
// The messages' contexts are those of the Consumer's handlers, so with
// consumer.Inbox they carry a transaction (consumer.Tx), which commits after
// the acknowledgement.
type Subscriber struct {
	Inner message.Subscriber

	// Consumer is called at each Subscribe and returns what handles that
	// subscription's events. Its group must be that of the subscription: where
	// each one gets every message (Watermill's GoChannel), each needs a group
	// of its own; and a message that is published to several topics under one
	// UUID needs a group for each topic.
	Consumer func(topic string) consumer.Consumer

	// ID finds the event's id ([UUID] if nil).
	ID func(msg *message.Message) (string, error)

	// DeadLetter keeps a poison message, and returns nil once that is durable;
	// the message is then acknowledged. Without it a poison message goes on
	// being delivered.
	DeadLetter func(ctx context.Context, msg *message.Message, r consumer.Result) error

	// CloseTimeout is how long a message that was handed out may yet be
	// acknowledged after Close, or after the end of Subscribe's context (30 s
	// if 0).
	CloseTimeout time.Duration

	// Logger gets a line for each message that was not done; nil for none.
	Logger *slog.Logger

	once          sync.Once
	quit          chan struct{}
	closing       sync.Once
	subscriptions sync.WaitGroup
}

var _ message.Subscriber = (*Subscriber)(nil)

// Reasons for which a message that was handed out is not processed.
var (
	// ErrNacked: it was acknowledged negatively.
	ErrNacked = errors.New("watermillbroker: message was nacked")

	// ErrClosed: it was not acknowledged before the subscription's end.
	ErrClosed = errors.New("watermillbroker: subscription has ended")
)

func (s *Subscriber) init() { s.quit = make(chan struct{}) }

// Subscribe implements message.Subscriber.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s.once.Do(s.init)
	switch {
	case s.Inner == nil:
		return nil, fmt.Errorf("watermillbroker: %w: Inner is nil", consumer.ErrConfig)
	case s.Consumer == nil:
		return nil, fmt.Errorf("watermillbroker: %w: Consumer is nil", consumer.ErrConfig)
	case s.CloseTimeout < 0:
		return nil, fmt.Errorf("watermillbroker: %w: CloseTimeout must not be negative", consumer.ErrConfig)
	}
	c := s.Consumer(topic)
	if c == nil {
		return nil, fmt.Errorf("watermillbroker: %w: Consumer returned nil for topic %q", consumer.ErrConfig, topic)
	}
	in, err := s.Inner.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	s.subscriptions.Go(func() {
		defer close(out)
		for msg := range in {
			s.deliver(ctx, c, msg, out)
		}
	})
	return out, nil
}

// Close implements message.Subscriber. It closes Inner and returns once all
// subscriptions have ended.
func (s *Subscriber) Close() error {
	s.once.Do(s.init)
	s.closing.Do(func() { close(s.quit) })
	var err error
	if s.Inner != nil {
		err = s.Inner.Close()
	}
	s.subscriptions.Wait()
	return err
}

func (s *Subscriber) deliver(subscription context.Context, c consumer.Consumer, msg *message.Message, out chan<- *message.Message) {
	ctx := msg.Context()
	d := consumer.Delivery{
		ID: idOf(msg, s.ID),
		Handle: func(ctx context.Context) error {
			return s.handOut(ctx, subscription, msg, out)
		},
	}
	if s.DeadLetter != nil {
		d.DeadLetter = func(ctx context.Context, r consumer.Result) error { return s.DeadLetter(ctx, msg, r) }
	}
	r := consumer.Deliver(ctx, c, d)
	if r.Err != nil && s.Logger != nil {
		s.Logger.LogAttrs(ctx, slog.LevelWarn, "watermillbroker: message "+r.Status.String(),
			slog.String("uuid", msg.UUID), slog.Any("err", r.Err))
	}
	switch r.Status {
	case consumer.Done, consumer.Poison:
		msg.Ack()
	case consumer.Busy:
		hold(subscription, s.quit, r.RetryAfter)
		msg.Nack()
	default:
		msg.Nack() // when it comes again is Inner's affair
	}
}

// handOut gives a copy of msg to the subscriber and waits for its word.
func (s *Subscriber) handOut(ctx, subscription context.Context, msg *message.Message, out chan<- *message.Message) error {
	given := msg.Copy()
	given.SetContext(ctx)
	select {
	case out <- given:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-subscription.Done():
		return ErrClosed
	case <-s.quit:
		return ErrClosed
	}
	select {
	case <-given.Acked():
		return nil
	case <-given.Nacked():
		return ErrNacked
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-subscription.Done():
	case <-s.quit:
	}
	timeout := s.CloseTimeout
	if timeout == 0 {
		timeout = DefaultCloseTimeout
	}
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case <-given.Acked():
		return nil
	case <-given.Nacked():
		return ErrNacked
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return ErrClosed
	}
}
