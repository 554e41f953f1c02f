package kafkabroker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	kafkabroker "github.com/effectonce/idempotency/brokers/kafka"
	"github.com/effectonce/idempotency/outbox"
)

func newPublisher(t *testing.T, cluster []kgo.Opt, opts ...kgo.Opt) *kafkabroker.Publisher {
	t.Helper()
	client, err := kgo.NewClient(append(cluster[:len(cluster):len(cluster)], append(opts, kgo.RecordDeliveryTimeout(2*time.Second))...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	p, err := kafkabroker.NewPublisher(client)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPublisher(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 3)
	p := newPublisher(t, cluster, kgo.ProducerBatchMaxBytes(10000))
	msgs := []outbox.Message{
		{ID: "1", Topic: topic, Key: "k", Payload: []byte("a"), Header: map[string]string{"traceparent": "00-1"}},
		{ID: "2", Topic: topic, Payload: make([]byte, 20000)},
		{ID: "3", Topic: topic, Key: "k", Payload: []byte("b")},
	}
	// A context that has ended changes nothing: the outcome is waited for.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	errs := p.Publish(ctx, msgs)
	if errs[0] != nil || !errors.Is(errs[1], outbox.ErrPermanent) || errs[2] != nil {
		t.Fatalf("results: %v", errs)
	}
	c, err := kgo.NewClient(append(cluster[:len(cluster):len(cluster)], kgo.ConsumeTopics(topic))...)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got []*kgo.Record
	for len(got) < 2 {
		f := c.PollFetches(t.Context())
		if err := f.Err(); err != nil {
			t.Fatal(err)
		}
		got = append(got, f.Records()...)
	}
	if string(got[0].Value) != "a" || string(got[1].Value) != "b" || got[0].Partition != got[1].Partition || string(got[0].Key) != "k" {
		t.Errorf("records %v, %v", got[0], got[1])
	}
	if id, err := kafkabroker.HeaderID(kafkabroker.IDHeader)(got[1]); id != "3" || err != nil {
		t.Errorf("id %q, %v", id, err)
	}
	if v, err := kafkabroker.HeaderID("traceparent")(got[0]); v != "00-1" || err != nil {
		t.Errorf("traceparent %q, %v", v, err)
	}
}

func TestPublisherUnreachable(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
	if err != nil {
		t.Fatal(err)
	}
	p := newPublisher(t, []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)})
	cluster.Close()
	for _, err := range p.Publish(t.Context(), []outbox.Message{{ID: "1", Topic: topic}, {ID: "2", Topic: topic}}) {
		if !errors.Is(err, outbox.ErrUnreachable) {
			t.Errorf("%v, want ErrUnreachable", err)
		}
	}
}

// Clients by which messages get lost, or that wait for ever, are refused.
func TestNewPublisherRefuses(t *testing.T) {
	t.Parallel()
	timeout := kgo.RecordDeliveryTimeout(time.Second)
	for name, opts := range map[string][]kgo.Opt{
		"no timeout": nil,
		"cancel":     {timeout, kgo.AllowIdempotentProduceCancellation()},
		"acks":       {timeout, kgo.DisableIdempotentWrite(), kgo.RequiredAcks(kgo.LeaderAck())},
	} {
		client, err := kgo.NewClient(opts...)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := kafkabroker.NewPublisher(client); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := kafkabroker.NewPublisher(nil); err == nil {
		t.Error("nil: accepted")
	}
}
