package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/uuid"

	"github.com/effectonce/idempotency"
)

func TestOneKeyOnEveryAttempt(t *testing.T) {
	t.Parallel()
	created := status(201, "done")
	tests := map[string]*base{
		"network errors":           answering(lost, lost, created),
		"429":                      answering(status(429, ""), status(429, "", "Retry-After", "1"), created),
		"503":                      answering(status(503, "busy"), status(503, "busy"), created),
		"409 with Retry-After":     answering(status(409, "", "Retry-After", "1"), status(409, "", "Retry-After", "2"), created),
		"one after another":        answering(lost, status(409, "", "Retry-After", "1"), created),
		"500, 408, and the answer": answering(status(500, ""), status(408, ""), created),
	}
	for name, b := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				client := &http.Client{Transport: &idempotency.Transport{Base: b}}
				resp, err := client.Do(newPost(t, apiURL, "charge"))
				if err != nil {
					t.Fatal(err)
				}
				if got := readAll(t, resp); resp.StatusCode != 201 || got != "done" {
					t.Errorf("answer %d %q", resp.StatusCode, got)
				}
				if _, err := uuid.Parse(b.oneKey(t, 3)); err != nil {
					t.Errorf("the key is no UUID: %v", err)
				}
				for i, body := range b.bodies {
					if body != "charge" {
						t.Errorf("attempt %d has the body %q", i+1, body)
					}
				}
			})
		})
	}
}

func TestTwoSendsAreTwoOperations(t *testing.T) {
	t.Parallel()
	b := answering(status(201, ""))
	tr := &idempotency.Transport{Base: b}
	for range 2 {
		resp, err := tr.RoundTrip(newPost(t, apiURL, "charge"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if b.keys[0] == b.keys[1] {
		t.Error("two operations have one key")
	}
}

func TestKeyPrecedence(t *testing.T) {
	t.Parallel()
	own := func(*http.Request) (string, error) { return "from-func", nil }
	inOp := idempotency.WithOperation(t.Context(), "op-1")
	step := idempotency.Deterministic("step", "op-1", "charge")
	tests := map[string]struct {
		ctx    context.Context
		header string
		key    idempotency.KeyFunc
		want   string
	}{
		"header first":            {idempotency.WithKey(t.Context(), "from-ctx"), "from-header", own, "from-header"},
		"then WithKey":            {idempotency.WithKey(t.Context(), "from-ctx"), "", own, "from-ctx"},
		"then WithStep":           {idempotency.WithStep(inOp, "charge"), "", own, step},
		"the inner one of both":   {idempotency.WithKey(idempotency.WithStep(inOp, "charge"), "from-ctx"), "", own, "from-ctx"},
		"then Key":                {t.Context(), "", own, "from-func"},
		"an operation is no step": {inOp, "", own, "from-func"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(status(201, ""))
			req := newPost(t, apiURL, "").WithContext(tt.ctx)
			if tt.header != "" {
				req.Header.Set("Idempotency-Key", tt.header)
			}
			resp, err := (&idempotency.Transport{Base: b, Key: tt.key}).RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got := b.oneKey(t, 1); got != tt.want {
				t.Errorf("key %q, want %q", got, tt.want)
			}
		})
	}
}

func TestMethodsWithAndWithoutKey(t *testing.T) {
	t.Parallel()
	for method, keyed := range map[string]bool{
		"POST": true, "PATCH": true, "GET": false, "HEAD": false, "OPTIONS": false, "PUT": false, "DELETE": false, "": false,
	} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(status(503, ""), status(200, ""))
				req := newPost(t, apiURL, "")
				req.Method = method
				resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if resp.StatusCode != 200 || b.count() != 2 {
					t.Errorf("status %d after %d attempts, want a retry", resp.StatusCode, b.count())
				}
				if got := b.keys[0] != ""; got != keyed {
					t.Errorf("has a key: %v, want %v", got, keyed)
				}
			})
		})
	}
}

// A POST that gets no key may be repeated only if it was certainly not sent.
func TestKeylessPostIsNotRepeated(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(*http.Request) (*http.Response, error){"503": status(503, ""), "lost": lost} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(first, status(201, ""))
			tr := &idempotency.Transport{Base: b, Provider: idempotency.Provider{Methods: []string{"PATCH"}}}
			resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
			if err == nil {
				resp.Body.Close()
			}
			if b.count() != 1 {
				t.Errorf("%d attempts", b.count())
			}
		})
	}
}

func TestBadKeysAreRefused(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	tests := map[string]struct {
		key  idempotency.KeyFunc
		ctx  context.Context
		want error
	}{
		"too long":           {key: func(*http.Request) (string, error) { return strings.Repeat("k", 256), nil }, want: idempotency.ErrInvalidKey},
		"line break":         {key: func(*http.Request) (string, error) { return "a\r\nB: c", nil }, want: idempotency.ErrInvalidKey},
		"not ASCII":          {key: func(*http.Request) (string, error) { return "schlüssel", nil }, want: idempotency.ErrInvalidKey},
		"empty by WithKey":   {ctx: idempotency.WithKey(t.Context(), ""), want: idempotency.ErrInvalidKey},
		"error of Key":       {key: func(*http.Request) (string, error) { return "", boom }, want: boom},
		"step of nothing":    {ctx: idempotency.WithStep(t.Context(), "charge"), want: idempotency.ErrNoOperation},
		"border with spaces": {key: func(*http.Request) (string, error) { return " k", nil }, want: idempotency.ErrInvalidKey},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(status(201, ""))
			body := newTracked("charge")
			req := newPost(t, apiURL, "")
			req.Body, req.GetBody = body, nil
			if tt.ctx != nil {
				req = req.WithContext(tt.ctx)
			}
			resp, err := (&idempotency.Transport{Base: b, Key: tt.key}).RoundTrip(req)
			if !errors.Is(err, tt.want) || resp != nil {
				t.Errorf("RoundTrip = %v, %v; want %v", resp, err, tt.want)
			}
			if b.count() != 0 {
				t.Error("it was sent")
			}
			body.check(t, name)
		})
	}
}

func TestKeyFuncMayDecline(t *testing.T) {
	t.Parallel()
	b := answering(status(503, ""), status(201, ""))
	tr := &idempotency.Transport{Base: b, Key: func(*http.Request) (string, error) { return "", nil }}
	resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if b.count() != 1 || b.reqs[0].Header["Idempotency-Key"] != nil {
		t.Errorf("%d attempts, header %v; want one without a key", b.count(), b.reqs[0].Header)
	}
}

func TestDeterministicTellsPartsApart(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	for i, key := range []string{
		idempotency.Deterministic("ns", "ab", "c"), idempotency.Deterministic("ns", "a", "bc"),
		idempotency.Deterministic("ns", "abc"), idempotency.Deterministic("nsabc"), idempotency.Deterministic("ns", "abc", ""),
		idempotency.Deterministic("", "ns", "abc"),
	} {
		if j, ok := seen[key]; ok {
			t.Errorf("%d and %d have one key", i, j)
		}
		seen[key] = i
		if id, err := uuid.Parse(key); err != nil || id.Version() != 8 {
			t.Errorf("%q: %v, version %v", key, err, id.Version())
		}
	}
	// The keys that are out in the world must stay what they are.
	if got, want := idempotency.Deterministic("capture", "order-1"), "19475599-254e-8d3e-9c96-9630a5dd4ba5"; got != want {
		t.Errorf("key %s, want %s as ever", got, want)
	}
}

// A header that was not set by Header.Set is the caller's key all the same, and
// no second one goes beside it.
func TestOwnKeyInOtherLetters(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"idempotency-key", "IDEMPOTENCY-KEY"} {
		b := answering(lost, status(201, ""))
		req := newPost(t, apiURL, "x")
		req.Header[name] = []string{"own"}
		resp, err := (&idempotency.Transport{Base: b, Retry: quick()}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := b.oneKey(t, 2); got != "own" || len(b.reqs[0].Header) != 1 {
			t.Errorf("%s: sent with %v", name, b.reqs[0].Header)
		}
		if req.Header[name] == nil {
			t.Errorf("%s: the caller's header has become %v", name, req.Header)
		}
	}
}

// An empty list of values, by which net/http is told that a request may be
// replayed, is no key.
func TestEmptyListOfValuesIsNoKey(t *testing.T) {
	t.Parallel()
	for method, keyed := range map[string]bool{"POST": true, "GET": false} {
		b := answering(status(201, ""))
		req := newPost(t, apiURL, "")
		req.Method, req.Header["Idempotency-Key"] = method, []string{}
		resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := b.keys[0] != ""; got != keyed {
			t.Errorf("%s: header %v", method, b.reqs[0].Header)
		}
	}
}

func TestTwoKeysAreRefused(t *testing.T) {
	t.Parallel()
	b := answering(status(201, ""))
	req := newPost(t, apiURL, "x")
	req.Header["Idempotency-Key"] = []string{"a", "b"}
	if _, err := (&idempotency.Transport{Base: b}).RoundTrip(req); !errors.Is(err, idempotency.ErrInvalidKey) || b.count() != 0 {
		t.Errorf("RoundTrip: %v", err)
	}
}

// A wrapper inside that writes to the header writes to one attempt's.
func TestHeaderPerAttempt(t *testing.T) {
	t.Parallel()
	b := answering(lost, lost, status(201, ""))
	resp, err := (&idempotency.Transport{Base: b, Retry: quick()}).RoundTrip(newPost(t, apiURL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	b.reqs[1].Header.Set("X-Attempt", "2")
	if b.reqs[0].Header.Get("X-Attempt") != "" || b.reqs[2].Header.Get("X-Attempt") != "" {
		t.Error("attempts share a header")
	}
}
