package pgxstore_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

// wire is the network between a pool and the server, with faults to order.
type wire struct {
	writes atomic.Int64 // that the clients made: each is a flush

	deaf bool // cancel requests, which pgx sends for a lost connection, are lost too

	mu      sync.Mutex
	cut     cut
	skip    int    // writes before the cut
	refused int    // how many dials are to fail
	onDial  func() // called for each dial
}

// cut is what happens to the next thing that a client sends.
type cut uint8

const (
	cutNothing cut = iota
	cutBefore      // it is lost, and the connection with it
	cutAfter       // it arrives and is answered; the answer is lost, and the connection with it
	cutSent        // it is sent, and the connection is lost at once
)

var errCut = errors.New("the wire is cut")

func (w *wire) config(c *pgxpool.Config) { c.ConnConfig.DialFunc = w.dial }

// after orders a fault for what comes after n things that are sent.
func (w *wire) after(n int, c cut) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut, w.skip = c, n
}

// refuse makes n dials fail.
func (w *wire) refuse(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = n
}

func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	w.mu.Lock()
	refused := w.refused > 0
	if refused {
		w.refused--
	}
	onDial := w.onDial
	w.mu.Unlock()
	if onDial != nil {
		onDial()
	}
	if refused {
		return nil, errCut
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &wireConn{Conn: c, w: w}, nil
}

type wireConn struct {
	net.Conn
	w *wire
}

func (c *wireConn) Write(b []byte) (int, error) {
	c.w.writes.Add(1)
	const cancelRequest = "\x00\x00\x00\x10\x04\xd2\x16\x2e" // its length and code
	if c.w.deaf && strings.HasPrefix(string(b), cancelRequest) {
		c.Conn.Close()
		return 0, errCut
	}
	c.w.mu.Lock()
	cut := c.w.cut
	if c.w.skip > 0 {
		c.w.skip--
		cut = cutNothing
	} else {
		c.w.cut = cutNothing
	}
	c.w.mu.Unlock()
	if cut == cutNothing {
		return c.Conn.Write(b)
	}
	defer c.Conn.Close()
	if cut == cutBefore {
		return 0, errCut
	}
	n, err := c.Conn.Write(b)
	if err == nil && cut == cutAfter {
		_, err = c.Conn.Read(make([]byte, 1<<16))
	}
	return n, err
}

// A business transaction costs as many flushes with the store as without.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, w.config, func(c *pgxpool.Config) { c.MaxConns = 1 })
	s, _ := newStore(t, pool, pgxstore.Options{})
	bare := func() {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		work(t, tx)
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	guarded := func() {
		tx := begin(t, s, claimOf(t.Name()+rand()))
		work(t, txOf(t, tx))
		if err := tx.Commit(t.Context(), done("x")); err != nil {
			t.Fatal(err)
		}
	}
	flushes := func(f func()) int64 {
		f() // prepares
		before := w.writes.Load()
		f()
		return w.writes.Load() - before
	}
	if b, g := flushes(bare), flushes(guarded); b != g || b != 3 {
		t.Errorf("a transaction takes %d flushes bare and %d in the store, want 3 and 3", b, g)
	}
}
