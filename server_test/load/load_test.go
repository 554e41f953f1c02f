// Package load gives a guarded server what breaks servers: too much, too slow,
// and malformed. It must answer clearly, stay small, and lose nothing.
package load

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
	"github.com/effectonce/idempotency/server"
)

func guarded(store dedup.Store, h http.HandlerFunc, change ...func(*server.Options)) http.Handler {
	o := server.Options{Scope: server.SingleTenant, Logger: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&o)
	}
	return server.New(store, o).Handler(h)
}

func request(key, body string) *http.Request {
	r := httptest.NewRequest("POST", "/charges", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", key)
	return r
}

func serve(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func created(effects *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		effects.Add(1)
		w.WriteHeader(http.StatusCreated)
	}
}

// endless is a body that never ends, and counts what was read of it.
type endless struct{ read atomic.Int64 }

func (e *endless) Read(b []byte) (int, error) {
	e.read.Add(int64(len(b)))
	return len(b), nil
}

// Too large: refused once the limit is passed, with no key claimed.
func TestOversizedBody(t *testing.T) {
	t.Parallel()
	store := memstore.New()
	var effects atomic.Int64
	h := guarded(store, created(&effects), func(o *server.Options) { o.MaxRequestBody = 1 << 10 })
	body := new(endless)
	r := httptest.NewRequest("POST", "/charges", body)
	r.Header.Set("Idempotency-Key", "k")
	if w := serve(h, r); w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("answer %d %s", w.Code, w.Body)
	}
	if n := body.read.Load(); n > 64<<10 {
		t.Errorf("%d bytes were read of a body that may have 1 KiB", n)
	}
	if effects.Load() != 0 {
		t.Error("the handler ran")
	}
	if w := serve(h, request("k", `{}`)); w.Code != http.StatusCreated {
		t.Errorf("the key is not free: %d %s", w.Code, w.Body)
	}
}

// Malformed requests are answered 4xx, by net/http or by the guard, and leave
// nothing behind.
func TestMalformed(t *testing.T) {
	t.Parallel()
	var effects atomic.Int64
	srv := httptest.NewUnstartedServer(guarded(memstore.New(), created(&effects)))
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.Start()
	defer srv.Close()
	for _, head := range []string{
		"Idempotency-Key: \r\nContent-Length: 2",
		"Idempotency-Key: a\r\nIdempotency-Key: b\r\nContent-Length: 2",
		"Idempotency-Key: \"a\r\nContent-Length: 2",
		"Idempotency-Key: " + strings.Repeat("x", 256) + "\r\nContent-Length: 2",
		"Idempotency-Key: a\x01b\r\nContent-Length: 2",
		"Idempotency-Key: a\r\nContent-Length: -1",
		"Idempotency-Key: a\r\nTransfer-Encoding: chunked", // and then no chunk
	} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST /charges HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n\r\n{}", head)
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%q: %v", head, err)
		}
		resp.Body.Close()
		conn.Close()
		if resp.StatusCode/100 != 4 {
			t.Errorf("%.60q: answer %d", head, resp.StatusCode)
		}
	}
	if effects.Load() != 0 {
		t.Errorf("%d effects", effects.Load())
	}
}

// A client that sends its body byte by byte holds no key meanwhile: another one
// with the same key is served. When the server's timeout ends it, nothing stays.
func TestSlowBodyHoldsNothing(t *testing.T) {
	t.Parallel()
	var effects atomic.Int64
	srv := httptest.NewUnstartedServer(guarded(memstore.New(), created(&effects)))
	srv.Config.ReadTimeout = 2 * time.Second
	srv.Start()
	const slow = 50
	conns := make([]net.Conn, slow)
	for i := range conns {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns[i] = conn
		fmt.Fprint(conn, "POST /charges HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 100\r\n\r\n{")
	}
	req, err := http.NewRequest("POST", srv.URL+"/charges", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Idempotency-Key", "k")
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		t.Errorf("answer %d beside slow clients", resp.StatusCode)
	}
	for _, conn := range conns { // until the server gives them up
		if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
			t.Error(err)
		}
	}
	srv.Close()
	if effects.Load() != 1 {
		t.Errorf("%d effects, want 1", effects.Load())
	}
}

// Ten thousand keys of one tenant take no more memory than their rows do, and all
// of it comes back.
func TestManyKeys(t *testing.T) {
	store := memstore.New()
	var effects atomic.Int64
	h := guarded(store, created(&effects), func(o *server.Options) { o.TTL = time.Millisecond })
	const n = 10_000
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for i := range n {
		if w := serve(h, request(fmt.Sprint(i), `{}`)); w.Code != http.StatusCreated {
			t.Fatalf("key %d: answer %d", i, w.Code)
		}
	}
	if grown := heap() - before; grown > n*2048 {
		t.Errorf("%d keys take %d bytes", n, grown)
	}
	if effects.Load() != n {
		t.Errorf("%d effects, want %d", effects.Load(), n)
	}
	removed := 0
	for removed < n && t.Context().Err() == nil {
		got, err := store.Purge(t.Context(), 1000)
		if err != nil {
			t.Fatal(err)
		}
		removed += got
	}
	if left := heap() - before; left > n*256 {
		t.Errorf("%d bytes are left after the purge", left)
	}
}

// A thousand duplicates at once, which wait for the first: one effect, one
// answer, and no goroutine stays.
func TestThousandDuplicates(t *testing.T) {
	before := runtime.NumGoroutine()
	var effects atomic.Int64
	gate := make(chan struct{})
	h := guarded(memstore.New(), func(w http.ResponseWriter, _ *http.Request) {
		<-gate
		fmt.Fprint(w, effects.Add(1))
	}, func(o *server.Options) { o.Wait = time.Minute })
	const n = 1000
	var entered, all sync.WaitGroup
	entered.Add(n)
	answers := make([]*httptest.ResponseRecorder, n)
	for i := range n {
		all.Go(func() {
			entered.Done()
			answers[i] = serve(h, request("k", `{}`))
		})
	}
	entered.Wait()
	close(gate)
	all.Wait()
	for _, w := range answers {
		if w.Code != 200 || w.Body.String() != "1" {
			t.Fatalf("answer %d %s", w.Code, w.Body)
		}
	}
	for runtime.NumGoroutine() > before+2 && t.Context().Err() == nil {
		runtime.Gosched() // what has ended takes a moment to be gone
	}
}

// slow is a store that takes two seconds for everything.
type slow struct{ dedup.Store }

func (s slow) pause(ctx context.Context) error {
	select {
	case <-time.After(2 * time.Second):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s slow) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	if err := s.pause(ctx); err != nil {
		return dedup.Result{}, err
	}
	return s.Store.Claim(ctx, c)
}

func (s slow) Complete(ctx context.Context, k dedup.Key, t dedup.Token, c dedup.Completion) error {
	if err := s.pause(ctx); err != nil {
		return err
	}
	return s.Store.Complete(ctx, k, t, c)
}

// A store that takes two seconds makes answers late and nothing else: each key
// has one effect, and clients that left in the meantime find its answer.
func TestSlowStore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var effects atomic.Int64
		h := guarded(slow{memstore.New()}, created(&effects))
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%6)*time.Second+time.Second/2)
				defer cancel()
				serve(h, request(fmt.Sprint(i%20), `{}`).WithContext(ctx))
			})
		}
		all.Wait()
		for i := range 20 {
			for {
				w := serve(h, request(fmt.Sprint(i), `{}`))
				if w.Code == http.StatusCreated {
					break
				}
				if w.Code != http.StatusConflict || w.Header().Get("Retry-After") == "" {
					t.Fatalf("key %d: answer %d %s", i, w.Code, w.Body)
				}
				time.Sleep(time.Second)
			}
		}
		if effects.Load() != 20 {
			t.Errorf("%d effects of 20 keys", effects.Load())
		}
	})
}

// A pool of two connections and handlers that hold both: those who get none are
// told 503 or 409 in time, in both modes, and no key runs twice or is wedged.
func TestPoolExhaustion(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig(cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 2
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := pool.Ping(t.Context()); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		t.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	table := "load_" + dedup.NewToken().String()[:12]
	store, err := pgxstore.New(pool, pgxstore.Options{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := pool.Exec(context.Background(), "DROP TABLE "+table); err != nil {
			t.Error(err)
		}
	}()
	for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
		t.Run(map[dedup.Mode]string{dedup.Lease: "lease", dedup.Transaction: "transaction"}[mode], func(t *testing.T) {
			var effects atomic.Int64
			h := guarded(store, created(&effects), func(o *server.Options) {
				o.Mode = mode
				o.Lease = 3 * time.Second // a claim that gets no connection is given up within that
			})
			held := make([]*pgxpool.Conn, 2)
			for i := range held {
				if held[i], err = pool.Acquire(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			const n = 20
			var all sync.WaitGroup
			for i := range n {
				all.Go(func() {
					w := serve(h, request(fmt.Sprint(mode, i), `{}`))
					if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
						t.Errorf("without a connection: answer %d %s", w.Code, w.Body)
					}
				})
			}
			all.Wait()
			if effects.Load() != 0 {
				t.Errorf("%d effects without a connection", effects.Load())
			}
			for _, c := range held {
				c.Release()
			}
			for i := range n {
				all.Go(func() {
					for t.Context().Err() == nil {
						w := serve(h, request(fmt.Sprint(mode, i), `{}`))
						if w.Code == http.StatusCreated {
							return
						}
						if w.Code != http.StatusConflict && w.Code != http.StatusServiceUnavailable || !bytes.Contains(w.Body.Bytes(), []byte("{")) {
							t.Errorf("answer %d %s", w.Code, w.Body)
							return
						}
					}
				})
			}
			all.Wait()
			if effects.Load() != n {
				t.Errorf("%d effects of %d keys", effects.Load(), n)
			}
		})
	}
}
