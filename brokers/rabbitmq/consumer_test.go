package rabbitbroker_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	rabbitbroker "github.com/effectonce/idempotency/brokers/rabbitmq"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

var errHandler = errors.New("the handler failed")

// queue is a quorum queue of its own with a dead-letter exchange, deleted after
// the test.
type queue struct {
	ch         *amqp.Channel
	name, dead string
}

func newQueue(t *testing.T) *queue {
	t.Helper()
	url := os.Getenv("IDEMPOTENCY_RABBITMQ_URL")
	if url == "" {
		url = "amqp://guest:guest@127.0.0.1:5672/"
	}
	conn, err := amqp.Dial(url)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("RabbitMQ (IDEMPOTENCY_RABBITMQ_URL): %v", err)
		}
		t.Skipf("no RabbitMQ (IDEMPOTENCY_RABBITMQ_URL): %v", err)
	}
	t.Cleanup(func() { conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	q := &queue{ch: ch, name: "consumertest_" + dedup.NewToken().String()}
	q.dead = q.name + "_dead"
	for name, args := range map[string]amqp.Table{
		q.dead: nil,
		q.name: {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": q.dead},
	} {
		if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := ch.QueueDelete(name, false, false, false); err != nil {
				t.Error(err)
			}
		})
	}
	return q
}

func (q *queue) publish(t *testing.T, id string) {
	t.Helper()
	err := q.ch.PublishWithContext(t.Context(), "", q.name, false, false, amqp.Publishing{
		MessageId: id, Headers: amqp.Table{"traceparent": "00-trace"},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// serve runs h until the test ends, or stop is called.
func (q *queue) serve(t *testing.T, h *rabbitbroker.Handler) (stop func() error) {
	t.Helper()
	if err := q.ch.Qos(10, 0, false); err != nil {
		t.Fatal(err)
	}
	deliveries, err := q.ch.Consume(q.name, "c", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Serve(ctx, deliveries) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// waitFor asks until f is true.
func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-ctx.Done():
			t.Fatalf("did not happen: %s", what)
		case <-tick.C:
		}
	}
}

type counter struct {
	mu   sync.Mutex
	runs map[string]int
}

func (c *counter) add(id string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs == nil {
		c.runs = map[string]int{}
	}
	c.runs[id]++
	return c.runs[id]
}

func (c *counter) get(id string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs[id]
}

func TestHandlerOneEffect(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	var effects, tries counter
	stop := q.serve(t, &rabbitbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		Workers:  2,
		Handle: func(_ context.Context, d amqp.Delivery) error {
			if d.Headers["traceparent"] != "00-trace" {
				t.Error("the trace context was not handed on")
			}
			if tries.add(d.MessageId) == 1 && d.MessageId == "fails-once" {
				return errHandler
			}
			effects.add(d.MessageId)
			return nil
		},
	})
	for range 3 {
		q.publish(t, "plain")
		q.publish(t, "fails-once")
	}
	q.publish(t, "last")
	waitFor(t, "all events handled", func() bool {
		return effects.get("plain") > 0 && effects.get("fails-once") > 0 && effects.get("last") > 0
	})
	waitFor(t, "the queue is empty", func() bool {
		s, err := q.ch.QueueDeclarePassive(q.name, true, false, false, false, nil)
		return err == nil && s.Messages == 0
	})
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve: %v", err)
	}
	if effects.get("plain") != 1 || effects.get("fails-once") != 1 {
		t.Errorf("effects: %v", effects.runs)
	}
}

func TestHandlerDeadLetterExchange(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	var tries counter
	q.serve(t, &rabbitbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		Handle: func(_ context.Context, d amqp.Delivery) error {
			tries.add(d.MessageId)
			return errHandler
		},
		MaxDeliveries:      2,
		DeadLetterExchange: true,
	})
	q.publish(t, "fails")
	q.publish(t, "")
	seen := map[string]bool{}
	waitFor(t, "two dead letters", func() bool {
		d, ok, err := q.ch.Get(q.dead, true)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			seen[d.MessageId] = true
		}
		return len(seen) == 2
	})
	if tries.get("fails") != 2 || tries.get("") != 0 {
		t.Errorf("tries: %v", tries.runs)
	}
}

func TestHandlerDeadLetterHook(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	var dead counter
	q.serve(t, &rabbitbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		Handle:   func(context.Context, amqp.Delivery) error { return consumer.ErrPoison },
		DeadLetter: func(_ context.Context, d amqp.Delivery, _ consumer.Result) error {
			if dead.add(d.MessageId) == 1 {
				return errHandler // the letter is lost: the message must come again
			}
			return nil
		},
		DeadLetterExchange: true, // comes after DeadLetter
	})
	q.publish(t, "poison")
	waitFor(t, "dead letter", func() bool { return dead.get("poison") == 2 })
	if _, ok, err := q.ch.Get(q.dead, true); ok || err != nil {
		t.Errorf("the exchange got it too: %v, %v", ok, err)
	}
}

func TestServeEndsWithItsChannel(t *testing.T) {
	t.Parallel()
	h := &rabbitbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		Handle:   func(context.Context, amqp.Delivery) error { return nil },
	}
	deliveries := make(chan amqp.Delivery)
	close(deliveries)
	if err := h.Serve(t.Context(), deliveries); !errors.Is(err, rabbitbroker.ErrClosed) {
		t.Errorf("Serve: %v", err)
	}
}

func TestIDs(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"cloudEvents:", "cloudEvents_"} {
		d := amqp.Delivery{MessageId: "m1", Headers: amqp.Table{prefix + "source": "/orders", prefix + "id": "1"}}
		if id, err := rabbitbroker.CloudEventsID(d); id != consumer.ID("/orders", "1") || err != nil {
			t.Errorf("CloudEventsID: %q, %v", id, err)
		}
		if id, err := rabbitbroker.MessageID(d); id != "m1" || err != nil {
			t.Errorf("MessageID: %q, %v", id, err)
		}
	}
	if _, err := rabbitbroker.CloudEventsID(amqp.Delivery{}); !errors.Is(err, consumer.ErrNoID) {
		t.Errorf("no headers: %v", err)
	}
}

func TestHandlerConfig(t *testing.T) {
	t.Parallel()
	c := &consumer.Lease{Store: memstore.New()}
	handle := func(context.Context, amqp.Delivery) error { return nil }
	for name, h := range map[string]*rabbitbroker.Handler{
		"no consumer":         {Handle: handle},
		"no handler":          {Consumer: c},
		"negative workers":    {Consumer: c, Handle: handle, Workers: -1},
		"negative deliveries": {Consumer: c, Handle: handle, MaxDeliveries: -1},
	} {
		if err := h.Serve(t.Context(), nil); !errors.Is(err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
