package consumer_test

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	kafkabroker "github.com/effectonce/idempotency/brokers/kafka"
	natsbroker "github.com/effectonce/idempotency/brokers/nats"
	rabbitbroker "github.com/effectonce/idempotency/brokers/rabbitmq"
	watermillbroker "github.com/effectonce/idempotency/brokers/watermill"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
)

// workers is how many consume at the same time.
const workers = 3

func overJetStream(t *testing.T, ids []string, j job) {
	nc, err := nats.Connect(cmp.Or(os.Getenv("IDEMPOTENCY_NATS_URL"), nats.DefaultURL))
	if err != nil {
		missing(t, "NATS", "IDEMPOTENCY_NATS_URL", err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	must(t, err)
	name := "ct_" + dedup.NewToken().String()
	// The server's own deduplication is to be no help: the copies come under
	// a header that it does not know.
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name}, Storage: jetstream.MemoryStorage})
	must(t, err)
	defer js.DeleteStream(context.Background(), name)
	cons, err := s.CreateOrUpdateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy})
	must(t, err)
	event := func(msg jetstream.Msg) string { return msg.Headers().Get("Event-Id") }
	for range workers {
		f, err := (&natsbroker.Handler{
			Consumer: j.consumer(),
			ID:       func(msg jetstream.Msg) (string, error) { return event(msg), nil },
			Handle: func(ctx context.Context, msg jetstream.Msg) error {
				return j.handle(ctx, event(msg), msg.Headers().Get("Traceparent"))
			},
			DeadLetter: func(_ context.Context, msg jetstream.Msg, _ consumer.Result) error {
				j.dead(event(msg))
				return nil
			},
		}).Func(t.Context())
		must(t, err)
		cc, err := cons.Consume(f, jetstream.PullMaxMessages(1))
		must(t, err)
		defer func() {
			cc.Stop()
			<-cc.Closed()
		}()
	}
	for _, id := range ids {
		msg := nats.NewMsg(name)
		msg.Header["Event-Id"] = []string{id}
		msg.Header["Traceparent"] = []string{trace}
		msg.Data = []byte(payload)
		_, err := js.PublishMsg(t.Context(), msg)
		must(t, err)
	}
	waitFor(t, "all messages settled", func() bool {
		info, err := cons.Info(t.Context())
		must(t, err)
		return info.NumPending == 0 && info.NumAckPending == 0
	})
}

func overRabbitMQ(t *testing.T, ids []string, j job) {
	conn, err := amqp.Dial(cmp.Or(os.Getenv("IDEMPOTENCY_RABBITMQ_URL"), "amqp://guest:guest@127.0.0.1:5672/"))
	if err != nil {
		missing(t, "RabbitMQ", "IDEMPOTENCY_RABBITMQ_URL", err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	must(t, err)
	name := "ct_" + dedup.NewToken().String()
	_, err = ch.QueueDeclare(name, true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
	must(t, err)
	defer ch.QueueDelete(name, false, false, false)
	must(t, ch.Qos(workers, 0, false))
	deliveries, err := ch.Consume(name, "c", false, false, false, false, nil)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	// Settled is counted by the adapter's own acknowledgements, since a
	// quorum queue's count of messages lags behind.
	var settled atomic.Int64
	counted := make(chan amqp.Delivery)
	go func() {
		defer close(counted)
		for d := range deliveries {
			d.Acknowledger = countingAcks{d.Acknowledger, &settled}
			select {
			case counted <- d:
			case <-ctx.Done():
				return
			}
		}
	}()
	var serving sync.WaitGroup
	for range workers {
		h := &rabbitbroker.Handler{
			Consumer: j.consumer(),
			Handle: func(ctx context.Context, d amqp.Delivery) error {
				tp, _ := d.Headers["traceparent"].(string)
				return j.handle(ctx, d.MessageId, tp)
			},
			DeadLetter: func(_ context.Context, d amqp.Delivery, _ consumer.Result) error {
				j.dead(d.MessageId)
				return nil
			},
		}
		serving.Go(func() { _ = h.Serve(ctx, counted) })
	}
	for _, id := range ids {
		must(t, ch.PublishWithContext(t.Context(), "", name, false, false, amqp.Publishing{
			MessageId: id, Headers: amqp.Table{"traceparent": trace}, Body: []byte(payload),
		}))
	}
	waitFor(t, "all messages acknowledged", func() bool { return settled.Load() == int64(len(ids)) })
	cancel()
	serving.Wait()
}

type countingAcks struct {
	amqp.Acknowledger
	n *atomic.Int64
}

func (c countingAcks) Ack(tag uint64, multiple bool) error {
	c.n.Add(1)
	return c.Acknowledger.Ack(tag, multiple)
}

func overKafka(t *testing.T, ids []string, j job) {
	const topic, partitions = "events", 3
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(partitions, topic))
	must(t, err)
	defer cluster.Close()
	seeds := kgo.SeedBrokers(cluster.ListenAddrs()...)
	client, err := kgo.NewClient(seeds, kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	must(t, err)
	defer client.Close()
	for i, id := range ids {
		// Copies of one event lie in different partitions.
		must(t, client.ProduceSync(t.Context(), &kgo.Record{
			Partition: int32(i % partitions), Value: []byte(payload),
			Headers: []kgo.RecordHeader{{Key: "id", Value: []byte(id)}, {Key: "traceparent", Value: []byte(trace)}},
		}).FirstErr())
	}
	event := kafkabroker.HeaderID("id")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var members sync.WaitGroup
	for range 2 {
		h := &kafkabroker.Handler{
			Consumer: j.consumer(),
			ID:       event,
			Handle: func(ctx context.Context, r *kgo.Record) error {
				id, _ := event(r)
				return j.handle(ctx, id, string(r.Headers[1].Value))
			},
			DeadLetter: func(_ context.Context, r *kgo.Record, _ consumer.Result) error {
				id, _ := event(r)
				j.dead(id)
				return nil
			},
		}
		members.Go(func() {
			if err := h.Run(ctx, seeds, kgo.ConsumerGroup("g"), kgo.ConsumeTopics(topic), kgo.AutoCommitInterval(100*time.Millisecond)); !errors.Is(err, context.Canceled) {
				t.Errorf("Run: %v", err)
			}
		})
	}
	waitFor(t, "all offsets committed", func() bool {
		info := cluster.GroupInfo("g")
		committed := int64(0)
		if info != nil {
			for _, c := range info.Commits[topic] {
				committed += c.Offset
			}
		}
		return committed == int64(len(ids))
	})
	cancel()
	members.Wait()
}

func overWatermill(t *testing.T, ids []string, j job) {
	pubsub := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100, Persistent: true}, watermill.NopLogger{})
	defer pubsub.Close()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	must(t, err)
	poison, err := middleware.PoisonQueueWithFilter(deadTopic(j.dead), "dead", func(err error) bool { return errors.Is(err, consumer.ErrPoison) })
	must(t, err)
	var settled atomic.Int64
	for range workers { // each gets every message
		dedupe := &watermillbroker.Middleware{Consumer: j.consumer()}
		count := func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				out, err := h(msg)
				if err == nil {
					settled.Add(1)
				}
				return out, err
			}
		}
		h := router.AddConsumerHandler("h"+watermill.NewUUID(), "in", pubsub, func(msg *message.Message) error {
			return j.handle(msg.Context(), msg.UUID, msg.Metadata.Get("traceparent"))
		})
		h.AddMiddleware(count, poison, dedupe.Wrap)
	}
	done := make(chan error, 1)
	go func() { done <- router.Run(t.Context()) }()
	<-router.Running()
	for _, id := range ids {
		msg := message.NewMessage(id, []byte(payload))
		msg.Metadata.Set("traceparent", trace)
		must(t, pubsub.Publish("in", msg))
	}
	waitFor(t, "all messages acknowledged", func() bool { return settled.Load() == int64(workers*len(ids)) })
	must(t, router.Close())
	must(t, <-done)
}

// deadTopic is a publisher of dead letters. Every worker writes the letter of
// its own copy; one counts.
func deadTopic(dead func(id string)) message.Publisher {
	return &deadPublisher{dead: dead, seen: map[string]bool{}}
}

type deadPublisher struct {
	dead func(id string)
	mu   sync.Mutex
	seen map[string]bool
}

func (p *deadPublisher) Publish(_ string, msgs ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range msgs {
		if !p.seen[m.UUID] {
			p.seen[m.UUID] = true
			p.dead(m.UUID)
		}
	}
	return nil
}

func (p *deadPublisher) Close() error { return nil }

// overWebhook is a sender that sends each event until it is answered 2xx.
func overWebhook(t *testing.T, ids []string, j job) {
	handler := func() http.Handler {
		return &consumer.Webhook{
			Consumer: j.consumer(),
			Verify:   consumer.Unverified,
			ID:       consumer.StandardWebhooksID,
			Handle: func(ctx context.Context, r *http.Request, _ []byte) error {
				return j.handle(ctx, r.Header.Get("webhook-id"), r.Header.Get("Traceparent"))
			},
			DeadLetter: func(_ context.Context, r *http.Request, _ []byte, _ consumer.Result) error {
				j.dead(r.Header.Get("webhook-id"))
				return nil
			},
		}
	}
	nodes := []*httptest.Server{httptest.NewServer(handler()), httptest.NewServer(handler())}
	defer nodes[0].Close()
	defer nodes[1].Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var senders sync.WaitGroup
	slots := make(chan struct{}, 2*workers)
	for i, id := range ids {
		slots <- struct{}{}
		senders.Go(func() {
			defer func() { <-slots }()
			for try := i; ; try++ {
				req, err := http.NewRequestWithContext(ctx, "POST", nodes[try%2].URL, strings.NewReader(payload))
				must(t, err)
				req.Header.Set("webhook-id", id)
				req.Header.Set("Traceparent", trace)
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				switch resp.StatusCode {
				case http.StatusNoContent:
					return
				case http.StatusServiceUnavailable:
					if resp.Header.Get("Retry-After") == "" {
						t.Error("503 without Retry-After")
					}
				case http.StatusInternalServerError:
				default:
					t.Errorf("status %d", resp.StatusCode)
					return
				}
				select {
				case <-ctx.Done():
					t.Errorf("event %s was not taken", id)
					return
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	senders.Wait()
}
