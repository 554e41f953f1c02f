package bench

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/effectonce/idempotency/dedup"
)

// BenchmarkOutboxPeers moves 5,000 messages out of PostgreSQL to a receiver that
// does nothing: by our relay, by watermill-sql's subscriber, which has one
// receiver at a time, and by river, each job being a message, with a hundred
// workers. The polling of each is as fast as it can be set.
func BenchmarkOutboxPeers(b *testing.B) {
	const n = 5000
	report := func(b *testing.B, move func() time.Duration) {
		var times []float64
		for b.Loop() {
			times = append(times, move().Seconds()/n)
		}
		b.ReportMetric(1/middle(times), "messages/s")
	}
	b.Run("ours", func(b *testing.B) {
		_, box, _ := openOutbox(b)
		report(b, func() time.Duration {
			fill(b, box, n)
			return relayed(b, box, 1, n)
		})
	})
	b.Run("watermill-sql", func(b *testing.B) { report(b, func() time.Duration { return watermillMoves(b, n) }) })
	b.Run("river", func(b *testing.B) { report(b, func() time.Duration { return riverMoves(b, n) }) })
}

func watermillMoves(b *testing.B, n int) time.Duration {
	pool := openPool(b, poolMax)
	defer pool.Close()
	db := watermillsql.BeginnerFromPgx(pool)
	topic := "peer_" + dedup.NewToken().String()[:12]
	schema := watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: batch, GeneratePayloadType: func(string) string { return "BYTEA" }}
	offsets := watermillsql.DefaultPostgreSQLOffsetsAdapter{}
	defer func() {
		sqlExec(b, pool, "DROP TABLE IF EXISTS "+schema.MessagesTable(topic)+", "+offsets.MessagesOffsetsTable(topic))
	}()
	sub, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{SchemaAdapter: schema, OffsetsAdapter: offsets,
		InitializeSchema: true, PollInterval: time.Millisecond}, watermill.NopLogger{})
	if err != nil {
		b.Fatal(err)
	}
	if err := sub.SubscribeInitialize(topic); err != nil {
		b.Fatal(err)
	}
	pub, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: schema}, watermill.NopLogger{})
	if err != nil {
		b.Fatal(err)
	}
	msgs := make([]*message.Message, 0, 500)
	for range n {
		if msgs = append(msgs, message.NewMessage(watermill.NewUUID(), make([]byte, 100))); len(msgs) == cap(msgs) {
			if err := pub.Publish(topic, msgs...); err != nil {
				b.Fatal(err)
			}
			msgs = msgs[:0]
		}
	}
	began := time.Now()
	got, err := sub.Subscribe(b.Context(), topic)
	if err != nil {
		b.Fatal(err)
	}
	for range n {
		(<-got).Ack()
	}
	took := time.Since(began)
	if err := sub.Close(); err != nil {
		b.Fatal(err)
	}
	return took
}

type event struct {
	Payload []byte `json:"payload"`
}

func (event) Kind() string { return "event" }

type eventWorker struct {
	river.WorkerDefaults[event]
	n    *atomic.Int64
	want int64
	done chan struct{}
}

func (w *eventWorker) Work(context.Context, *river.Job[event]) error {
	if w.n.Add(1) == w.want {
		close(w.done)
	}
	return nil
}

func riverMoves(b *testing.B, n int) time.Duration {
	pool := openPool(b, poolMax)
	defer pool.Close()
	schema := "peer_" + strings.ToLower(dedup.NewToken().String()[:12])
	sqlExec(b, pool, "CREATE SCHEMA "+schema)
	defer sqlExec(b, pool, "DROP SCHEMA "+schema+" CASCADE")
	quiet := slog.New(slog.DiscardHandler)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: schema, Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	if _, err := migrator.Migrate(b.Context(), rivermigrate.DirectionUp, nil); err != nil {
		b.Fatal(err)
	}
	worker := &eventWorker{n: new(atomic.Int64), want: int64(n), done: make(chan struct{})}
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: schema, Logger: quiet, Workers: workers,
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
		FetchCooldown: time.Millisecond, FetchPollInterval: 2 * time.Millisecond})
	if err != nil {
		b.Fatal(err)
	}
	jobs := make([]river.InsertManyParams, n)
	for i := range jobs {
		jobs[i].Args = event{make([]byte, 100)}
	}
	if _, err := client.InsertMany(b.Context(), jobs); err != nil {
		b.Fatal(fmt.Errorf("insert: %w", err))
	}
	began := time.Now()
	if err := client.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	<-worker.done
	took := time.Since(began)
	if err := client.Stop(context.WithoutCancel(b.Context())); err != nil {
		b.Fatal(err)
	}
	return took
}
