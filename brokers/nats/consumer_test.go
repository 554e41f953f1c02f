package natsbroker_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	natsbroker "github.com/effectonce/idempotency/brokers/nats"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

var errHandler = errors.New("the handler failed")

// stream is a stream of its own with one consumer, deleted after the test.
type stream struct {
	js       jetstream.JetStream
	name     string
	consumer jetstream.Consumer
}

func newStream(t *testing.T) *stream {
	t.Helper()
	url := os.Getenv("IDEMPOTENCY_NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	nc, err := nats.Connect(url)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("NATS (IDEMPOTENCY_NATS_URL): %v", err)
		}
		t.Skipf("no NATS (IDEMPOTENCY_NATS_URL): %v", err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	name := "consumertest_" + dedup.NewToken().String()
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: name, Subjects: []string{name}, Storage: jetstream.MemoryStorage,
		// So short that the server's own deduplication does not help.
		Duplicates: 100 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := js.DeleteStream(context.Background(), name); err != nil {
			t.Error(err)
		}
	})
	c, err := s.CreateOrUpdateConsumer(t.Context(), jetstream.ConsumerConfig{
		Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &stream{js: js, name: name, consumer: c}
}

// publish sends an event in another subject's stream position each time.
func (s *stream) publish(t *testing.T, id string) {
	t.Helper()
	msg := nats.NewMsg(s.name)
	if id != "" {
		msg.Header["Event-Id"] = []string{id}
	}
	msg.Header["Traceparent"] = []string{"00-trace"}
	if _, err := s.js.PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
}

func eventID(msg jetstream.Msg) (string, error) {
	if id := msg.Headers().Get("Event-Id"); id != "" {
		return id, nil
	}
	return "", consumer.ErrNoID
}

func (s *stream) consume(t *testing.T, h *natsbroker.Handler) {
	t.Helper()
	f, err := h.Func(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cc, err := s.consumer.Consume(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cc.Stop()
		<-cc.Closed()
	})
}

// settled waits until the server has no message left to deliver or to be
// acknowledged.
func (s *stream) settled(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := s.consumer.Info(ctx)
		if err != nil {
			t.Fatalf("messages are left: %v", err)
		}
		if info.NumPending == 0 && info.NumAckPending == 0 {
			return
		}
		<-tick.C
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
	s := newStream(t)
	var effects, tries counter
	s.consume(t, &natsbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		ID:       eventID,
		Handle: func(_ context.Context, msg jetstream.Msg) error {
			id := msg.Headers().Get("Event-Id")
			if msg.Headers().Get("Traceparent") != "00-trace" {
				t.Error("the trace context was not handed on")
			}
			if tries.add(id) == 1 && id == "fails-once" {
				return errHandler
			}
			effects.add(id)
			return nil
		},
	})
	for range 3 {
		s.publish(t, "plain")
		s.publish(t, "fails-once")
	}
	s.settled(t)
	if effects.get("plain") != 1 || effects.get("fails-once") != 1 {
		t.Errorf("effects: %v", effects.runs)
	}
}

func TestHandlerPoison(t *testing.T) {
	t.Parallel()
	s := newStream(t)
	var dead, tries counter
	s.consume(t, &natsbroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		ID:       eventID,
		Handle: func(context.Context, jetstream.Msg) error {
			tries.add("fails")
			return errHandler
		},
		MaxDeliveries: 2,
		DeadLetter: func(_ context.Context, msg jetstream.Msg, r consumer.Result) error {
			if !errors.Is(r.Err, consumer.ErrPoison) {
				t.Errorf("dead because of %v", r.Err)
			}
			if dead.add(msg.Headers().Get("Event-Id")) == 1 {
				return errHandler // the letter is lost: the message must come again
			}
			return nil
		},
	})
	s.publish(t, "fails")
	s.publish(t, "")
	s.settled(t)
	if tries.get("fails") != 2 || dead.get("fails") != 2 || dead.get("") != 2 {
		t.Errorf("tries %v, dead letters %v", tries.runs, dead.runs)
	}
}

// beatingMsg reports what the server is told about it.
type beatingMsg struct {
	jetstream.Msg
	beats, acks chan struct{}
}

func (beatingMsg) Metadata() (*jetstream.MsgMetadata, error) {
	return &jetstream.MsgMetadata{NumDelivered: 1}, nil
}
func (beatingMsg) Headers() nats.Header { return nats.Header{"Nats-Msg-Id": {"e1"}} }
func (m beatingMsg) InProgress() error  { m.beats <- struct{}{}; return nil }
func (m beatingMsg) Ack() error         { close(m.acks); return nil }

// While a handler runs, the server is told so.
func TestHandlerKeepAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		msg := beatingMsg{beats: make(chan struct{}), acks: make(chan struct{})}
		h := &natsbroker.Handler{
			Consumer: &consumer.Lease{Store: memstore.New()},
			Handle: func(context.Context, jetstream.Msg) error {
				for range 3 {
					<-msg.beats
				}
				return nil
			},
			KeepAlive: 10 * time.Second,
		}
		began := time.Now()
		if r := h.Deliver(t.Context(), msg); r.Status != consumer.Done {
			t.Fatalf("%+v", r)
		}
		<-msg.acks
		if took := time.Since(began); took != 30*time.Second {
			t.Errorf("three beats took %v", took)
		}
	})
}

func TestIDs(t *testing.T) {
	t.Parallel()
	s := newStream(t)
	msg := nats.NewMsg(s.name)
	msg.Header["Nats-Msg-Id"] = []string{"n1"}
	msg.Header["ce-source"] = []string{"/orders"}
	msg.Header["ce-id"] = []string{"1"}
	if _, err := s.js.PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
	if _, err := s.js.PublishMsg(t.Context(), nats.NewMsg(s.name)); err != nil {
		t.Fatal(err)
	}
	batch, err := s.consumer.Fetch(2)
	if err != nil {
		t.Fatal(err)
	}
	first, second := <-batch.Messages(), <-batch.Messages()
	if id, err := natsbroker.MsgID(first); id != "n1" || err != nil {
		t.Errorf("MsgID: %q, %v", id, err)
	}
	if id, err := natsbroker.CloudEventsID(first); id != consumer.ID("/orders", "1") || err != nil {
		t.Errorf("CloudEventsID: %q, %v", id, err)
	}
	for name, f := range map[string]func(jetstream.Msg) (string, error){"MsgID": natsbroker.MsgID, "CloudEventsID": natsbroker.CloudEventsID} {
		if id, err := f(second); !errors.Is(err, consumer.ErrNoID) {
			t.Errorf("%s without headers: %q, %v", name, id, err)
		}
	}
	a, err1 := natsbroker.StreamSequence(first)
	b, err2 := natsbroker.StreamSequence(second)
	if err1 != nil || err2 != nil || a == b || a == "" {
		t.Errorf("StreamSequence: %q, %v and %q, %v", a, err1, b, err2)
	}
}

func TestHandlerConfig(t *testing.T) {
	t.Parallel()
	c := &consumer.Lease{Store: memstore.New()}
	handle := func(context.Context, jetstream.Msg) error { return nil }
	for name, h := range map[string]*natsbroker.Handler{
		"no consumer":         {Handle: handle},
		"no handler":          {Consumer: c},
		"negative keep-alive": {Consumer: c, Handle: handle, KeepAlive: -1},
		"negative deliveries": {Consumer: c, Handle: handle, MaxDeliveries: -1},
	} {
		if _, err := h.Func(t.Context()); !errors.Is(err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
