package server_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

// single is what most tests need of the options.
var single = server.Options{Scope: server.SingleTenant}

func with(change func(o *server.Options)) server.Options {
	o := single
	change(&o)
	return o
}

// counter is a handler that counts its effects.
type counter struct {
	n int64
	h http.HandlerFunc
}

func counted(h http.HandlerFunc) *counter { return &counter{h: h} }

func (c *counter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	atomic.AddInt64(&c.n, 1)
	c.h(w, r)
}

func (c *counter) effects() int64 { return atomic.LoadInt64(&c.n) }

func (c *counter) want(t *testing.T, n int64) {
	t.Helper()
	if got := c.effects(); got != n {
		t.Errorf("the handler ran %d times, want %d", got, n)
	}
}

// post returns a request with a key; "" for none.
func post(key, body string) *http.Request {
	r := httptest.NewRequest("POST", "/charges", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	return r
}

// do serves r without a network.
func do(h http.Handler, r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func bodyOf(t *testing.T, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// wantProblem checks that res is a problem of that type and status.
func wantProblem(t *testing.T, res *http.Response, status int, typ string) {
	t.Helper()
	body := bodyOf(t, res)
	var p server.Problem
	if err := json.Unmarshal([]byte(body), &p); err != nil {
		t.Fatalf("status %d, body %q: %v", res.StatusCode, body, err)
	}
	if res.StatusCode != status || p.Status != status || p.Type != typ || p.Title == "" {
		t.Errorf("status %d with problem %s; want %d %s", res.StatusCode, body, status, typ)
	}
	if ct := res.Header.Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("Content-Type %q of a problem", ct)
	}
}

func replayed(res *http.Response) bool { return res.Header.Get("Idempotent-Replayed") == "true" }

// fakeTx is a memory store with transactions of a kind: nothing is undone but
// the claim, and the tests see what the guard asks for.
type fakeTx struct {
	dedup.Store
	commit             func(n int64) error // of the n-th Commit, from 1; an error means that nothing was committed
	commits, rollbacks atomic.Int64
}

func newFakeTx() *fakeTx { return &fakeTx{Store: memstore.New()} }

func (s *fakeTx) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	res, err := s.Claim(ctx, c)
	if err != nil || res.State != dedup.Won && res.State != dedup.Abandoned {
		return nil, res, err
	}
	return &tx{s: s, c: c}, res, nil
}

type tx struct {
	s *fakeTx
	c dedup.Claim
}

func (tx *tx) Context(ctx context.Context) context.Context { return ctx }

func (tx *tx) Commit(ctx context.Context, done dedup.Completion) error {
	n := tx.s.commits.Add(1)
	if tx.s.commit != nil {
		if err := tx.s.commit(n); err != nil {
			_ = tx.s.Release(ctx, tx.c.Key, tx.c.Token)
			return err
		}
	}
	return tx.s.Complete(ctx, tx.c.Key, tx.c.Token, done)
}

func (tx *tx) Rollback(ctx context.Context) error {
	tx.s.rollbacks.Add(1)
	return tx.s.Release(ctx, tx.c.Key, tx.c.Token)
}

// wantTx checks how many transactions were committed and rolled back.
func (s *fakeTx) wantTx(t *testing.T, commits, rollbacks int64) {
	t.Helper()
	if c, r := s.commits.Load(), s.rollbacks.Load(); c != commits || r != rollbacks {
		t.Errorf("%d commits and %d rollbacks, want %d and %d", c, r, commits, rollbacks)
	}
}
