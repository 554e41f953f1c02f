package bench

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgxoutbox "github.com/effectonce/idempotency/drivers/pgx/outbox"
	"github.com/effectonce/idempotency/outbox"
)

// batch is how many messages are claimed at a time, by us, by the floor and by
// watermill-sql.
const batch = 500

func openOutbox(b *testing.B) (*pgxpool.Pool, *pgxoutbox.Outbox, string) {
	b.Helper()
	pool := openPool(b, poolMax)
	table := "outbox_" + strings.ReplaceAll(outbox.NewID(), "-", "")
	box := pgxoutbox.New(pool, pgxoutbox.Options{Table: table})
	b.Cleanup(func() { box.Close() })
	if err := box.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { sqlExec(b, pool, "DROP TABLE "+table) })
	return pool, box, table
}

// fill enqueues n messages without the time being counted.
func fill(b *testing.B, box *pgxoutbox.Outbox, n int) {
	b.Helper()
	msgs := make([]outbox.Message, n)
	for i := range msgs {
		msgs[i] = outbox.Message{Topic: "t", Key: fmt.Sprint(i % 100), Payload: make([]byte, 100)}
	}
	err := box.InTx(b.Context(), func(ctx context.Context, tx pgx.Tx) error { return box.Enqueue(ctx, tx, msgs...) })
	if err != nil {
		b.Fatal(err)
	}
	// As autovacuum has done with a table that is in use.
	if _, err := box.DB.Exec("ANALYZE " + box.Table); err != nil {
		b.Fatal(err)
	}
}

// counter is a publisher that does nothing but count, and finds duplicates.
type counter struct {
	seen  sync.Map
	n     atomic.Int64
	want  int64
	done  chan struct{}
	twice atomic.Int64
}

func (c *counter) KeepsOrder() {}

func (c *counter) Publish(_ context.Context, msgs []outbox.Message) []error {
	for _, m := range msgs {
		if _, again := c.seen.LoadOrStore(m.ID, true); again {
			c.twice.Add(1)
		}
		if c.n.Add(1) == c.want {
			close(c.done)
		}
	}
	return nil
}

// relayed has n relays publish all of want messages.
func relayed(b *testing.B, box *pgxoutbox.Outbox, n, want int) time.Duration {
	b.Helper()
	c := &counter{want: int64(want), done: make(chan struct{})}
	r, err := outbox.New(box, c, outbox.Options{Batch: batch, Poll: time.Second})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var all sync.WaitGroup
	began := time.Now()
	for range n {
		all.Go(func() { _ = r.Run(ctx) })
	}
	<-c.done
	took := time.Since(began)
	cancel()
	all.Wait()
	if c.twice.Load() > 0 {
		b.Fatalf("%d messages were published twice", c.twice.Load())
	}
	return took
}

// BenchmarkOutboxRelay publishes 5,000 messages of 100 keys, 500 at a time, to a
// publisher that does nothing, in turns with the two bare statements that a
// relay can't do without: a claim by UPDATE and a DELETE. "ratio" is how much of
// their rate the relay has; 0.6 is the floor.
func BenchmarkOutboxRelay(b *testing.B) {
	pool, box, table := openOutbox(b)
	const n = 5000
	claim := `UPDATE ` + table + ` SET lease_token = $1, available_at = now() + interval '30 seconds' WHERE seq = ANY (ARRAY(
		SELECT seq FROM ` + table + ` WHERE state = 0 AND available_at <= now() ORDER BY seq LIMIT ` + fmt.Sprint(batch) + ` FOR UPDATE SKIP LOCKED)) RETURNING seq, id, topic, msg_key, header, payload`
	bare := func() time.Duration {
		began := time.Now()
		for done := 0; done < n; {
			rows, err := pool.Query(b.Context(), claim, make([]byte, 16))
			if err != nil {
				b.Fatal(err)
			}
			var seqs []int64
			for rows.Next() {
				var seq int64
				var id, topic, key string
				var header, payload []byte
				if err := rows.Scan(&seq, &id, &topic, &key, &header, &payload); err != nil {
					b.Fatal(err)
				}
				seqs = append(seqs, seq)
			}
			if _, err := pool.Exec(b.Context(), `DELETE FROM `+table+` WHERE seq = ANY ($1)`, seqs); err != nil {
				b.Fatal(err)
			}
			done += len(seqs)
		}
		return time.Since(began)
	}
	var floor, ours []float64
	for b.Loop() {
		fill(b, box, n)
		floor = append(floor, bare().Seconds()/n)
		fill(b, box, n)
		ours = append(ours, relayed(b, box, 1, n).Seconds()/n)
	}
	b.ReportMetric(1/middle(ours), "messages/s")
	b.ReportMetric(1/middle(floor), "bare/s")
	b.ReportMetric(middle(floor)/middle(ours), "ratio")
}

func middle(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}

// BenchmarkOutboxRelays publishes with one, two and four relays at once. It fails
// if any message is published twice.
func BenchmarkOutboxRelays(b *testing.B) {
	for _, relays := range []int{1, 2, 4} {
		b.Run(fmt.Sprint(relays), func(b *testing.B) {
			_, box, _ := openOutbox(b)
			const n = 5000
			var times []float64
			for b.Loop() {
				fill(b, box, n)
				times = append(times, relayed(b, box, relays, n).Seconds()/n)
			}
			b.ReportMetric(1/middle(times), "messages/s")
		})
	}
}

// BenchmarkOutboxWakeup is the time from InTx's return to the publisher's call.
func BenchmarkOutboxWakeup(b *testing.B) {
	_, box, _ := openOutbox(b)
	published := make(chan time.Time, 1)
	r, err := outbox.New(box, outbox.PublisherFunc(func(context.Context, outbox.Message) error {
		published <- time.Now()
		return nil
	}), outbox.Options{Poll: time.Minute})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	var waits []float64
	for b.Loop() {
		err := box.InTx(ctx, func(ctx context.Context, tx pgx.Tx) error { return box.Enqueue(ctx, tx, outbox.Message{Topic: "t"}) })
		if err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		waits = append(waits, float64(max((<-published).Sub(began), 0).Microseconds())/1e3)
	}
	slices.Sort(waits)
	b.ReportMetric(waits[len(waits)/2], "p50-ms")
	b.ReportMetric(waits[len(waits)*99/100], "p99-ms")
}

// BenchmarkOutboxEnqueue is a transaction of one business row and one message, in
// turns with one whose second INSERT is bare. "ratio" is how much of its rate
// ours has; 0.9 is the floor.
func BenchmarkOutboxEnqueue(b *testing.B) {
	pool, box, table := openOutbox(b)
	sqlExec(b, pool, "CREATE TABLE "+table+"_orders (id text PRIMARY KEY)")
	b.Cleanup(func() { sqlExec(b, pool, "DROP TABLE "+table+"_orders") })
	payload := make([]byte, 100)
	tx := func(second func(ctx context.Context, tx pgx.Tx) error) func(context.Context) error {
		return func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "INSERT INTO "+table+"_orders (id) VALUES ($1)", outbox.NewID()); err != nil {
					return err
				}
				return second(ctx, tx)
			})
		}
	}
	bare := "INSERT INTO " + table + " (id, topic, msg_key, header, payload) VALUES ($1, $2, $3, $4, $5)"
	turns(b, 1, tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, bare, outbox.NewID(), "t", "k", nil, payload)
		return err
	}), tx(func(ctx context.Context, tx pgx.Tx) error {
		return box.Enqueue(ctx, tx, outbox.Message{Topic: "t", Key: "k", Payload: payload})
	}))
}
