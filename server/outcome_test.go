package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

// Which answers are kept, by mode.
func TestKept(t *testing.T) {
	t.Parallel()
	shed := func(status int, h http.Header) bool { return status == 503 && h.Get("X-Shed") != "" }
	for _, tt := range []struct {
		name      string
		h         http.HandlerFunc
		lease, tx bool // whether it is kept
	}{
		{"200", status(200), true, true},
		{"303", status(303), true, true},
		{"402", status(402), true, true},
		{"409", status(409), true, true},
		{"500", status(500), true, false},
		{"503", status(503), true, false},
		{"503 by a load shedder", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Shed", "1")
			status(503)(w, r)
		}, false, false},
		{"NotExecuted", func(w http.ResponseWriter, r *http.Request) {
			dedup.NotExecuted(r.Context())
			status(402)(w, r)
		}, false, false},
		{"Rollback", func(w http.ResponseWriter, r *http.Request) {
			_ = dedup.Rollback(r.Context())
			status(402)(w, r)
		}, true, false},
	} {
		for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
			t.Run(fmt.Sprint(tt.name, " ", mode), func(t *testing.T) {
				t.Parallel()
				h := counted(tt.h)
				g := server.New(newFakeTx(), with(func(o *server.Options) { o.Mode, o.NotExecuted = mode, shed })).Handler(h)
				first, again := do(g, post("k", "x")), do(g, post("k", "x"))
				if first.StatusCode != again.StatusCode || bodyOf(t, first) != bodyOf(t, again) {
					t.Errorf("answers %d, %d", first.StatusCode, again.StatusCode)
				}
				kept := tt.lease
				if mode == dedup.Transaction {
					kept = tt.tx
				}
				if replayed(again) != kept {
					t.Errorf("replayed: %t", replayed(again))
				}
				if kept {
					h.want(t, 1)
				} else {
					h.want(t, 2)
				}
			})
		}
	}
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		fmt.Fprintf(w, "answer %d", code)
	}
}

// A transaction that lost a race runs again, and nothing of the first run shows:
// not its answer, not what it did to the request.
func TestSerializationFailure(t *testing.T) {
	t.Parallel()
	store := newFakeTx()
	store.commit = func(n int64) error {
		if n < 3 {
			return dedup.ErrSerialization
		}
		return nil
	}
	var runs int
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs++
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != "x" || r.Header.Get("Spoilt") != "" || w.Header().Get("Run") != "" {
			t.Errorf("run %d: body %q (%v), request %v, response %v", runs, body, err, r.Header, w.Header())
		}
		r.Header.Set("Spoilt", "1")
		w.Header().Set("Run", fmt.Sprint(runs))
		w.Header().Add("Runs", "1")
		w.WriteHeader(200 + runs)
		fmt.Fprint(w, "run ", runs)
	})
	g := server.New(store, with(func(o *server.Options) { o.Mode = dedup.Transaction })).Handler(h)
	for range 2 {
		res := do(g, post("k", "x"))
		if got := bodyOf(t, res); res.StatusCode != 203 || got != "run 3" || len(res.Header["Runs"]) != 1 {
			t.Errorf("answer %d %q %v", res.StatusCode, got, res.Header)
		}
	}
	store.wantTx(t, 3, 0)
}

func TestCommitFails(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		err    error
		answer int // of the handler
		status int
		typ    string // "": the handler's answer
	}{
		{"lost races", dedup.ErrSerialization, 201, 503, server.TypeUnavailable},
		{"connection lost, not committed", dedup.ErrNotCommitted, 201, 503, server.TypeUnavailable},
		{"connection lost, unknown", errors.New("reset"), 201, 503, server.TypeOutcomePending},
		{"ended by the handler", dedup.ErrTxEnded, 201, 500, server.TypeOutcomeUnknown},
		{"aborted, success", dedup.ErrTxAborted, 201, 500, server.TypeRolledBack},
		{"aborted, redirect", dedup.ErrTxAborted, 303, 500, server.TypeRolledBack},
		{"aborted, conflict", dedup.ErrTxAborted, 409, 409, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			store := newFakeTx()
			store.commit = func(int64) error { return tt.err }
			g := server.New(store, with(func(o *server.Options) { o.Mode, o.Retries = dedup.Transaction, -1 })).
				Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("X-Effect", "1")
					status(tt.answer)(w, r)
				}))
			res := do(g, post("k", "x"))
			if replayed(res) {
				t.Error("the answer is said to be final")
			}
			if tt.typ == "" {
				if got := bodyOf(t, res); res.StatusCode != tt.status || got != fmt.Sprint("answer ", tt.answer) {
					t.Errorf("answer %d %q", res.StatusCode, got)
				}
				return
			}
			wantProblem(t, res, tt.status, tt.typ)
			if res.Header.Get("X-Effect") != "" {
				t.Error("the answer has headers of a handler whose work is not committed")
			}
			if (res.Header.Get("Retry-After") != "") != (tt.status == 503) {
				t.Errorf("Retry-After %q", res.Header.Get("Retry-After"))
			}
		})
	}
}

// failAfter is a store whose Complete, or whose Renew, fails from some time on.
type failAfter struct {
	dedup.Store
	complete, renew atomic.Pointer[error]
}

func (s *failAfter) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	if err := s.complete.Load(); err != nil {
		return *err
	}
	return s.Store.Complete(ctx, key, token, c)
}

func (s *failAfter) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	if err := s.renew.Load(); err != nil {
		return *err
	}
	return s.Store.Renew(ctx, key, token, lease)
}

// The answer could not be stored, or somebody else has the key by now: it is
// not sent, and what comes next is the policy's.
func TestNotStored(t *testing.T) {
	t.Parallel()
	for _, fault := range []error{errors.New("down"), dedup.ErrLeaseLost} {
		synctest.Test(t, func(t *testing.T) {
			store := &failAfter{Store: memstore.New()}
			store.complete.Store(&fault)
			store.renew.Store(&fault)
			h := counted(created)
			g := server.New(store, with(func(o *server.Options) { o.Lease = 2 * time.Second })).Handler(h)
			res := do(g, post("k", "x"))
			if res.Header.Get("Retry-After") == "" || res.Header.Get("Location") != "" || replayed(res) {
				t.Errorf("headers %v", res.Header)
			}
			wantProblem(t, res, 503, server.TypeOutcomePending)

			store.complete.Store(nil)
			store.renew.Store(nil)
			time.Sleep(2 * time.Second) // of the bubble's clock: the lease ends
			for range 2 {
				res = do(g, post("k", "x"))
				if !replayed(res) {
					t.Error("the answer is not said to be final")
				}
				wantProblem(t, res, 500, server.TypeOutcomeUnknown)
			}
			h.want(t, 1)
		})
	}
}

// A stream whose end can't be stored must not look whole.
func TestStreamNotStored(t *testing.T) {
	t.Parallel()
	store := &failAfter{Store: memstore.New()}
	lost := dedup.ErrLeaseLost
	store.complete.Store(&lost)
	send := wire(t, server.New(store, single).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "all of it")
		w.(http.Flusher).Flush()
	})))
	if a := send(post("k", "x")); a.Err == nil || a.Body != "all of it" {
		t.Errorf("answer %+v", a)
	}
}

// A run that loses its lease while it works: its context says why, and its
// answer is not given out as success.
func TestLeaseLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &failAfter{Store: memstore.New()}
		lost := dedup.ErrLeaseLost
		store.renew.Store(&lost)
		g := server.New(store, single).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			if err := context.Cause(r.Context()); !errors.Is(err, dedup.ErrLeaseLost) {
				t.Errorf("cause %v", err)
			}
			created(w, r)
		}))
		wantProblem(t, do(g, post("k", "x")), 503, server.TypeOutcomePending)
	})
}

// A handler that outlasts its lease keeps it; one that outlasts its limit is
// told, and its answer counts all the same.
func TestLongRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := counted(func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			if err := r.Context().Err(); err != context.DeadlineExceeded {
				t.Errorf("context's error %v", err)
			}
			created(w, r)
		})
		g := server.New(memstore.New(), with(func(o *server.Options) { o.Lease, o.Limit = time.Second, time.Minute })).Handler(h)
		var wg sync.WaitGroup
		wg.Go(func() {
			if res := do(g, post("k", "x")); res.StatusCode != 201 {
				t.Errorf("answer %d", res.StatusCode)
			}
		})
		time.Sleep(50 * time.Second) // of the bubble's clock
		wantProblem(t, do(g, post("k", "x")), 409, server.TypeInProgress)
		wg.Wait()
		if res := do(g, post("k", "x")); res.StatusCode != 201 || !replayed(res) {
			t.Errorf("later answer %d", res.StatusCode)
		}
		h.want(t, 1)
	})
}

func TestTTL(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := counted(created)
		g := server.New(memstore.New(), with(func(o *server.Options) { o.TTL = time.Hour })).Handler(h)
		do(g, post("k", "x"))
		time.Sleep(time.Hour - time.Second) // of the bubble's clock
		if res := do(g, post("k", "x")); !replayed(res) {
			t.Error("the answer is gone before its time")
		}
		time.Sleep(2 * time.Second)
		// A fresh request, also for another body.
		if res := do(g, post("k", "y")); res.StatusCode != 201 || replayed(res) {
			t.Errorf("after its time: %d %v", res.StatusCode, res.Header)
		}
		h.want(t, 2)
	})
}

// abandon leaves the request post("k", "x") behind as a crash does: claimed,
// with its lease over.
func abandon(t *testing.T, store dedup.Store) {
	t.Helper()
	c := dedup.Claim{
		Key:         server.StoreKey(server.SingleTenantName, "POST /charges", "k"),
		Fingerprint: server.Fingerprint(post("k", "x"), []byte("x")),
		Token:       dedup.NewToken(), Lease: time.Minute, TTL: time.Hour,
	}
	if _, err := store.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := store.Renew(t.Context(), c.Key, c.Token, 0); err != nil {
		t.Fatal(err)
	}
}

func TestAbandoned(t *testing.T) {
	t.Parallel()
	down := errors.New("the provider does not answer")
	for _, tt := range []struct {
		name    string
		change  func(o *server.Options)
		status  int
		typ     string
		effects int64
		again   int // the second answer
		final   bool
	}{
		{"fail", func(*server.Options) {}, 500, server.TypeOutcomeUnknown, 0, 500, true},
		{"reexecute", func(o *server.Options) { o.Abandoned = dedup.Reexecute }, 201, "", 1, 201, false},
		{"recover", func(o *server.Options) {
			o.Abandoned = dedup.Recover
			o.Recover = func(w http.ResponseWriter, r *http.Request) error {
				if body, err := io.ReadAll(r.Body); string(body) != "x" || err != nil || dedup.Attempt(r.Context()) != 2 {
					t.Errorf("Recover got body %q, %v, attempt %d", body, err, dedup.Attempt(r.Context()))
				}
				w.WriteHeader(202)
				return nil
			}
		}, 202, "", 0, 202, true},
		{"recover fails", func(o *server.Options) {
			o.Abandoned = dedup.Recover
			o.Recover = func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(202); return down }
		}, 503, server.TypeOutcomePending, 0, 503, false},
		{"recover panics", func(o *server.Options) {
			o.Abandoned = dedup.Recover
			o.Recover = func(http.ResponseWriter, *http.Request) error { panic("boom") }
		}, 503, server.TypeOutcomePending, 0, 503, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(func(w http.ResponseWriter, r *http.Request) {
				if n := dedup.Attempt(r.Context()); n != 2 {
					t.Errorf("attempt %d", n)
				}
				created(w, r)
			})
			store := memstore.New()
			abandon(t, store)
			opts := with(tt.change)
			opts.Logger = slog.New(slog.DiscardHandler) // of a panic
			opts.ErrorHandler = func(w http.ResponseWriter, r *http.Request, p *server.Problem) {
				if tt.name == "recover fails" && p.Type != server.TypeKeyReused && !errors.Is(p, down) {
					t.Errorf("cause of %v", p)
				}
				server.WriteProblem(w, r, p)
			}
			g := server.New(store, opts).Handler(h)
			wantProblem(t, do(g, post("k", "y")), 422, server.TypeKeyReused)
			res := do(g, post("k", "x"))
			if replayed(res) != tt.final {
				t.Errorf("final: %t", replayed(res))
			}
			if tt.typ == "" {
				if res.StatusCode != tt.status {
					t.Errorf("status %d, want %d", res.StatusCode, tt.status)
				}
			} else {
				wantProblem(t, res, tt.status, tt.typ)
			}
			if res := do(g, post("k", "x")); res.StatusCode != tt.again {
				t.Errorf("second answer %d, want %d", res.StatusCode, tt.again)
			}
			h.want(t, tt.effects)
		})
	}
}

// An operator resolves an operation whose outcome was unknown.
func TestResolved(t *testing.T) {
	t.Parallel()
	key := server.StoreKey(server.SingleTenantName, "POST /charges", "k")
	for _, tt := range []struct {
		name     string
		response *dedup.Response
		status   int
		body     string
		effects  int64
	}{
		{"done", ptr(server.Response(201, http.Header{"Location": {"/charges/9"}, "X": {"1", "2"}}, []byte("resolved"))), 201, "resolved", 0},
		{"done, by hand", &dedup.Response{Code: 200, Body: []byte("resolved")}, 200, "resolved", 0},
		{"not done", nil, 201, `{"id":1}`, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(created)
			store := memstore.New()
			abandon(t, store)
			g := server.New(store, single).Handler(h)
			wantProblem(t, do(g, post("k", "x")), 500, server.TypeOutcomeUnknown)
			if err := store.Resolve(t.Context(), key, tt.response, time.Hour); err != nil {
				t.Fatal(err)
			}
			res := do(g, post("k", "x"))
			if got := bodyOf(t, res); res.StatusCode != tt.status || got != tt.body {
				t.Errorf("answer %d %q", res.StatusCode, got)
			}
			if tt.name == "done" && (res.Header.Get("Location") != "/charges/9" || len(res.Header["X"]) != 2) {
				t.Errorf("headers %v", res.Header)
			}
			h.want(t, tt.effects)
		})
	}
}

func ptr[T any](v T) *T { return &v }

// A row that can't be read is never half an answer, and never runs again.
func TestUnreadableRecord(t *testing.T) {
	t.Parallel()
	for _, stored := range []dedup.Response{
		{Code: 200, Header: []byte("x")},
		{Code: 200, Header: []byte("\x02\x00\x00\x00")},
		{Code: 42},
		{Code: 101},
		{Code: 1000},
	} {
		h := counted(created)
		store := memstore.New()
		abandon(t, store)
		key := server.StoreKey(server.SingleTenantName, "POST /charges", "k")
		if err := store.Resolve(t.Context(), key, &stored, time.Hour); err != nil {
			t.Fatal(err)
		}
		res := do(server.New(store, single).Handler(h), post("k", "x"))
		if !replayed(res) {
			t.Error("the answer is not said to be final")
		}
		wantProblem(t, res, 500, server.TypeOutcomeUnknown)
		h.want(t, 0)
	}
}

// A waiter whose client goes away stops waiting.
func TestWaiterDisconnects(t *testing.T) {
	t.Parallel()
	running, finish := make(chan struct{}), make(chan struct{})
	h := counted(func(w http.ResponseWriter, r *http.Request) { close(running); <-finish; created(w, r) })
	g := server.New(memstore.New(), with(func(o *server.Options) { o.Wait = time.Hour })).Handler(h)
	var wg sync.WaitGroup
	wg.Go(func() { do(g, post("k", "x")) })
	<-running
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if res := do(g, post("k", "x").WithContext(ctx)); res.StatusCode != 503 {
		t.Errorf("status %d", res.StatusCode)
	}
	close(finish)
	wg.Wait()
	h.want(t, 1)
}

// All that a client may be told about its key, it is told without the key.
func TestProblemsDoNotShowKeys(t *testing.T) {
	t.Parallel()
	g := server.New(memstore.New(), single).Handler(counted(created))
	do(g, post("secret", "x"))
	for _, r := range []*http.Request{post("secret", "y"), post("\"secret", "x"), post(strings.Repeat("secret", 99), "x")} {
		if body := bodyOf(t, do(g, r)); strings.Contains(body, "secret") {
			t.Errorf("problem %s", body)
		}
	}
}
