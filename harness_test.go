package idempotency_test

import (
	"bytes"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/effectonce/idempotency"
)

// base is a RoundTripper that answers as it is told and remembers what it was
// sent.
type base struct {
	mu      sync.Mutex
	answers []func(*http.Request) (*http.Response, error) // one an attempt; the last repeats
	keys    []string
	bodies  []string
	reqs    []*http.Request
}

func (b *base) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		body, _ = io.ReadAll(req.Body)
		req.Body.Close()
	}
	b.mu.Lock()
	b.keys = append(b.keys, req.Header.Get("Idempotency-Key"))
	b.bodies = append(b.bodies, string(body))
	b.reqs = append(b.reqs, req)
	n := min(len(b.reqs), len(b.answers)) - 1
	answer := b.answers[n]
	b.mu.Unlock()
	return answer(req)
}

func (b *base) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.reqs)
}

// oneKey returns the key of all attempts, of which there must be want.
func (b *base) oneKey(t *testing.T, want int) string {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.keys) != want {
		t.Fatalf("%d attempts, want %d", len(b.keys), want)
	}
	if b.keys[0] == "" || len(slices.Compact(slices.Clone(b.keys))) != 1 {
		t.Fatalf("keys of the attempts: %q, want one for all", b.keys)
	}
	return b.keys[0]
}

// status answers with a status, a body and headers given as name, value, ….
func status(code int, body string, headers ...string) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		h := http.Header{}
		for i := 0; i+1 < len(headers); i += 2 {
			h.Add(headers[i], headers[i+1])
		}
		return &http.Response{
			StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: h,
			Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: req,
		}, nil
	}
}

var errLost = errors.New("connection lost")

func lost(*http.Request) (*http.Response, error) { return nil, errLost }

func answering(answers ...func(*http.Request) (*http.Response, error)) *base {
	return &base{answers: answers}
}

// quick is a policy for tests against real servers.
func quick() idempotency.RetryPolicy {
	return idempotency.RetryPolicy{MinWait: time.Millisecond, MaxWait: 2 * time.Millisecond}
}

func newPost(t *testing.T, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

const apiURL = "https://api.example.com/charges"

// trackedBody counts how often it was closed.
type trackedBody struct {
	io.Reader
	mu     sync.Mutex
	closed int
	late   bool // read after it was closed
}

func newTracked(s string) *trackedBody { return &trackedBody{Reader: bytes.NewReader([]byte(s))} }

func (b *trackedBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.late = b.late || b.closed > 0
	return b.Reader.Read(p)
}

func (b *trackedBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed++
	return nil
}

func (b *trackedBody) check(t *testing.T, what string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed == 0 {
		t.Errorf("%s: the body was left open", what)
	}
	if b.late {
		t.Errorf("%s: the body was read after it was closed", what)
	}
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("reading the answer: %v", err)
	}
	return string(b)
}

func dialError() error { return &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("refused")} }

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quietLog() *log.Logger { return log.New(io.Discard, "", 0) }
