package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	rabbitbroker "github.com/effectonce/idempotency/brokers/rabbitmq"
	"github.com/effectonce/idempotency/outbox"
)

// collector is a broker in memory.
type collector struct {
	mu   sync.Mutex
	got  []string
	news chan struct{} // gets a value after each message
	fail func(m outbox.Message) error
}

func newCollector() *collector { return &collector{news: make(chan struct{}, 10000)} }

func (c *collector) Publish(_ context.Context, msgs []outbox.Message) []error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		if c.fail != nil {
			errs[i] = c.fail(m)
		}
		if errs[i] == nil {
			c.got = append(c.got, string(m.Payload))
			c.news <- struct{}{}
		}
	}
	return errs
}

func (c *collector) wait(t *testing.T, n int) {
	t.Helper()
	for range n {
		select {
		case <-c.news:
		case <-t.Context().Done():
			t.Fatal("the test is over")
		}
	}
}

func (c *collector) want(t *testing.T, want ...string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Equal(c.got, want) {
		t.Errorf("published %q, want %q", c.got, want)
	}
}

// relay runs n relays until the test's end, or stop is called.
func relay(t *testing.T, n int, store outbox.Store, pub outbox.Publisher, opts outbox.Options) (stop func()) {
	t.Helper()
	if opts.Poll == 0 {
		opts.Poll = 5 * time.Millisecond
	}
	r, err := outbox.New(store, pub, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Errorf("Run = %v", err)
			}
		})
	}
	stop = func() { cancel(); all.Wait() }
	t.Cleanup(stop)
	return stop
}

func messages(key string, names ...string) []outbox.Message {
	msgs := make([]outbox.Message, len(names))
	for i, n := range names {
		msgs[i] = outbox.Message{Topic: "t", Key: key, Payload: []byte(n)}
	}
	return msgs
}

func mustEnqueue(t *testing.T, box *outbox.Outbox, msgs ...outbox.Message) {
	t.Helper()
	if err := enqueue(t.Context(), box, msgs...); err != nil {
		t.Fatal(err)
	}
}

// A transaction that took its numbers early and commits late, or stays idle, holds
// nobody up and is not passed over.
func TestLateCommit(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		if box.Dialect == outbox.SQLite {
			return // one transaction writes at a time: none is late
		}
		late, err := box.DB.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer late.Rollback()
		if err := box.Enqueue(t.Context(), late, messages("", "late")...); err != nil {
			t.Fatal(err)
		}
		c := newCollector()
		relay(t, 2, box, c, outbox.Options{})
		mustEnqueue(t, box, messages("", "early")...)
		c.wait(t, 1)
		c.want(t, "early")
		if err := late.Commit(); err != nil {
			t.Fatal(err)
		}
		c.wait(t, 1)
		c.want(t, "early", "late")
	})
}

// Several relays publish each message once, and each key in its order.
func TestRelaysShareTheWork(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		const keys, each = 5, 60
		c := newCollector()
		var all []outbox.Message
		for n := range each {
			for k := range keys {
				all = append(all, messages(fmt.Sprint(k), fmt.Sprintf("%d %03d", k, n))...)
			}
		}
		stop := relay(t, 4, box, c, outbox.Options{Batch: 11})
		for chunk := range slices.Chunk(all, 17) {
			mustEnqueue(t, box, chunk...)
		}
		c.wait(t, len(all))
		stop()
		if len(c.got) != len(all) {
			t.Errorf("%d published, want %d", len(c.got), len(all))
		}
		last := map[byte]string{}
		for _, p := range c.got {
			if p <= last[p[0]] {
				t.Errorf("%q comes after %q", p, last[p[0]])
			}
			last[p[0]] = p
		}
	})
}

// renewals tells of each renewal.
type renewals struct {
	*outbox.Outbox
	done chan struct{}
}

func (r renewals) Renew(ctx context.Context, token outbox.Token, seqs []int64, lease time.Duration) (int, error) {
	n, err := r.Outbox.Renew(ctx, token, seqs, lease)
	if err == nil {
		r.done <- struct{}{}
	}
	return n, err
}

// Publishing may take longer than the lease: it is renewed, and the other relay
// gets nothing of it.
func TestLeaseShorterThanPublishing(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		mustEnqueue(t, box, messages("k", "a", "b")...)
		store := renewals{box, make(chan struct{}, 1000)}
		c := newCollector()
		c.fail = func(m outbox.Message) error {
			if string(m.Payload) == "a" {
				for range 7 { // a third of the lease each
					<-store.done
				}
			}
			return nil
		}
		stop := relay(t, 2, store, c, outbox.Options{Lease: 300 * time.Millisecond})
		c.wait(t, 2)
		stop()
		c.want(t, "a", "b")
	})
}

// A message that fails is retried in its place: its key waits, others don't.
func TestRetryKeepsOrder(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		c := newCollector()
		tries := 0
		c.fail = func(m outbox.Message) error {
			if string(m.Payload) == "B" {
				if tries++; tries < 4 {
					return errors.New("refused")
				}
			}
			return nil
		}
		mustEnqueue(t, box, append(messages("k", "A", "B", "C", "D", "E"), messages("other", "1", "2")...)...)
		stop := relay(t, 3, box, c, outbox.Options{Backoff: func(int) time.Duration { return 20 * time.Millisecond }})
		c.wait(t, 7)
		stop()
		var ordered []string
		for _, p := range c.got {
			if p >= "A" {
				ordered = append(ordered, p)
			}
		}
		if !slices.Equal(ordered, []string{"A", "B", "C", "D", "E"}) {
			t.Errorf("published in the order %q", ordered)
		}
	})
}

// A poison message holds back its key alone, after as many attempts as are
// allowed, until an operator has decided.
func TestPoisonBlocksItsKey(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		c := newCollector()
		poisoned := make(chan outbox.Message, 1)
		c.fail = func(m outbox.Message) error {
			if string(m.Payload) == "bad" {
				return errors.New("refused")
			}
			return nil
		}
		mustEnqueue(t, box, append(messages("k", "bad", "after"), messages("other", "1")...)...)
		relay(t, 2, box, c, outbox.Options{MaxAttempts: 3, Backoff: func(int) time.Duration { return 0 },
			Observe: func(m outbox.Message, fate outbox.Fate, _ error) {
				if fate == outbox.Blocked {
					poisoned <- m
				}
			}})
		m := <-poisoned
		if m.Attempt != 3 {
			t.Errorf("poison at attempt %d, want 3", m.Attempt)
		}
		c.wait(t, 1)
		c.want(t, "1")
		letters, err := box.DeadLetters(t.Context(), 0, 10)
		if err != nil || len(letters) != 1 || letters[0].ID != m.ID || !letters[0].Blocks || letters[0].Err != "refused" {
			t.Fatalf("dead letters: %+v, %v", letters, err)
		}
		c.mu.Lock()
		c.fail = nil
		c.mu.Unlock()
		if n, err := box.Requeue(t.Context(), m.Seq); n != 1 || err != nil {
			t.Fatalf("Requeue = %d, %v", n, err)
		}
		c.wait(t, 2)
		c.want(t, "1", "bad", "after")
	})
}

// A broker that is down costs no attempts, and makes no dead letters.
func TestBrokerDown(t *testing.T) {
	t.Parallel()
	b, read := newBroker(t, "rabbitmq")
	forEachSerial(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		var mu sync.Mutex
		dials, tried := 0, make(chan struct{}, 100)
		pub := &rabbitbroker.Publisher{Dial: func() (*amqp.Connection, error) {
			mu.Lock()
			defer mu.Unlock()
			if dials++; dials <= 5 {
				tried <- struct{}{}
				return amqp.Dial("amqp://127.0.0.1:1/") // nobody listens there
			}
			return amqp.Dial(b.Addr)
		}}
		attempts := make(chan int, 1)
		mustEnqueue(t, box, outbox.Message{Topic: b.Topic, Payload: []byte("x")})
		relay(t, 1, box, pub, outbox.Options{MaxAttempts: 2, Unreachable: time.Millisecond,
			Observe: func(m outbox.Message, fate outbox.Fate, _ error) {
				if fate == outbox.Published {
					attempts <- m.Attempt
				}
			}})
		if n := <-attempts; n != 1 || len(tried) != 5 {
			t.Errorf("published at attempt %d after %d dials to nobody; want 1 after 5", n, len(tried))
		}
		if got := read(); len(got) != 1 || got[0].Payload != "x" {
			t.Errorf("the queue has %v", got)
		}
	})
}

// Purging waits for nobody and takes nothing that is not published.
func TestPurgeBesideOpenTransactions(t *testing.T) {
	t.Parallel()
	forEach(t, func(t *testing.T, _ database, box *outbox.Outbox) {
		box.Retention = time.Millisecond
		c := newCollector()
		mustEnqueue(t, box, messages("k", "a", "b", "c")...)
		stop := relay(t, 1, box, c, outbox.Options{PurgeEvery: -1})
		c.wait(t, 3)
		stop()
		if _, err := box.DB.ExecContext(t.Context(), `UPDATE `+box.Table+` SET available_at = `+past[box.Dialect]+` WHERE state = 3`); err != nil {
			t.Fatal(err)
		}
		if box.Dialect != outbox.SQLite { // which has one writer at a time
			open, err := box.DB.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				t.Fatal(err)
			}
			defer open.Rollback()
			if err := box.Enqueue(t.Context(), open, messages("k", "uncommitted")...); err != nil {
				t.Fatal(err)
			}
		}
		mustEnqueue(t, box, messages("k", "unsent")...)
		n, err := box.Purge(t.Context(), 2)
		if n != 2 || err != nil {
			t.Fatalf("Purge(2) = %d, %v", n, err)
		}
		if n, err = box.Purge(t.Context(), 10); n != 1 || err != nil {
			t.Fatalf("Purge(10) = %d, %v", n, err)
		}
		left, err := box.Claim(t.Context(), 10, time.Minute)
		if err != nil || len(left.Messages) != 1 || string(left.Messages[0].Payload) != "unsent" {
			t.Errorf("left is %v, %v", left.Messages, err)
		}
	})
}
