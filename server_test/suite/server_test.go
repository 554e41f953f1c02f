package suite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/server"
)

// charge is a request with the key k.
func charge(body string) *http.Request {
	r := httptest.NewRequest("POST", "/charges", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", "k")
	return r
}

// chargeKey is what the store knows the key k as.
var chargeKey = server.StoreKey("acme", "POST /charges", "k")

// guard returns h behind a guard in that mode.
func (b *backend) guard(mode dedup.Mode, h http.HandlerFunc, change ...func(o *server.Options)) http.Handler {
	o := server.Options{
		Scope:  func(*http.Request) (string, error) { return "acme", nil },
		Mode:   mode,
		Logger: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&o)
	}
	return server.New(b.Store, o).Handler(h)
}

func serve(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func isReplay(w *httptest.ResponseRecorder) bool {
	return w.Header().Get("Idempotent-Replayed") == "true"
}

func wantAnswer(t *testing.T, w *httptest.ResponseRecorder, status int, part string) {
	t.Helper()
	if w.Code != status || !strings.Contains(w.Body.String(), part) {
		t.Errorf("answer %d %s; want %d with %q", w.Code, w.Body, status, part)
	}
}

func (b *backend) wantEffects(t *testing.T, n int) {
	t.Helper()
	if got := b.effects(t, "charge"); got != n {
		t.Errorf("%d effects, want %d", got, n)
	}
}

// do is the effect of a handler.
func (b *backend) do(t *testing.T, r *http.Request) {
	if err := b.effect(r.Context(), "charge"); err != nil {
		t.Error(err)
	}
}

func TestServerReplay(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		body := "\x00\xff{\"b\":1, \"a\":2}\r\n" + strings.Repeat("x", 70_000)
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			w.Header()["Link"] = []string{"<a>; rel=\"x, y\"", "<b>"}
			w.Header().Set("Location", "/charges/1")
			w.Header().Set("Etag", `"1"`)
			w.Header().Add("Set-Cookie", "session=secret")
			w.WriteHeader(http.StatusCreated)
			io.WriteString(w, body)
		})
		first, again := serve(g, charge(`{"a":1,"b":2}`)), serve(g, charge(`{"b":2,"a":1}`))
		if first.Code != 201 || isReplay(first) || again.Code != 201 || !isReplay(again) {
			t.Fatalf("answers %d %v, %d %v", first.Code, first.Header(), again.Code, again.Header())
		}
		if again.Body.String() != body {
			t.Errorf("the replay's body has %d bytes and is another one", again.Body.Len())
		}
		want := first.Header().Clone()
		want.Del("Set-Cookie")
		want.Set("Idempotent-Replayed", "true")
		if diff := cmp.Diff(want, again.Header()); diff != "" {
			t.Errorf("headers:\n%s", diff)
		}
		b.wantEffects(t, 1)
	})
}

// Of 200 that arrive at once one runs; all others have its answer, or are told
// that it is under way.
func TestConcurrentDuplicates(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			w.WriteHeader(201)
			fmt.Fprint(w, dedup.NewToken()) // another one for each run
		})
		const n = 200
		answers := make([]*httptest.ResponseRecorder, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { answers[i] = serve(g, charge("x")) })
		}
		wg.Wait()
		final := serve(g, charge("x"))
		wantAnswer(t, final, 201, "")
		for _, w := range answers {
			// Never 500 or 503.
			if w.Code != 409 && (w.Code != 201 || w.Body.String() != final.Body.String()) {
				t.Errorf("answer %d %s; the operation's is %s", w.Code, w.Body, final.Body)
			}
		}
		b.wantEffects(t, 1)
	})
}

// A duplicate of a request that is still running is told so at once; one with
// another body is told that. In transaction mode the first one's row can't be
// seen before the commit, so both are told that it is running, and neither
// waits for its lock.
func TestServerDuplicateOfRunning(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		running, finish := make(chan struct{}), make(chan struct{})
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			close(running)
			<-finish
			io.WriteString(w, "done")
		})
		var wg sync.WaitGroup
		wg.Go(func() { wantAnswer(t, serve(g, charge("x")), 200, "done") })
		<-running
		same, other := serve(g, charge("x")), serve(g, charge("y"))
		wantAnswer(t, same, 409, server.TypeInProgress)
		if same.Header().Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		if mode == dedup.Lease {
			wantAnswer(t, other, 422, server.TypeKeyReused)
		} else {
			wantAnswer(t, other, 409, server.TypeInProgress)
		}
		close(finish)
		wg.Wait()
		wantAnswer(t, serve(g, charge("y")), 422, server.TypeKeyReused)
		wantAnswer(t, serve(g, charge("x")), 200, "done")
		b.wantEffects(t, 1)
	})
}

// One that waits gets the answer of the running one.
func TestServerWait(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		running, finish := make(chan struct{}), make(chan struct{})
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			close(running)
			<-finish
			io.WriteString(w, "done")
		}, func(o *server.Options) { o.Wait = time.Minute })
		var wg sync.WaitGroup
		wg.Go(func() { serve(g, charge("x")) })
		<-running
		for range 8 {
			wg.Go(func() {
				w := serve(g, charge("x"))
				wantAnswer(t, w, 200, "done")
				if !isReplay(w) {
					t.Error("no replay")
				}
			})
		}
		close(finish)
		wg.Wait()
		b.wantEffects(t, 1)
	})
}

// The client goes away while the handler runs, over a real connection. Its
// outcome is stored, and the next request gets it.
func TestServerClientDisconnects(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		running, gone, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			close(running)
			<-gone
			b.do(t, r)
			io.WriteString(w, "done")
		})
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			go func() { <-r.Context().Done(); close(gone) }()
			defer close(ended)
			g.ServeHTTP(w, r)
		}))
		defer srv.Close()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, "POST", srv.URL+"/charges", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header = charge("").Header
		go func() { <-running; cancel() }()
		if _, err := srv.Client().Do(r); !errors.Is(err, context.Canceled) {
			t.Errorf("first request: %v", err)
		}
		<-ended
		w := serve(g, charge("x"))
		wantAnswer(t, w, 200, "done")
		if !isReplay(w) {
			t.Error("no replay")
		}
		b.wantEffects(t, 1)
	})
}

// After a failure that follows the effect, lease mode keeps the answer, and
// transaction mode undoes the effect. Neither charges twice, and no key is
// blocked for its TTL.
func TestServerFailure(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(w http.ResponseWriter){
		"status": func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) },
		"panic":  func(http.ResponseWriter) { panic("boom") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
				broken := true
				g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
					b.do(t, r)
					if broken {
						broken = false
						fail(w)
						return
					}
					io.WriteString(w, "done")
				})
				first := serve(g, charge("x"))
				if first.Code < 500 {
					t.Errorf("first answer %d", first.Code)
				}
				if mode == dedup.Lease {
					again := serve(g, charge("x"))
					wantAnswer(t, again, first.Code, first.Body.String())
					if !isReplay(again) {
						t.Error("no replay")
					}
				} else {
					b.wantEffects(t, 0)
					wantAnswer(t, serve(g, charge("x")), 200, "done")
				}
				b.wantEffects(t, 1)
			})
		})
	}
}

// A refusal, 4xx, is an answer like any other, and what the handler wrote
// beside it stays.
func TestServerRefusalIsKept(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			http.Error(w, "declined", http.StatusPaymentRequired)
		})
		serve(g, charge("x"))
		again := serve(g, charge("x"))
		wantAnswer(t, again, 402, "declined")
		if !isReplay(again) {
			t.Error("no replay")
		}
		b.wantEffects(t, 1)
	})
}

func TestServerNotExecuted(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		full := true
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			if full {
				full = false
				dedup.NotExecuted(r.Context())
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			b.do(t, r)
			io.WriteString(w, "done")
		})
		wantAnswer(t, serve(g, charge("x")), 429, "")
		wantAnswer(t, serve(g, charge("y")), 200, "done") // free, also for another body
		b.wantEffects(t, 1)
	})
}

// A run whose lease ended goes on beside the one that took over: only the
// latter's answer counts, and the former's is not sent as success.
func TestServerFencing(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		if mode == dedup.Transaction {
			t.Skip("a transaction holds its claim until it ends; nobody takes it over")
		}
		running, finish := make(chan struct{}), make(chan struct{})
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			if dedup.Attempt(r.Context()) == 1 {
				close(running)
				<-finish
			}
			fmt.Fprint(w, "run ", dedup.Attempt(r.Context()))
		}, func(o *server.Options) { o.Abandoned, o.Lease = dedup.Reexecute, time.Hour })
		var wg sync.WaitGroup
		wg.Go(func() {
			w := serve(g, charge("x"))
			wantAnswer(t, w, 503, server.TypeOutcomePending)
		})
		<-running
		b.lapse(t, chargeKey)
		wantAnswer(t, serve(g, charge("x")), 200, "run 2")
		close(finish)
		wg.Wait()
		wantAnswer(t, serve(g, charge("x")), 200, "run 2")
	})
}

// A process died: its lease ends long before the TTL, and the policy decides.
// Nothing runs twice by default, and an operator has the last word.
func TestServerAbandoned(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		claimed := make(chan struct{})
		crash := b.guard(dedup.Lease, func(http.ResponseWriter, *http.Request) { close(claimed); select {} },
			func(o *server.Options) { o.Lease = time.Hour })
		go serve(crash, charge("x")) // never returns, as if its process had died
		<-claimed
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			io.WriteString(w, "done")
		})
		wantAnswer(t, serve(g, charge("x")), 409, server.TypeInProgress)
		b.lapse(t, chargeKey)
		wantAnswer(t, serve(g, charge("y")), 422, server.TypeKeyReused)
		for range 2 {
			w := serve(g, charge("x"))
			wantAnswer(t, w, 500, server.TypeOutcomeUnknown)
			if !isReplay(w) {
				t.Error("the answer is not said to be final")
			}
		}
		b.wantEffects(t, 0)
		if err := b.Resolve(t.Context(), chargeKey, nil, time.Hour); err != nil {
			t.Fatal(err)
		}
		wantAnswer(t, serve(g, charge("x")), 200, "done")
		b.wantEffects(t, 1)
	})
}

func TestServerTombstone(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		large := strings.Repeat("x", 5000)
		g := b.guard(mode, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			w.Header().Set("Location", "/charges/1")
			w.WriteHeader(201)
			io.WriteString(w, large)
		}, func(o *server.Options) { o.MaxStoredResponse = 1000 })
		wantAnswer(t, serve(g, charge("x")), 201, large)
		again := serve(g, charge("x"))
		wantAnswer(t, again, 410, `"original_status":201`)
		if again.Header().Get("Location") != "/charges/1" {
			t.Errorf("headers %v", again.Header())
		}
		b.wantEffects(t, 1)
	})
}

// Transaction mode only.
func onTransactions(t *testing.T, test func(t *testing.T, b *backend)) {
	for _, s := range serverBackends {
		if s.tx {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				test(t, s.open(t))
			})
		}
	}
}

// A handler catches a unique violation and answers 409. Where that leaves the
// transaction aborted (PostgreSQL), all of it is rolled back and the key is
// free; elsewhere it commits. Either way the client has its 409.
func TestServerCaughtViolation(t *testing.T) {
	t.Parallel()
	onTransactions(t, func(t *testing.T, b *backend) {
		g := b.guard(dedup.Transaction, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			if err := b.conflict(r.Context()); err == nil {
				t.Error("no unique violation")
			}
			http.Error(w, "taken", http.StatusConflict)
		})
		first, again := serve(g, charge("x")), serve(g, charge("x"))
		wantAnswer(t, first, 409, "taken")
		wantAnswer(t, again, 409, "taken")
		if isReplay(again) {
			b.wantEffects(t, 1)
		} else {
			b.wantEffects(t, 0)
		}
	})
}

// The same, answered as success, which it is not.
func TestServerAbortedSuccess(t *testing.T) {
	t.Parallel()
	onTransactions(t, func(t *testing.T, b *backend) {
		g := b.guard(dedup.Transaction, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			_ = b.conflict(r.Context())
			io.WriteString(w, "done")
		})
		w := serve(g, charge("x"))
		switch w.Code {
		case 200:
			b.wantEffects(t, 1)
		default:
			wantAnswer(t, w, 500, server.TypeRolledBack)
			b.wantEffects(t, 0)
		}
	})
}

func TestServerRollback(t *testing.T) {
	t.Parallel()
	onTransactions(t, func(t *testing.T, b *backend) {
		refuse := true
		g := b.guard(dedup.Transaction, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			if refuse {
				refuse = false
				if err := dedup.Rollback(r.Context()); err != nil {
					t.Error(err)
				}
				http.Error(w, "no", http.StatusConflict)
				return
			}
			io.WriteString(w, "done")
		})
		wantAnswer(t, serve(g, charge("x")), 409, "no")
		b.wantEffects(t, 0)
		wantAnswer(t, serve(g, charge("x")), 200, "done")
		b.wantEffects(t, 1)
	})
}

// A handler that ends the transaction itself is refused where the store can: pgx
// leaves the transaction as it is, SQLite has undone it. Else the promise is
// broken, and the client is told that the outcome is unknown.
func TestServerTransactionEnded(t *testing.T) {
	t.Parallel()
	onTransactions(t, func(t *testing.T, b *backend) {
		var ended, undone bool
		g := b.guard(dedup.Transaction, func(w http.ResponseWriter, r *http.Request) {
			b.do(t, r)
			ended, undone = endTx(t, r.Context())
			io.WriteString(w, "done")
		})
		w := serve(g, charge("x"))
		switch {
		case undone:
			wantAnswer(t, w, 500, server.TypeRolledBack)
			b.wantEffects(t, 0)
			return
		case !ended:
			wantAnswer(t, w, 200, "done")
			b.wantEffects(t, 1)
			return
		}
		wantAnswer(t, w, 500, server.TypeOutcomeUnknown)
		if isReplay(w) {
			t.Error("the answer is said to be final")
		}
	})
}

// Handlers that read a row and write it back, at once and without locking it.
// Above READ COMMITTED all but one lose. Where the database says so at the
// commit, the handler runs again from the start; where a statement of the
// handler's fails, its 500 leaves the key free. No increment is lost.
func TestServerSerialization(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		name string
		open func(t *testing.T) *backend
	}{
		{"sqlite", openSQLite},
		{"mysql/serializable", func(t *testing.T) *backend { return openMySQL(t, sql.LevelSerializable) }},
		{"postgres/repeatable read", func(t *testing.T) *backend { return openPostgres(t, sql.LevelRepeatableRead) }},
		{"postgres/serializable", func(t *testing.T) *backend { return openPostgres(t, sql.LevelSerializable) }},
		{"pgx/repeatable read", func(t *testing.T) *backend { return openPgx(t, pgx.RepeatableRead) }},
		{"pgx/serializable", func(t *testing.T) *backend { return openPgx(t, pgx.Serializable) }},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			b := s.open(t)
			const n = 8
			var runs atomic.Int64
			g := b.guard(dedup.Transaction, func(w http.ResponseWriter, r *http.Request) {
				was, err := b.increment(r.Context())
				runs.Add(1)
				if err != nil { // what a handler does with any error
					http.Error(w, err.Error(), http.StatusInternalServerError)
					return
				}
				b.do(t, r)
				fmt.Fprint(w, was)
			}, func(o *server.Options) { o.Retries = 100 })
			seen := make([]string, n)
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					for range 1000 { // the client's retries
						r := charge("x")
						r.Header.Set("Idempotency-Key", fmt.Sprint("k", i))
						w := serve(g, r)
						if seen[i] = w.Body.String(); w.Code == 200 {
							return
						}
					}
				})
			}
			wg.Wait()
			slices.Sort(seen)
			if want := []string{"0", "1", "2", "3", "4", "5", "6", "7"}; !slices.Equal(seen, want) {
				t.Errorf("increments %q; want each number once", seen)
			}
			b.wantEffects(t, n)
			t.Logf("%d runs for %d requests", runs.Load(), n)
		})
	}
}
