package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

const (
	lease = 10 * time.Minute // long enough for no test to outlive it
	ttl   = 24 * time.Hour

	// How long a test waits for something that must happen before it says that
	// it did not. Nothing that works takes near as long.
	patience = time.Minute
)

// env is one test's store, and shorthands that state the promise when they fail.
type env struct {
	t     *testing.T
	s     dedup.Store
	caps  Caps
	ctx   context.Context
	key   dedup.Key
	print []byte // the usual fingerprint
}

func newEnv(t *testing.T, s dedup.Store, caps Caps) *env {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	return &env{
		t: t, s: s, caps: caps, ctx: ctx,
		key:   dedup.Key{Scope: "tenant 1", ID: "order-" + dedup.NewToken().String()[:8]},
		print: []byte("fingerprint"),
	}
}

// other is a key that no one else uses.
func (e *env) other(name string) dedup.Key { return dedup.Key{Scope: e.key.Scope, ID: e.key.ID + name} }

func (e *env) claimOf(k dedup.Key, token dedup.Token) dedup.Claim {
	return dedup.Claim{Key: k, Fingerprint: e.print, Token: token, Lease: lease, TTL: ttl}
}

// claim claims and fails the test on an error.
func (e *env) claim(c dedup.Claim) dedup.Result {
	e.t.Helper()
	r, err := e.s.Claim(e.ctx, c)
	if err != nil {
		e.t.Fatalf("Claim(%v): %v", c.Key, err)
	}
	return r
}

// want claims k with a fresh token and expects state.
func (e *env) want(k dedup.Key, state dedup.State, promise string) dedup.Result {
	e.t.Helper()
	return e.wantClaim(e.claimOf(k, dedup.NewToken()), state, promise)
}

func (e *env) wantClaim(c dedup.Claim, state dedup.State, promise string) dedup.Result {
	e.t.Helper()
	r := e.claim(c)
	if r.State != state {
		e.t.Fatalf("Claim is %q, want %q: %s", r.State, state, promise)
	}
	return r
}

// won makes a live row of k and returns its token.
func (e *env) won(k dedup.Key) dedup.Token {
	e.t.Helper()
	token := dedup.NewToken()
	e.wantClaim(e.claimOf(k, token), dedup.Won, "an absent key is won by the first claim")
	return token
}

// abandoned makes an abandoned row of k and returns its token.
func (e *env) abandoned(k dedup.Key) dedup.Token {
	e.t.Helper()
	token := e.won(k)
	e.caps.Lapse(e.t, e.s, k)
	return token
}

// completed makes a completed row of k.
func (e *env) completed(k dedup.Key, r dedup.Response) dedup.Token {
	e.t.Helper()
	token := e.won(k)
	e.complete(k, token, dedup.StatusCompleted, r)
	return token
}

// unknown makes a row of k that waits for Resolve.
func (e *env) unknown(k dedup.Key) dedup.Token {
	e.t.Helper()
	token := e.won(k)
	e.complete(k, token, dedup.StatusUnknown, dedup.Response{})
	return token
}

func (e *env) complete(k dedup.Key, token dedup.Token, status dedup.Status, r dedup.Response) {
	e.t.Helper()
	err := e.s.Complete(e.ctx, k, token, dedup.Completion{Status: status, Response: r, TTL: ttl})
	e.ok(err, "Complete", "the holder of the token completes its row")
}

func (e *env) get(k dedup.Key) dedup.Record {
	e.t.Helper()
	r, err := e.s.Get(e.ctx, k)
	if err != nil {
		e.t.Fatalf("Get(%v): %v", k, err)
	}
	return r
}

// absent checks that nothing shows of a row of k.
func (e *env) absent(k dedup.Key, promise string) {
	e.t.Helper()
	r, err := e.s.Get(e.ctx, k)
	if !errors.Is(err, dedup.ErrNotFound) {
		e.t.Errorf("Get = %v (attempt %d), %v, want ErrNotFound: %s", r.Status, r.Attempt, err, promise)
	}
}

func (e *env) ok(err error, call, promise string) {
	e.t.Helper()
	if err != nil {
		e.t.Fatalf("%s: %v: %s", call, err, promise)
	}
}

func (e *env) is(err, want error, call, promise string) {
	e.t.Helper()
	if !errors.Is(err, want) {
		e.t.Errorf("%s = %v, want an error that is %q: %s", call, err, want, promise)
	}
}

func (e *env) response(got, want dedup.Response, promise string) {
	e.t.Helper()
	if err := sameResponse(got, want); err != nil {
		e.t.Errorf("stored answer: %v: %s", err, promise)
	}
}

func sameResponse(got, want dedup.Response) error {
	switch {
	case got.Code != want.Code:
		return fmt.Errorf("code is %d, want %d", got.Code, want.Code)
	case !bytes.Equal(got.Header, want.Header):
		return fmt.Errorf("header is %s, want %s", show(got.Header), show(want.Header))
	case !bytes.Equal(got.Body, want.Body):
		return fmt.Errorf("body is %s, want %s", show(got.Body), show(want.Body))
	}
	return nil
}

func show(b []byte) string {
	if len(b) > 64 {
		return fmt.Sprintf("%q… (%d bytes)", b[:64], len(b))
	}
	return fmt.Sprintf("%q", b)
}

// fenced checks that token can no longer write to the row of k.
func (e *env) fenced(k dedup.Key, token dedup.Token, promise string) {
	e.t.Helper()
	e.is(e.s.Renew(e.ctx, k, token, lease), dedup.ErrLeaseLost, "Renew", promise)
	e.is(e.s.Complete(e.ctx, k, token, done("fenced")), dedup.ErrLeaseLost, "Complete", promise)
	e.is(e.s.Release(e.ctx, k, token), dedup.ErrLeaseLost, "Release", promise)
}

func answer(body string) dedup.Response {
	return dedup.Response{Code: 201, Header: []byte("head of " + body), Body: []byte(body)}
}

func done(body string) dedup.Completion {
	return dedup.Completion{Status: dedup.StatusCompleted, Response: answer(body), TTL: ttl}
}

// near checks that got is want by the store's clock, allowing for the time that
// the calls took and for coarse columns.
func (e *env) near(what string, got, want time.Time) {
	e.t.Helper()
	if d := got.Sub(want).Abs(); d > patience {
		e.t.Errorf("%s is %v, want about %v (%v off)", what, got, want, d)
	}
}

// pastTTL waits until the store's own clock has passed at, which must be near.
func (e *env) pastTTL(at time.Time) {
	e.t.Helper()
	for n := 0; e.ctx.Err() == nil; n++ {
		k := e.other(fmt.Sprint("-clock-", n))
		token := e.won(k)
		now := e.get(k).CreatedAt
		e.ok(e.s.Release(e.ctx, k, token), "Release", "the holder of the token releases its row")
		if now.After(at) {
			return
		}
	}
	e.t.Fatalf("the store's clock did not pass %v", at)
}
