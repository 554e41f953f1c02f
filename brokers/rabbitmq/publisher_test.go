package rabbitbroker_test

import (
	"cmp"
	"errors"
	"net"
	"os"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	rabbitbroker "github.com/effectonce/idempotency/brokers/rabbitmq"
	"github.com/effectonce/idempotency/outbox"
)

func dial() (*amqp.Connection, error) {
	return amqp.Dial(cmp.Or(os.Getenv("IDEMPOTENCY_RABBITMQ_URL"), "amqp://guest:guest@127.0.0.1:5672/"))
}

func newPublisher(t *testing.T) *rabbitbroker.Publisher {
	t.Helper()
	p := &rabbitbroker.Publisher{Dial: dial}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// Each message has its own result, also when no queue takes it.
func TestPublisher(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	p := newPublisher(t)
	errs := p.Publish(t.Context(), []outbox.Message{
		{ID: "1", Topic: q.name, Payload: []byte("a"), Header: map[string]string{"traceparent": "00-1"}},
		{ID: "2", Topic: q.name + "_none"},
		{ID: "3", Topic: q.name, Payload: []byte("b")},
	})
	if errs[0] != nil || !errors.Is(errs[1], rabbitbroker.ErrUnroutable) || errors.Is(errs[1], outbox.ErrUnreachable) || errs[2] != nil {
		t.Fatalf("results: %v", errs)
	}
	for _, want := range []string{"1", "3"} {
		d, ok, err := q.ch.Get(q.name, true)
		if err != nil || !ok || d.MessageId != want || d.DeliveryMode != amqp.Persistent {
			t.Fatalf("got %+v, %t, %v; want message %s", d, ok, err, want)
		}
		if want == "1" && (string(d.Body) != "a" || d.Headers["traceparent"] != "00-1") {
			t.Errorf("got %q with %v", d.Body, d.Headers)
		}
	}
}

// A message over which the broker closes the channel takes no other along.
func TestPublisherChannelClosed(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	p := newPublisher(t)
	errs := p.Publish(t.Context(), []outbox.Message{
		{ID: "1", Topic: q.name},
		{ID: "2", Topic: q.name, Header: map[string]string{"CC": "not a list"}}, // RabbitMQ wants an array there
		{ID: "3", Topic: q.name},
	})
	if errs[0] != nil || errs[1] == nil || errors.Is(errs[1], outbox.ErrUnreachable) || errs[2] != nil {
		t.Fatalf("results: %v", errs)
	}
}

// A connection that is cut is unreachable, and opened again for the next call.
func TestPublisherReconnects(t *testing.T) {
	t.Parallel()
	q := newQueue(t)
	var conn net.Conn
	p := newPublisher(t)
	p.Dial = func() (*amqp.Connection, error) {
		return amqp.DialConfig(cmp.Or(os.Getenv("IDEMPOTENCY_RABBITMQ_URL"), "amqp://guest:guest@127.0.0.1:5672/"), amqp.Config{
			Dial: func(network, addr string) (c net.Conn, err error) {
				conn, err = net.Dial(network, addr)
				return conn, err
			},
		})
	}
	m := []outbox.Message{{ID: "1", Topic: q.name}}
	if errs := p.Publish(t.Context(), m); errs[0] != nil {
		t.Fatal(errs[0])
	}
	conn.Close()
	// The client may have seen it already, and then has a new connection.
	if errs := p.Publish(t.Context(), m); errs[0] != nil && !errors.Is(errs[0], outbox.ErrUnreachable) {
		t.Fatalf("%v, want ErrUnreachable", errs[0])
	}
	if errs := p.Publish(t.Context(), m); errs[0] != nil {
		t.Fatal(errs[0])
	}
}

func TestPublisherUnreachable(t *testing.T) {
	t.Parallel()
	p := &rabbitbroker.Publisher{Dial: func() (*amqp.Connection, error) { return amqp.Dial("amqp://127.0.0.1:1/") }}
	for _, err := range p.Publish(t.Context(), make([]outbox.Message, 2)) {
		if !errors.Is(err, outbox.ErrUnreachable) {
			t.Errorf("%v, want ErrUnreachable", err)
		}
	}
	// An exchange that isn't there tells nothing against the message.
	newQueue(t) // skips where there is no RabbitMQ
	p = newPublisher(t)
	p.Exchange = "none_" + outbox.NewID()
	for _, err := range p.Publish(t.Context(), make([]outbox.Message, 2)) {
		if !errors.Is(err, outbox.ErrUnreachable) {
			t.Errorf("%v, want ErrUnreachable", err)
		}
	}
}
