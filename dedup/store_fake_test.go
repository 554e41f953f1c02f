package dedup_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

var errDown = errors.New("store is down")

// faultyStore is a memory store whose calls can be made to fail, before or
// after they took effect.
type faultyStore struct {
	dedup.Store
	mu     sync.Mutex
	before map[string]func() error // by method; called instead of it if it returns an error
	after  map[string]func() error
	calls  map[string]int
}

func newFaulty() *faultyStore {
	return &faultyStore{
		Store: memstore.New(), calls: map[string]int{},
		before: map[string]func() error{}, after: map[string]func() error{},
	}
}

func (f *faultyStore) call(method string, do func() error) error {
	f.mu.Lock()
	f.calls[method]++
	before, after := f.before[method], f.after[method]
	f.mu.Unlock()
	if before != nil {
		if err := before(); err != nil {
			return err
		}
	}
	err := do()
	if after != nil {
		if aerr := after(); aerr != nil {
			return aerr
		}
	}
	return err
}

func (f *faultyStore) failBefore(method string, fault func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before[method] = fault
}

func (f *faultyStore) failAfter(method string, fault func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.after[method] = fault
}

func (f *faultyStore) count(method string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[method]
}

func (f *faultyStore) Claim(ctx context.Context, c dedup.Claim) (res dedup.Result, err error) {
	err = f.call("Claim", func() (err error) { res, err = f.Store.Claim(ctx, c); return err })
	return res, err
}

func (f *faultyStore) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	return f.call("Renew", func() error { return f.Store.Renew(ctx, key, token, lease) })
}

func (f *faultyStore) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	return f.call("Complete", func() error { return f.Store.Complete(ctx, key, token, c) })
}

func (f *faultyStore) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	return f.call("Release", func() error { return f.Store.Release(ctx, key, token) })
}

func (f *faultyStore) Purge(ctx context.Context, limit int) (n int, err error) {
	err = f.call("Purge", func() (err error) { n, err = f.Store.Purge(ctx, limit); return err })
	return n, err
}

// times returns a fault that happens the first n times.
func times(n int, err error) func() error {
	return func() error {
		if n == 0 {
			return nil
		}
		n--
		return err
	}
}

func always(err error) func() error { return func() error { return err } }

var testKey = dedup.Key{Scope: "tenant", ID: "key-1"}

func request(fingerprint string) dedup.Request {
	return dedup.Request{Key: testKey, Fingerprint: []byte(fingerprint)}
}

// answers is work that counts its runs.
type answers struct {
	mu   sync.Mutex
	runs int
}

func (a *answers) work(body string) dedup.Work {
	return func(context.Context) (dedup.Answer, error) {
		a.mu.Lock()
		a.runs++
		a.mu.Unlock()
		return answer(body), nil
	}
}

func (a *answers) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runs
}

func answer(body string) dedup.Answer {
	return dedup.Answer{Response: dedup.Response{Code: 201, Body: []byte(body)}}
}

func mustDo(t *testing.T, e *dedup.Engine, r dedup.Request, w dedup.Work) dedup.Outcome {
	t.Helper()
	out, err := e.Do(t.Context(), r, w)
	if err != nil {
		t.Fatalf("Do: %v", err)
	}
	return out
}

func wantState(t *testing.T, out dedup.Outcome, want dedup.State) {
	t.Helper()
	if out.State != want {
		t.Fatalf("state is %v, want %v (outcome %+v)", out.State, want, out)
	}
}

func wantAnswer(t *testing.T, out dedup.Outcome, state dedup.State, body string) {
	t.Helper()
	wantState(t, out, state)
	if got := string(out.Response.Body); got != body {
		t.Fatalf("body is %q, want %q", got, body)
	}
}

func never(t *testing.T) dedup.Work {
	return func(context.Context) (dedup.Answer, error) {
		t.Error("the work ran, and must not have")
		return answer("never"), nil
	}
}
