package outbox_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	kafkabroker "github.com/effectonce/idempotency/brokers/kafka"
	natsbroker "github.com/effectonce/idempotency/brokers/nats"
	rabbitbroker "github.com/effectonce/idempotency/brokers/rabbitmq"
	"github.com/effectonce/idempotency/outbox"
	"github.com/effectonce/idempotency/outbox/httppublisher"
)

// broker says where messages go to, in a form that can be handed to another
// process.
type broker struct {
	Kind, Addr, Topic string
}

var brokerKinds = []string{"nats", "rabbitmq", "kafka", "http"}

// delivery is a message as the broker has it.
type delivery struct{ ID, Payload string }

// newBroker returns a broker with an empty topic of its own, and how to read all
// that it has.
func newBroker(t *testing.T, kind string) (b broker, read func() []delivery) {
	t.Helper()
	b = broker{Kind: kind, Topic: "outbox-test-" + outbox.NewID()}
	switch kind {
	case "nats":
		b.Addr = cmp.Or(os.Getenv("IDEMPOTENCY_NATS_URL"), nats.DefaultURL)
		return b, b.nats(t)
	case "rabbitmq":
		b.Addr = cmp.Or(os.Getenv("IDEMPOTENCY_RABBITMQ_URL"), "amqp://guest:guest@127.0.0.1:5672/")
		return b, b.rabbitmq(t)
	case "kafka":
		return b, b.kafka(t)
	}
	return b, b.http(t)
}

// publisher connects to the broker.
func (b broker) publisher() (outbox.Publisher, error) {
	switch b.Kind {
	case "nats":
		nc, err := nats.Connect(b.Addr)
		if err != nil {
			return nil, err
		}
		js, err := jetstream.New(nc)
		return &natsbroker.Publisher{JetStream: js}, err
	case "rabbitmq":
		return &rabbitbroker.Publisher{Dial: func() (*amqp.Connection, error) { return amqp.Dial(b.Addr) }}, nil
	case "kafka":
		client, err := kgo.NewClient(kgo.SeedBrokers(b.Addr), kgo.RecordDeliveryTimeout(10*time.Second))
		if err != nil {
			return nil, err
		}
		return kafkabroker.NewPublisher(client)
	case "http":
		return &httppublisher.Publisher{URL: func(outbox.Message) (string, error) { return b.Addr, nil }}, nil
	}
	return nil, fmt.Errorf("no such broker: %q", b.Kind)
}

func (b broker) nats(t *testing.T) func() []delivery {
	nc, err := nats.Connect(b.Addr)
	if err != nil {
		missing(t, "nats", err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: b.Topic, Subjects: []string{b.Topic}, Storage: jetstream.MemoryStorage})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = js.DeleteStream(context.Background(), b.Topic) })
	return func() (all []delivery) {
		info, err := stream.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for seq := uint64(1); seq <= info.State.LastSeq; seq++ {
			m, err := stream.GetMsg(t.Context(), seq)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, delivery{m.Header.Get(nats.MsgIdHdr), string(m.Data)})
		}
		return all
	}
}

func (b broker) rabbitmq(t *testing.T) func() []delivery {
	conn, err := amqp.Dial(b.Addr)
	if err != nil {
		missing(t, "rabbitmq", err)
	}
	t.Cleanup(func() { conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare(b.Topic, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = ch.QueueDelete(b.Topic, false, false, false) })
	return func() (all []delivery) {
		for {
			m, ok, err := ch.Get(b.Topic, true)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				return all
			}
			all = append(all, delivery{m.MessageId, string(m.Body)})
		}
	}
}

// kafka is a cluster in this process, since none runs here.
func (b *broker) kafka(t *testing.T) func() []delivery {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, b.Topic))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	b.Addr = cluster.ListenAddrs()[0]
	return func() (all []delivery) {
		client, err := kgo.NewClient(kgo.SeedBrokers(b.Addr), kgo.ConsumeTopics(b.Topic))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		for {
			fetches := client.PollFetches(t.Context())
			if err := fetches.Err(); err != nil {
				t.Fatal(err)
			}
			end := false
			fetches.EachPartition(func(p kgo.FetchTopicPartition) {
				for _, r := range p.Records {
					var id string
					for _, h := range r.Headers {
						if h.Key == kafkabroker.IDHeader {
							id = string(h.Value)
						}
					}
					all = append(all, delivery{id, string(r.Value)})
					end = r.Offset+1 == p.HighWatermark
				}
			})
			if end {
				return all
			}
		}
	}
}

func (b *broker) http(t *testing.T) func() []delivery {
	var mu sync.Mutex
	var all []delivery
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, delivery{r.Header.Get("Idempotency-Key"), string(body)})
	}))
	t.Cleanup(srv.Close)
	b.Addr = srv.URL
	return func() []delivery {
		mu.Lock()
		defer mu.Unlock()
		return all
	}
}
