package pgxoutbox_test

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgxoutbox "github.com/effectonce/idempotency/drivers/pgx/outbox"
	"github.com/effectonce/idempotency/outbox"
	"github.com/effectonce/idempotency/outbox/outboxtest"
)

func url() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

func newPool(t *testing.T, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := pool.Ping(t.Context()); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		t.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	return pool
}

func newName() string { return "outbox_" + strings.ReplaceAll(outbox.NewID(), "-", "") }

// open returns an outbox on pool, over the table of that name.
func open(t *testing.T, pool *pgxpool.Pool, table string, opts pgxoutbox.Options) *pgxoutbox.Outbox {
	t.Helper()
	opts.Table = table
	box := pgxoutbox.New(pool, opts)
	t.Cleanup(func() { box.Close() })
	if err := box.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+table) })
	return box
}

func enqueue(ctx context.Context, box *pgxoutbox.Outbox, msgs ...outbox.Message) error {
	return box.InTx(ctx, func(ctx context.Context, tx pgx.Tx) error { return box.Enqueue(ctx, tx, msgs...) })
}

func TestStore(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	outboxtest.Run(t, func(t *testing.T) outboxtest.Fixture {
		table := newName()
		box := open(t, pool, table, pgxoutbox.Options{})
		return outboxtest.Fixture{
			Store:   box,
			Enqueue: func(ctx context.Context, msgs ...outbox.Message) error { return enqueue(ctx, box, msgs...) },
			Expire: func(ctx context.Context) error {
				_, err := pool.Exec(ctx, `UPDATE `+table+` SET available_at = '2000-01-01' WHERE state IN (0, 3)`)
				return err
			},
		}
	})
}

func claimed(t *testing.T, box *pgxoutbox.Outbox) (payloads []string) {
	t.Helper()
	c, err := box.Claim(t.Context(), 100, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range c.Messages {
		payloads = append(payloads, string(m.Payload))
	}
	return payloads
}

// What fn fails or panics with leaves no message.
func TestInTxRollsBack(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	box := open(t, pool, newName(), pgxoutbox.Options{})
	failure := errors.New("no")
	err := box.InTx(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := box.Enqueue(ctx, tx, outbox.Message{Topic: "t"}); err != nil {
			return err
		}
		return failure
	})
	if !errors.Is(err, failure) {
		t.Errorf("InTx = %v", err)
	}
	func() {
		defer func() { recover() }()
		_ = box.InTx(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			if err := box.Enqueue(ctx, tx, outbox.Message{Topic: "t"}); err != nil {
				return err
			}
			panic("no")
		})
	}()
	if got := claimed(t, box); len(got) != 0 {
		t.Errorf("rolled back, and claimed %q", got)
	}
	if pool.Stat().AcquiredConns() != 0 {
		t.Errorf("%d connections are still out", pool.Stat().AcquiredConns())
	}
	if err := pgxoutbox.New(nil, pgxoutbox.Options{}).InTx(t.Context(), nil); !errors.Is(err, outbox.ErrConfig) {
		t.Errorf("without a pool: %v", err)
	}
}

// listen runs Listen until the test's end.
func listen(t *testing.T, box *pgxoutbox.Outbox) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := box.Listen(ctx); err != nil {
			t.Errorf("Listen = %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// awake waits for a wake-up, at which every listening begins with one.
func awake(t *testing.T, box *pgxoutbox.Outbox) {
	t.Helper()
	select {
	case <-box.Wakeups():
	case <-t.Context().Done():
		t.Fatal("the test is over")
	}
}

// pair is a writer and a relay's outbox on another pool.
func pair(t *testing.T, opts pgxoutbox.Options, change ...func(*pgxpool.Config)) (writer, relay *pgxoutbox.Outbox, table string) {
	table = newName()
	writer = open(t, newPool(t), table, opts)
	relay = open(t, newPool(t, change...), table, opts)
	listen(t, writer)
	listen(t, relay)
	awake(t, relay)
	return writer, relay, table
}

func TestWakesOtherNodes(t *testing.T) {
	t.Parallel()
	writer, relay, _ := pair(t, pgxoutbox.Options{})
	for range 3 {
		if err := enqueue(t.Context(), writer, outbox.Message{Topic: "t", Payload: []byte("x")}); err != nil {
			t.Fatal(err)
		}
		awake(t, relay)
		if got := claimed(t, relay); len(got) != 1 {
			t.Fatalf("woken, and claimed %q", got)
		}
	}
}

// A listening connection that is lost is replaced.
func TestListenerKilled(t *testing.T) {
	t.Parallel()
	writer, relay, table := pair(t, pgxoutbox.Options{})
	for range 2 {
		var n int
		err := writer.DB.QueryRow(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' || $1 || '%'`, table).Scan(&n)
		if err != nil || n == 0 {
			t.Fatalf("%d connections ended, %v", n, err)
		}
		awake(t, relay) // it listens again
		if err := enqueue(t.Context(), writer, outbox.Message{Topic: "t"}); err != nil {
			t.Fatal(err)
		}
		awake(t, relay)
	}
}

// A connection over which nothing comes any more, as behind a firewall that has
// forgotten it, is noticed and replaced.
func TestListenerSilent(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig(url())
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, &net.TCPAddr{IP: net.ParseIP(cfg.ConnConfig.Host), Port: int(cfg.ConnConfig.Port)})
	opts := pgxoutbox.Options{PingEvery: 50 * time.Millisecond, PingTimeout: 200 * time.Millisecond}
	_, relay, _ := pair(t, opts, func(c *pgxpool.Config) { c.ConnConfig.Host, c.ConnConfig.Port = p.host, p.port })
	p.silence()
	awake(t, relay) // by a new connection
}

// Many commits make few notifications.
func TestNotifyIsCoalesced(t *testing.T) {
	t.Parallel()
	writer, _, table := pair(t, pgxoutbox.Options{NotifyEvery: 50 * time.Millisecond})
	conn, err := pgx.Connect(t.Context(), url())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), `LISTEN `+table); err != nil {
		t.Fatal(err)
	}
	const n = 100
	began := time.Now()
	for range n {
		if err := enqueue(t.Context(), writer, outbox.Message{Topic: "t"}); err != nil {
			t.Fatal(err)
		}
	}
	most := 2 + int(time.Since(began)/(50*time.Millisecond))
	if _, err := writer.DB.Exec(`SELECT pg_notify($1, 'end')`, table); err != nil {
		t.Fatal(err)
	}
	got := 0
	for {
		note, err := conn.WaitForNotification(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if note.Payload == "end" {
			break
		}
		got++
	}
	if got == 0 || got > most {
		t.Errorf("%d notifications of %d commits, want at most %d", got, n, most)
	}
}

// proxy passes connections on until it is silenced; later ones it passes again.
type proxy struct {
	host string
	port uint16

	mu    sync.Mutex
	gates []chan struct{} // closed: nothing passes any more
}

func newProxy(t *testing.T, target *net.TCPAddr) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{host: "127.0.0.1", port: uint16(l.Addr().(*net.TCPAddr).Port)}
	var conns sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	conns.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.DialTCP("tcp", nil, target)
			if err != nil {
				client.Close()
				continue
			}
			mu.Lock()
			open = append(open, client, server)
			mu.Unlock()
			gate := make(chan struct{})
			p.mu.Lock()
			p.gates = append(p.gates, gate)
			p.mu.Unlock()
			pass := func(to, from net.Conn) {
				buf := make([]byte, 4096)
				for {
					n, err := from.Read(buf)
					if err != nil {
						to.Close()
						return
					}
					select {
					case <-gate:
						continue // swallowed
					default:
					}
					if _, err := to.Write(buf[:n]); err != nil {
						return
					}
				}
			}
			conns.Go(func() { pass(server, client) })
			conns.Go(func() { pass(client, server) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		conns.Wait()
	})
	return p
}

// silence has the connections there are carry nothing any more.
func (p *proxy) silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.gates {
		close(g)
	}
	p.gates = nil
}
