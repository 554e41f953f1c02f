package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgxoutbox "github.com/effectonce/idempotency/drivers/pgx/outbox"
	"github.com/effectonce/idempotency/outbox"
)

// childVariable holds the child that this process is, if it is one.
const childVariable = "OUTBOX_TEST_CHILD"

// child is another process: one that takes orders, or a relay.
type child struct {
	Database database
	Broker   broker
	KillAt   string // the step to die at, by SIGKILL, or ""

	// Of one that takes orders; a relay if Orders is 0.
	First, Orders int
}

var (
	orderSteps = []string{"before enqueue", "before commit", "after commit"}
	relaySteps = []string{"after claim", "before publish", "after publish", "before settle", "after settle"}
)

func (c child) step(name string) {
	if name == c.KillAt {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // it takes a moment
	}
}

func TestMain(m *testing.M) {
	spec := os.Getenv(childVariable)
	if spec == "" {
		os.Exit(m.Run())
	}
	var c child
	err := json.Unmarshal([]byte(spec), &c)
	if err == nil && c.Orders > 0 {
		err = c.takeOrders()
	} else if err == nil {
		err = c.relay()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

var errCancelled = errors.New("the order was cancelled")

// takeOrders writes orders with their events. Every fourth one is rolled back.
func (c child) takeOrders() error {
	box, err := c.Database.open()
	if err != nil {
		return err
	}
	defer box.DB.Close()
	if c.Database.Kind == "pgx" {
		return c.takeOrdersPgx()
	}
	place := `INSERT INTO ` + c.Database.orders() + ` (id) VALUES (?)`
	if box.Dialect == outbox.Postgres {
		place = strings.Replace(place, "?", "$1", 1)
	}
	return c.each(func(n int) error {
		return box.InTx(context.Background(), func(ctx context.Context, tx *sql.Tx) error {
			return c.takeOrder(n, func() error { _, err := tx.ExecContext(ctx, place, n); return err },
				func(m outbox.Message) error { return box.Enqueue(ctx, tx, m) })
		})
	})
}

func (c child) takeOrdersPgx() error {
	pool, err := pgxpool.New(context.Background(), c.Database.Addr)
	if err != nil {
		return err
	}
	defer pool.Close()
	box := pgxoutbox.New(pool, pgxoutbox.Options{Table: c.Database.Table})
	defer box.Close()
	return c.each(func(n int) error {
		return box.InTx(context.Background(), func(ctx context.Context, tx pgx.Tx) error {
			place := `INSERT INTO ` + c.Database.orders() + ` (id) VALUES ($1)`
			return c.takeOrder(n, func() error { _, err := tx.Exec(ctx, place, n); return err },
				func(m outbox.Message) error { return box.Enqueue(ctx, tx, m) })
		})
	})
}

func (c child) each(transaction func(n int) error) error {
	for n := c.First; n < c.First+c.Orders; n++ {
		err := transaction(n)
		c.step("after commit")
		if err != nil && !errors.Is(err, errCancelled) {
			return err
		}
	}
	return nil
}

// takeOrder is what is done in one transaction.
func (c child) takeOrder(n int, place func() error, enqueue func(outbox.Message) error) error {
	if err := place(); err != nil {
		return err
	}
	c.step("before enqueue")
	m := outbox.Message{Topic: c.Broker.Topic, Key: fmt.Sprint("customer ", n%3), Payload: fmt.Append(nil, n)}
	if err := enqueue(m); err != nil {
		return err
	}
	c.step("before commit")
	if n%4 == 3 {
		return errCancelled
	}
	return nil
}

// relay publishes until its standard input ends.
func (c child) relay() error {
	box, err := c.Database.open()
	if err != nil {
		return err
	}
	defer box.DB.Close()
	pub, err := c.Broker.publisher()
	if err != nil {
		return err
	}
	r, err := outbox.New(stepStore{box, c}, stepPublisher{pub, c}, outbox.Options{Batch: 7, Poll: 10 * time.Millisecond, Lease: 10 * time.Second})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return r.Run(ctx)
}

type stepStore struct {
	*outbox.Outbox
	child child
}

func (s stepStore) Claim(ctx context.Context, limit int, lease time.Duration) (outbox.Claim, error) {
	c, err := s.Outbox.Claim(ctx, limit, lease)
	if len(c.Messages) > 0 {
		s.child.step("after claim")
	}
	return c, err
}

func (s stepStore) Settle(ctx context.Context, token outbox.Token, outcomes []outbox.Outcome) (int, error) {
	s.child.step("before settle")
	n, err := s.Outbox.Settle(ctx, token, outcomes)
	s.child.step("after settle")
	return n, err
}

type stepPublisher struct {
	outbox.Publisher
	child child
}

func (p stepPublisher) Publish(ctx context.Context, msgs []outbox.Message) []error {
	p.child.step("before publish")
	errs := p.Publisher.Publish(ctx, msgs)
	p.child.step("after publish")
	return errs
}

func (d database) orders() string { return d.Table + "_orders" }

// start starts a child. Its standard input ends with stop.
func (c child) start(t *testing.T) (cmd *exec.Cmd, stop func()) {
	t.Helper()
	spec, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, func() { in.Close() }
}

// run runs a child to its end, which must be the one that it was started for.
func (c child) run(t *testing.T) {
	t.Helper()
	cmd, stop := c.start(t)
	defer stop()
	err := cmd.Wait()
	killed := err != nil && cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
	if killed != (c.KillAt != "") || !killed && err != nil {
		t.Fatalf("a child to be killed %q: %v", c.KillAt, err)
	}
}

// Those who take orders, and relays, are killed at every step in turn. What is
// published in the end, once it is deduplicated by its id, is an event for each
// order that was committed, and for no other, in the order of each customer's.
func TestOutboxAtomicity(t *testing.T) {
	t.Parallel()
	for _, kind := range append(kinds[:len(kinds):len(kinds)], "pgx") {
		for _, brokerKind := range brokerKinds {
			t.Run(kind+"/"+brokerKind, func(t *testing.T) {
				t.Parallel()
				d, box := newDatabase(t, kind)
				b, read := newBroker(t, brokerKind)
				if _, err := box.DB.Exec(`CREATE TABLE ` + d.orders() + ` (id INTEGER PRIMARY KEY)`); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _, _ = box.DB.ExecContext(context.Background(), `DROP TABLE `+d.orders()) })
				next := 0
				take := func(killAt string) {
					const n = 5
					child{Database: d, Broker: b, KillAt: killAt, First: next, Orders: n}.run(t)
					next += n
				}
				for _, step := range orderSteps {
					take(step)
				}
				for _, step := range relaySteps {
					take("")
					child{Database: d, Broker: b, KillAt: step}.run(t)
					if err := expire(t.Context(), box); err != nil { // or the next one waits for the dead one's lease
						t.Fatal(err)
					}
				}
				drain(t, box, child{Database: d, Broker: b})
				check(t, committed(t, box, d), read(), brokerKind == "nats")
			})
		}
	}
}

// drain runs a relay until nothing is left.
func drain(t *testing.T, box *outbox.Outbox, relay child) {
	t.Helper()
	cmd, stop := relay.start(t)
	defer stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for left := 1; left > 0; <-tick.C {
		if err := box.DB.QueryRowContext(t.Context(), `SELECT count(*) FROM `+box.Table).Scan(&left); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the relay ended with %v", err)
	}
}

func committed(t *testing.T, box *outbox.Outbox, d database) (ids []string) {
	t.Helper()
	rows, err := box.DB.QueryContext(t.Context(), `SELECT id FROM `+d.orders()+` ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return ids
}

func check(t *testing.T, orders []string, deliveries []delivery, deduplicated bool) {
	t.Helper()
	if len(orders) < 15 {
		t.Errorf("only %d orders", len(orders))
	}
	seen := map[string]string{}
	last := map[int]int{}
	var events []int
	for _, d := range deliveries {
		if first, ok := seen[d.ID]; ok {
			if first != d.Payload {
				t.Errorf("id %s has two messages, %s and %s", d.ID, first, d.Payload)
			}
			continue
		}
		seen[d.ID] = d.Payload
		var n int
		if _, err := fmt.Sscan(d.Payload, &n); err != nil {
			t.Fatal(err)
		}
		if before, ok := last[n%3]; ok && n < before {
			t.Errorf("customer %d: order %d after order %d", n%3, n, before)
		}
		last[n%3] = n
		events = append(events, n)
	}
	slices.Sort(events)
	var want []int
	for _, o := range orders {
		var n int
		if _, err := fmt.Sscan(o, &n); err != nil {
			t.Fatal(err)
		}
		want = append(want, n)
	}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Errorf("orders and events (-orders +events):\n%s", diff)
	}
	switch again := len(deliveries) - len(seen); {
	case deduplicated && again > 0:
		t.Errorf("%d messages twice in the stream, which has their ids", again)
	case !deduplicated && again == 0:
		t.Error("nothing was published twice, so no relay died between the broker's answer and its own commit")
	}
}
