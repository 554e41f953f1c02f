package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/server"
)

// These are the promises that all else is for, by name, over every store.
// TestConcurrentDuplicates is in server_test.go, TestConsumerRedelivery in server_test/consumer, TestOutboxAtomicity in
// server_test/outbox, and TestByDesign in server_test.

// charger is a handler with one effect.
func (b *backend) charger(t *testing.T) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		b.do(t, r)
		w.Header().Set("Location", "/charges/1")
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, `{"id":1}`)
	}
}

// A POST that arrives again has no effect, and the answer of the first one.
func TestDuplicatePostIsNoOp(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		g := b.guard(mode, b.charger(t))
		for n := range 5 {
			w := serve(g, charge(`{"cents":100}`))
			wantAnswer(t, w, 201, `{"id":1}`)
			if isReplay(w) != (n > 0) || w.Header().Get("Location") != "/charges/1" {
				t.Errorf("answer %d has the headers %v", n, w.Header())
			}
		}
		b.wantEffects(t, 1)
	})
}

// A key that stands for one request is refused with another, and has no effect.
func TestKeyReuseDifferentBody(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		g := b.guard(mode, b.charger(t))
		wantAnswer(t, serve(g, charge(`{"cents":100}`)), 201, `{"id":1}`)
		wantAnswer(t, serve(g, charge(`{"cents":101}`)), 422, server.TypeKeyReused)
		wantAnswer(t, serve(g, charge(`{"cents":100}`)), 201, `{"id":1}`)
		b.wantEffects(t, 1)
	})
}

// badWire answers, in turns, what a network and an overloaded server do.
type badWire struct {
	base http.RoundTripper

	mu   sync.Mutex
	n    int
	keys map[string]int // that were on the wire
}

var errLost = errors.New("the answer was lost")

func (w *badWire) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	n := w.n
	w.n++
	w.keys[r.Header.Get("Idempotency-Key")]++
	w.mu.Unlock()
	switch n {
	case 0: // it does not arrive
		r.Body.Close()
		return nil, errLost
	case 1: // its answer is lost after the effect
		resp, err := w.base.RoundTrip(r)
		if err == nil {
			resp.Body.Close()
		}
		return nil, errLost
	case 2: // something before the server is overloaded
		r.Body.Close()
		return &http.Response{StatusCode: 503, Header: http.Header{"Retry-After": {"0"}}, Body: http.NoBody, Request: r}, nil
	}
	return w.base.RoundTrip(r)
}

// Our client sends all attempts of an operation under one key, and our server
// lets one of them have the effect.
func TestOneKeyAcrossRetries(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		mux := http.NewServeMux()
		mux.Handle("POST /moved", http.RedirectHandler("/charges", http.StatusTemporaryRedirect))
		mux.Handle("POST /charges", b.guard(mode, b.charger(t)))
		srv := httptest.NewServer(mux)
		defer srv.Close()
		wire := &badWire{base: srv.Client().Transport, keys: map[string]int{}}
		client := &http.Client{Transport: &idempotency.Transport{Base: wire,
			Retry: idempotency.RetryPolicy{MinWait: time.Microsecond, MaxWait: time.Millisecond, MaxAttempts: 6}}}
		resp, err := client.Post(srv.URL+"/moved", "application/json", strings.NewReader(`{"cents":100}`))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 201 || string(body) != `{"id":1}` {
			t.Errorf("answer %d %s, %v", resp.StatusCode, body, err)
		}
		if len(wire.keys) != 1 || wire.keys[""] > 0 || wire.n < 5 {
			t.Errorf("%d requests on the wire, with the keys %v; want several with one", wire.n, wire.keys)
		}
		b.wantEffects(t, 1)
	})
}

// What has expired is removed, in bounded batches, and its key is new again.
// What is running, or of unknown outcome, stays.
func TestRetentionBounded(t *testing.T) {
	t.Parallel()
	onBackends(t, func(t *testing.T, b *backend, mode dedup.Mode) {
		ttl := func(o *server.Options) { o.TTL = time.Millisecond }
		short, long := b.guard(mode, b.charger(t), ttl), b.guard(mode, b.charger(t))
		keyed := func(key string) *http.Request {
			r := charge(`{"cents":100}`)
			r.Header.Set("Idempotency-Key", key)
			return r
		}
		wantAnswer(t, serve(long, keyed("kept")), 201, "")
		const n = 25
		for i := range n {
			wantAnswer(t, serve(short, keyed(fmt.Sprint("short ", i))), 201, "")
		}
		// A lease that runs, whatever its TTL.
		live := dedup.Claim{Key: dedup.Key{Scope: "s", ID: "live"}, Fingerprint: []byte("f"), Token: dedup.NewToken(), Lease: time.Hour, TTL: time.Millisecond}
		if res, err := b.Claim(t.Context(), live); err != nil || res.State != dedup.Won {
			t.Fatalf("Claim = %v, %v", res.State, err)
		}
		unknown := live
		unknown.Key.ID, unknown.Token = "unknown", dedup.NewToken()
		if _, err := b.Claim(t.Context(), unknown); err != nil {
			t.Fatal(err)
		}
		if err := b.Complete(t.Context(), unknown.Key, unknown.Token, dedup.Completion{Status: dedup.StatusUnknown, TTL: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
		removed := 0
		for ctx := t.Context(); removed < n && ctx.Err() == nil; {
			got, err := b.Purge(ctx, 10)
			if err != nil || got > 10 {
				t.Fatalf("Purge(10) = %d, %v", got, err)
			}
			removed += got
			if got == 0 && b.gone(ctx, n) {
				break // Redis removes what has expired by itself
			}
		}
		for _, id := range []string{"live", "unknown"} {
			if _, err := b.Get(t.Context(), dedup.Key{Scope: "s", ID: id}); err != nil {
				t.Errorf("the %s one is gone: %v", id, err)
			}
		}
		again := serve(long, keyed("kept"))
		wantAnswer(t, again, 201, "")
		if !isReplay(again) {
			t.Error("what had not expired was run again")
		}
		if w := serve(short, keyed("short 0")); isReplay(w) {
			t.Error("an expired answer was replayed")
		}
		b.wantEffects(t, n+2)
	})
}

// gone says whether all keys of TestRetentionBounded have expired.
func (b *backend) gone(ctx context.Context, n int) bool {
	for i := range n {
		_, err := b.Get(ctx, server.StoreKey("acme", "POST /charges", fmt.Sprint("short ", i)))
		if !errors.Is(err, dedup.ErrNotFound) {
			return false
		}
	}
	return true
}
