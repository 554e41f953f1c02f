package watermillbroker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	watermillbroker "github.com/effectonce/idempotency/brokers/watermill"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

var errHandler = errors.New("the handler failed")

func newMiddleware() *watermillbroker.Middleware {
	return &watermillbroker.Middleware{Consumer: &consumer.Lease{Store: memstore.New(), Group: "billing", MaxAttempts: 2}}
}

func TestMiddlewareRunsOnce(t *testing.T) {
	t.Parallel()
	runs := 0
	h := newMiddleware().Wrap(func(msg *message.Message) ([]*message.Message, error) {
		runs++
		if dedup.Attempt(msg.Context()) != runs {
			t.Errorf("attempt %d in run %d", dedup.Attempt(msg.Context()), runs)
		}
		if msg.Metadata.Get("traceparent") != "00-trace" {
			t.Error("metadata was not handed on")
		}
		if runs == 1 {
			return nil, errHandler
		}
		return nil, nil
	})
	msg := message.NewMessage("e1", nil)
	msg.Metadata.Set("traceparent", "00-trace")
	ctx := msg.Context()
	if _, err := h(msg); !errors.Is(err, errHandler) {
		t.Errorf("first delivery: %v", err)
	}
	for range 3 {
		if _, err := h(msg); err != nil {
			t.Errorf("redelivery: %v", err)
		}
	}
	if runs != 2 {
		t.Errorf("%d runs, want 2", runs)
	}
	if msg.Context() != ctx {
		t.Error("the message kept the handler's context")
	}
}

// Messages would be published after the mark; nothing may be lost that way.
func TestMiddlewareRefusesProducers(t *testing.T) {
	t.Parallel()
	produce := true
	h := newMiddleware().Wrap(func(msg *message.Message) ([]*message.Message, error) {
		if produce {
			return message.Messages{message.NewMessage("out", nil)}, nil
		}
		return nil, nil
	})
	out, err := h(message.NewMessage("e1", nil))
	if !errors.Is(err, watermillbroker.ErrProduced) || len(out) != 0 {
		t.Errorf("%v, %v", out, err)
	}
	produce = false
	if _, err := h(message.NewMessage("e1", nil)); err != nil {
		t.Errorf("the event was marked: %v", err)
	}
}

func TestMiddlewareBusyAndNoID(t *testing.T) {
	t.Parallel()
	m := newMiddleware()
	never := m.Wrap(func(*message.Message) ([]*message.Message, error) {
		t.Error("the handler ran, and must not have")
		return nil, nil
	})
	ends, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // the wait
	defer cancel()
	h := m.Wrap(func(*message.Message) ([]*message.Message, error) {
		dup := message.NewMessageWithContext(ends, "e1", nil)
		if _, err := never(dup); !errors.Is(err, consumer.ErrBusy) {
			t.Errorf("second copy: %v", err)
		}
		return nil, nil
	})
	if _, err := h(message.NewMessage("e1", nil)); err != nil {
		t.Error(err)
	}
	if _, err := never(message.NewMessage("", nil)); !errors.Is(err, consumer.ErrNoID) || !errors.Is(err, consumer.ErrPoison) {
		t.Errorf("no id: %v", err)
	}
	if _, err := (&watermillbroker.Middleware{}).Wrap(nil)(message.NewMessage("e", nil)); !errors.Is(err, consumer.ErrConfig) {
		t.Errorf("no consumer: %v", err)
	}
}

// In a router, poison goes to Watermill's own poison queue.
func TestMiddlewareInRouter(t *testing.T) {
	t.Parallel()
	pubsub := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	poison, err := middleware.PoisonQueueWithFilter(pubsub, "dead", func(err error) bool { return errors.Is(err, consumer.ErrPoison) })
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(poison, newMiddleware().Wrap)
	runs := 0
	router.AddConsumerHandler("h", "in", pubsub, func(*message.Message) error {
		runs++
		return errHandler
	})
	dead, err := pubsub.Subscribe(t.Context(), "dead")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- router.Run(t.Context()) }()
	<-router.Running()
	if err := pubsub.Publish("in", message.NewMessage("e1", nil)); err != nil {
		t.Fatal(err)
	}
	select {
	case msg := <-dead:
		msg.Ack()
		if msg.UUID != "e1" {
			t.Errorf("dead letter %q", msg.UUID)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no dead letter")
	}
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if runs != 2 {
		t.Errorf("%d runs, want 2", runs)
	}
}

// A router acknowledges after it has published what the handler returned; only
// then does the event count as processed.
func TestSubscriberWithPublishingHandler(t *testing.T) {
	t.Parallel()
	pubsub := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10, Persistent: true}, watermill.NopLogger{})
	defer pubsub.Close()
	sub := &watermillbroker.Subscriber{
		Inner: pubsub,
		Consumer: func(topic string) consumer.Consumer {
			return &consumer.Lease{Store: memstore.New(), Group: topic}
		},
		CloseTimeout: time.Second,
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	flaky := &flakyPublisher{Publisher: pubsub, failures: 2}
	router.AddHandler("h", "in", sub, "out", flaky, func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{message.NewMessage("of-"+msg.UUID, nil)}, nil
	})
	go router.Run(t.Context())
	<-router.Running()
	out, err := pubsub.Subscribe(t.Context(), "out")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"e1", "e1", "e2", "e1"} {
		if err := pubsub.Publish("in", message.NewMessage(id, nil)); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]int{}
	for len(seen) < 2 {
		select {
		case msg := <-out:
			msg.Ack()
			seen[msg.UUID]++
		case <-time.After(20 * time.Second):
			t.Fatalf("published only %v", seen)
		}
	}
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if seen["of-e1"] != 1 || seen["of-e2"] != 1 {
		t.Errorf("published %v, want each once", seen)
	}
}

type flakyPublisher struct {
	message.Publisher
	failures int
}

func (p *flakyPublisher) Publish(topic string, msgs ...*message.Message) error {
	if p.failures > 0 {
		p.failures--
		return errHandler
	}
	return p.Publisher.Publish(topic, msgs...)
}

func TestSubscriberDeadLetter(t *testing.T) {
	t.Parallel()
	pubsub := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10, Persistent: true}, watermill.NopLogger{})
	dead := make(chan string, 1)
	sub := &watermillbroker.Subscriber{
		Inner: pubsub,
		Consumer: func(topic string) consumer.Consumer {
			return &consumer.Lease{Store: memstore.New(), Group: topic, MaxAttempts: 2}
		},
		DeadLetter: func(_ context.Context, msg *message.Message, r consumer.Result) error {
			if !errors.Is(r.Err, watermillbroker.ErrNacked) {
				t.Errorf("dead because of %v", r.Err)
			}
			dead <- msg.UUID
			return nil
		},
		CloseTimeout: time.Millisecond,
	}
	msgs, err := sub.Subscribe(t.Context(), "in")
	if err != nil {
		t.Fatal(err)
	}
	if err := pubsub.Publish("in", message.NewMessage("e1", nil)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		(<-msgs).Nack()
	}
	if id := <-dead; id != "e1" {
		t.Errorf("dead letter %q", id)
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	if _, open := <-msgs; open {
		t.Error("the channel is open after Close")
	}
}

func TestSubscriberConfig(t *testing.T) {
	t.Parallel()
	pubsub := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	some := func(string) consumer.Consumer { return &consumer.Lease{Store: memstore.New()} }
	for name, s := range map[string]*watermillbroker.Subscriber{
		"no inner":         {Consumer: some},
		"no consumer":      {Inner: pubsub},
		"nil consumer":     {Inner: pubsub, Consumer: func(string) consumer.Consumer { return nil }},
		"negative timeout": {Inner: pubsub, Consumer: some, CloseTimeout: -1},
	} {
		if _, err := s.Subscribe(t.Context(), "t"); !errors.Is(err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
