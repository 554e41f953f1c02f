package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jarcoal/httpmock"

	"github.com/effectonce/idempotency"
)

func TestOnAttemptSeesEachAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		type seen struct {
			Number, Status int
			Lost, Retry    bool
			Wait, Elapsed  time.Duration
		}
		slow := func(req *http.Request) (*http.Response, error) {
			time.Sleep(3 * time.Second)
			return status(503, "", "Retry-After", "7")(req)
		}
		b := answering(slow, lost, status(201, ""))
		var got []seen
		var key string
		tr := &idempotency.Transport{Base: b, OnAttempt: func(ctx context.Context, a idempotency.Attempt) {
			if ctx == nil || a.Request.Header.Get("Idempotency-Key") != a.Key {
				t.Errorf("attempt %d: key %q, request %v", a.Number, a.Key, a.Request.Header)
			}
			key = a.Key
			s := seen{a.Number, a.Status, errors.Is(a.Err, errLost), a.Retry, a.Wait, a.Elapsed}
			if s.Lost {
				s.Wait = min(s.Wait, 1) // drawn at random
			}
			got = append(got, s)
		}}
		resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		want := []seen{
			{1, 503, false, true, 7 * time.Second, 3 * time.Second},
			{2, 0, true, true, 1, 0},
			{3, 201, false, false, 0, 0},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if key != b.oneKey(t, 3) {
			t.Errorf("key %q", key)
		}
	})
}

func TestLoggerTellsRetriesAndNoSecrets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		tr := &idempotency.Transport{
			Base:   answering(status(503, ""), lost, status(201, "")),
			Logger: slog.New(slog.NewTextHandler(&out, nil)),
		}
		req := newPost(t, apiURL+"?card=4242", "x")
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := tr.RoundTrip(idempotentKey(req, "my-key"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[0], "status=503") || !strings.Contains(lines[1], errLost.Error()) ||
			!strings.Contains(lines[1], "attempt=2") || !strings.Contains(lines[0], "host=api.example.com") {
			t.Errorf("log:\n%s", out.String())
		}
		for _, secret := range []string{"4242", "secret", "my-key", "/charges"} {
			if strings.Contains(out.String(), secret) {
				t.Errorf("the log has %q:\n%s", secret, out.String())
			}
		}
	})
}

func idempotentKey(req *http.Request, key string) *http.Request {
	return req.WithContext(idempotency.WithKey(req.Context(), key))
}

// What each provider gets, as it goes out. Mocked by httpmock, as users do.
func TestProvidersOnTheWire(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		provider idempotency.Provider
		header   string
		value    string // of the key k"1
		longest  int
		patch    bool
	}{
		"default":         {idempotency.Provider{}, "Idempotency-Key", `k"1`, 255, true},
		"IETF":            {idempotency.IETF(), "Idempotency-Key", `"k\"1"`, 255, true},
		"Stripe":          {idempotency.Stripe(), "Idempotency-Key", `k"1`, 255, false},
		"PayPal":          {idempotency.PayPal(), "PayPal-Request-Id", `k"1`, 108, false},
		"Adyen":           {idempotency.Adyen(), "Idempotency-Key", `k"1`, 64, false},
		"Checkout.com":    {idempotency.CheckoutCom(), "Cko-Idempotency-Key", `k"1`, 255, false},
		"Mercado Pago":    {idempotency.MercadoPago(), "X-Idempotency-Key", `k"1`, 64, false},
		"Modern Treasury": {idempotency.ModernTreasury(), "Idempotency-Key", `k"1`, 255, false},
		"Increase":        {idempotency.Increase(), "Idempotency-Key", `k"1`, 200, false},
		"GoCardless":      {idempotency.GoCardless(), "Idempotency-Key", `k"1`, 128, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mock := httpmock.NewMockTransport()
			var sent http.Header
			answer := func(req *http.Request) (*http.Response, error) {
				sent = req.Header
				return httpmock.NewStringResponse(201, "{}"), nil
			}
			mock.RegisterResponder("POST", apiURL, answer)
			mock.RegisterResponder("PATCH", apiURL, answer)
			tr := &idempotency.Transport{Base: mock, Provider: tt.provider}
			send := func(method, key string) error {
				req := idempotentKey(newPost(t, apiURL, "x"), key)
				req.Method = method
				resp, err := tr.RoundTrip(req)
				if err == nil {
					resp.Body.Close()
				}
				return err
			}
			if err := send("POST", `k"1`); err != nil {
				t.Fatal(err)
			}
			if got := sent[http.CanonicalHeaderKey(tt.header)]; !cmp.Equal(got, []string{tt.value}) {
				t.Errorf("%s: %q, want %q", tt.header, got, tt.value)
			}
			// net/http repeats a request on a stale connection only for these two.
			if _, ok := sent["X-Idempotency-Key"]; ok != (tt.header != "Idempotency-Key") {
				t.Errorf("X-Idempotency-Key is set: %v", ok)
			}
			if err := send("PATCH", "k"); err != nil || (sent[http.CanonicalHeaderKey(tt.header)] != nil) != tt.patch {
				t.Errorf("PATCH: %v, %v; want a key: %v", err, sent, tt.patch)
			}
			if err := send("POST", strings.Repeat("k", tt.longest)); err != nil {
				t.Errorf("a key of %d bytes: %v", tt.longest, err)
			}
			if err := send("POST", strings.Repeat("k", tt.longest+1)); !errors.Is(err, idempotency.ErrInvalidKey) {
				t.Errorf("a key of %d bytes: %v", tt.longest+1, err)
			}
		})
	}
}

// The key in an Error, sent again by WithKey, is the same on the wire.
func TestKeyOfAnErrorIsTheSameAgain(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		provider idempotency.Provider
		header   string
	}{
		"bare":                   {idempotency.Provider{}, "abc"},
		"bare, in quotes":        {idempotency.Provider{}, `"abc"`},
		"quoted":                 {idempotency.IETF(), `"abc"`},
		"quoted, with backslash": {idempotency.IETF(), `"a\\b\"c"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(lost)
			tr := &idempotency.Transport{Base: b, Provider: tt.provider, Retry: idempotency.RetryPolicy{MaxAttempts: 1}}
			req := newPost(t, apiURL, "x")
			req.Header.Set("Idempotency-Key", tt.header)
			_, err := tr.RoundTrip(req)
			var e *idempotency.Error
			if !errors.As(err, &e) {
				t.Fatal(err)
			}
			_, _ = tr.RoundTrip(idempotentKey(newPost(t, apiURL, "x"), e.Key))
			if b.keys[0] != tt.header || b.keys[1] != tt.header {
				t.Errorf("sent as %q, want %q both times", b.keys, tt.header)
			}
		})
	}
}

// Without a way to send the body again, net/http must not be made to try.
func TestNoReplayHintForOneTimeBodies(t *testing.T) {
	t.Parallel()
	b := answering(status(201, ""))
	tr := &idempotency.Transport{Base: b, Provider: idempotency.PayPal(), MaxBufferedBody: -1}
	resp, err := tr.RoundTrip(withBody(newPost(t, apiURL, ""), newTracked("x"), 1))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if _, ok := b.reqs[0].Header["X-Idempotency-Key"]; ok {
		t.Error("X-Idempotency-Key is set")
	}
}

// A key that the caller sets on a PUT is the operation's.
func TestOwnKeyOnOtherMethods(t *testing.T) {
	t.Parallel()
	b := answering(status(500, "stored", "Idempotent-Replayed", "true"))
	req := newPost(t, apiURL, "x")
	req.Method = http.MethodPut
	req.Header.Set("Idempotency-Key", "own")
	resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, resp); got != "stored" || b.oneKey(t, 1) != "own" {
		t.Errorf("answer %q", got)
	}
}

// Inside and outside of other transports, as oauth2's and otelhttp's.
func TestStacksWithOtherTransports(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		token := 0
		b := answering(lost, status(503, ""), status(201, ""))
		auth := func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(req *http.Request) (*http.Response, error) {
				token++
				out := req.Clone(req.Context())
				out.Header.Set("Authorization", strings.Repeat("t", token))
				return next.RoundTrip(out)
			})
		}
		inside := &idempotency.Transport{Base: auth(b)}
		resp, err := inside.RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if b.oneKey(t, 3); b.reqs[2].Header.Get("Authorization") != "ttt" {
			t.Error("the attempts don't go through the transport inside")
		}
		token = 0
		b = answering(lost, status(503, ""), status(201, ""))
		resp, err = auth(&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if b.oneKey(t, 3); b.reqs[2].Header.Get("Authorization") != "t" {
			t.Error("the attempts don't keep what the transport outside has set")
		}
	})
}
