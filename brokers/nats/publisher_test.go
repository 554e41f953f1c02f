package natsbroker_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	natsbroker "github.com/effectonce/idempotency/brokers/nats"
	"github.com/effectonce/idempotency/outbox"
)

func message(subject, body string) outbox.Message {
	return outbox.Message{ID: outbox.NewID(), Topic: subject, Payload: []byte(body), Header: map[string]string{"traceparent": "00-1"}}
}

func newPublisher(t *testing.T) (*natsbroker.Publisher, jetstream.Stream, string) {
	t.Helper()
	s := newStream(t)
	str, err := s.js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{
		Name: s.name, Subjects: []string{s.name}, Storage: jetstream.MemoryStorage, MaxMsgSize: 10000})
	if err != nil {
		t.Fatal(err)
	}
	return &natsbroker.Publisher{JetStream: s.js}, str, s.name
}

// A resend within the stream's window is answered "duplicate", and published.
func TestPublisherResend(t *testing.T) {
	t.Parallel()
	p, str, subject := newPublisher(t)
	m := message(subject, "once")
	for range 3 {
		if err := p.Publish(t.Context(), []outbox.Message{m})[0]; err != nil {
			t.Fatal(err)
		}
	}
	info, err := str.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.State.Msgs != 1 {
		t.Errorf("%d messages in the stream, want 1", info.State.Msgs)
	}
	got, err := str.GetMsg(t.Context(), info.State.LastSeq)
	if err != nil {
		t.Fatal(err)
	}
	if string(got.Data) != "once" || fmt.Sprint(got.Header["traceparent"]) != "[00-1]" || got.Header.Get("Nats-Msg-Id") != m.ID {
		t.Errorf("the stream has %q with %v", got.Data, got.Header)
	}
}

// Each message has its own result: one that is too large, one without a stream.
func TestPublisherPositional(t *testing.T) {
	t.Parallel()
	p, str, subject := newPublisher(t)
	large := message(subject, string(make([]byte, 20000)))
	errs := p.Publish(t.Context(), []outbox.Message{message(subject, "a"), large, message(subject+".none", "b"), message(subject, "c")})
	if errs[0] != nil || !errors.Is(errs[1], outbox.ErrPermanent) || !errors.Is(errs[2], outbox.ErrUnreachable) || errs[3] != nil {
		t.Errorf("results: %v", errs)
	}
	if info, err := str.Info(t.Context()); err != nil || info.State.Msgs != 2 {
		t.Errorf("%+v, %v; want 2 messages", info, err)
	}
}

func TestPublisherUnreachable(t *testing.T) {
	t.Parallel()
	nc, err := nats.Connect("nats://127.0.0.1:1", nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	errs := (&natsbroker.Publisher{JetStream: js}).Publish(t.Context(), []outbox.Message{message("a", ""), message("b", "")})
	for _, err := range errs {
		if !errors.Is(err, outbox.ErrUnreachable) {
			t.Errorf("%v, want ErrUnreachable", err)
		}
	}
	if n := nc.Stats().OutMsgs; n != 0 {
		t.Errorf("%d messages kept for later", n)
	}
	if err := (&natsbroker.Publisher{}).Publish(t.Context(), make([]outbox.Message, 1))[0]; err == nil || errors.Is(err, outbox.ErrUnreachable) {
		t.Errorf("without JetStream: %v", err)
	}
}
