package client_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/effectonce/idempotency"
)

func quick() idempotency.RetryPolicy {
	return idempotency.RetryPolicy{MinWait: time.Millisecond, MaxWait: 2 * time.Millisecond}
}

func newBase(t *testing.T) *http.Transport {
	t.Helper()
	base := &http.Transport{}
	t.Cleanup(base.CloseIdleConnections)
	return base
}

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv
}

// seen keeps the values of a header.
type seen struct {
	mu     sync.Mutex
	values []string
}

func (s *seen) add(v string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values = append(s.values, v)
	return len(s.values)
}

func (s *seen) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.values...)
}

// An answer without a length ends when the connection does. Where it is reset,
// and not closed, that shows.
func TestAnswerWithoutLengthThatIsReset(t *testing.T) {
	t.Parallel()
	var keys seen
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n := keys.add(r.Header.Get("Idempotency-Key"))
		conn, buf, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = buf.WriteString("HTTP/1.0 201 Created\r\n\r\nhalf")
		if n > 1 {
			_, _ = buf.WriteString(" and half")
		}
		_ = buf.Flush()
		if n == 1 {
			_ = conn.(*net.TCPConn).SetLinger(0)
		}
	})
	client := &http.Client{Transport: &idempotency.Transport{Base: newBase(t), Retry: quick()}}
	resp, err := client.Do(newPost(t, srv.URL, "charge"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || string(got) != "half and half" {
		t.Errorf("answer %q, %v", got, err)
	}
	if k := keys.list(); len(k) != 2 || k[0] == "" || k[0] != k[1] {
		t.Errorf("keys %q", k)
	}
}

// staleServer answers one request on its first connection and drops the second
// one there, unread, as a server does that closes a connection for its age.
func staleServer(t *testing.T, header string) (url string, keys *seen) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	keys = &seen{}
	var conns sync.WaitGroup
	conns.Go(func() {
		for first := true; ; first = false {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer conn.Close()
				r := bufio.NewReader(conn)
				for n := 1; ; n++ {
					if first && n == 2 {
						_, _ = r.Peek(1) // it has come, and is not looked at
						return
					}
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					keys.add(req.Header.Get(header))
					if extra, ok := req.Header["X-Idempotency-Key"]; ok && header != "X-Idempotency-Key" {
						t.Errorf("the wire has an X-Idempotency-Key %q", extra)
					}
					_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				}
			})
		}
	})
	t.Cleanup(func() { ln.Close(); conns.Wait() })
	return "http://" + ln.Addr().String(), keys
}

// net/http sends a POST again by itself when a kept connection turns out to be
// closed, if it sees a key. It looks for one in (X-)Idempotency-Key only, so
// providers with another header need help. No attempt of ours is spent.
func TestStaleConnectionIsReplayedByNetHTTP(t *testing.T) {
	t.Parallel()
	providers := map[string]idempotency.Provider{"standard": {}, "PayPal": idempotency.PayPal(), "Checkout.com": idempotency.CheckoutCom(), "Mercado Pago": idempotency.MercadoPago()}
	for name, provider := range providers {
		for kind, body := range map[string]func() io.Reader{
			"GetBody":  func() io.Reader { return strings.NewReader("charge") },
			"buffered": func() io.Reader { return io.MultiReader(strings.NewReader("charge")) },
			"no body":  func() io.Reader { return nil },
		} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				header := provider.Header
				if header == "" {
					header = "Idempotency-Key"
				}
				url, keys := staleServer(t, header)
				attempts := 0
				client := &http.Client{Transport: &idempotency.Transport{
					Base: newBase(t), Provider: provider,
					OnAttempt: func(context.Context, idempotency.Attempt) { attempts++ },
				}}
				for range 2 {
					resp, err := client.Post(url, "text/plain", body())
					if err != nil {
						t.Fatal(err)
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				if k := keys.list(); len(k) != 2 || k[0] == "" || k[1] == "" || attempts != 2 {
					t.Errorf("keys %q after %d attempts", k, attempts)
				}
			})
		}
	}
}

// traced is like otelhttp's Transport: a clone of the request with a header of
// its own, and a body that says when it was read.
type traced struct {
	next  http.RoundTripper
	spans atomic.Int32
	ended atomic.Int32
}

func (w *traced) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(context.WithValue(req.Context(), w, "span"))
	req.Header.Set("Traceparent", "00-"+strings.Repeat("1", 32)+"-"+strings.Repeat("2", 16)+"-01")
	w.spans.Add(1)
	resp, err := w.next.RoundTrip(req)
	if err != nil {
		w.ended.Add(1)
		return nil, err
	}
	resp.Body = &tracedBody{ReadCloser: resp.Body, ended: &w.ended}
	return resp, nil
}

type tracedBody struct {
	io.ReadCloser
	ended *atomic.Int32
	once  sync.Once
}

func (b *tracedBody) Close() error {
	b.once.Do(func() { b.ended.Add(1) })
	return b.ReadCloser.Close()
}

// authorized is like oauth2's Transport: a clone with a token, which may fail.
type authorized struct {
	next   http.RoundTripper
	tokens atomic.Int32
	fails  int32 // that many times first
}

var errNoToken = errors.New("no token")

func (w *authorized) RoundTrip(req *http.Request) (*http.Response, error) {
	if w.tokens.Add(1) <= w.fails {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, errNoToken
	}
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer token")
	return w.next.RoundTrip(req)
}

// Wrappers outside see one operation, wrappers inside see each attempt, and
// either way the key and what they add arrive.
func TestWrappersOutsideAndInside(t *testing.T) {
	t.Parallel()
	for _, outside := range []bool{true, false} {
		name := map[bool]string{true: "outside", false: "inside"}[outside]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var keys seen
			srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if r.Header.Get("Authorization") != "Bearer token" || r.Header.Get("Traceparent") == "" {
					t.Errorf("header %v", r.Header)
				}
				switch keys.add(r.Header.Get("Idempotency-Key")) {
				case 1:
					w.WriteHeader(http.StatusServiceUnavailable)
				case 2:
					w.WriteHeader(http.StatusBadGateway)
				case 3:
					http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
				}
			})
			ours := &idempotency.Transport{Base: newBase(t), Retry: quick()}
			trace, auth := &traced{}, &authorized{}
			var client *http.Client
			if outside {
				trace.next, auth.next = ours, trace
				client = &http.Client{Transport: auth}
			} else {
				trace.next, auth.next = ours.Base, trace
				ours.Base = auth
				client = &http.Client{Transport: ours}
			}
			resp, err := client.Do(newPost(t, srv.URL, "charge"))
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			k := keys.list()
			if len(k) != 4 || k[0] == "" || k[1] != k[0] || k[2] != k[0] || k[3] != k[0] {
				t.Errorf("keys %q", k)
			}
			want := int32(4) // one for each attempt
			if outside {
				want = 2 // one for each hop
			}
			if n := trace.spans.Load(); n != want || trace.ended.Load() != n {
				t.Errorf("%d spans of which %d ended, want %d", n, trace.ended.Load(), want)
			}
		})
	}
}

// An error of a wrapper inside is one like any other.
func TestErrorOfAWrapperInside(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(http.ResponseWriter, *http.Request) {})
	auth := &authorized{next: newBase(t), fails: 2}
	client := &http.Client{Transport: &idempotency.Transport{Base: auth, Retry: quick()}}
	resp, err := client.Do(newPost(t, srv.URL, "charge"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	auth.fails = 100
	var e *idempotency.Error
	if _, err = client.Do(newPost(t, srv.URL, "charge")); !errors.Is(err, errNoToken) || !errors.As(err, &e) || e.Attempts != 4 {
		t.Errorf("Do: %v", err)
	}
}

// What two redirects have in between is no part of the operation any more.
func TestRedirectAfterTheMethodChangedCarriesNoKey(t *testing.T) {
	t.Parallel()
	var keys seen
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		keys.add(r.Method + " " + r.Header.Get("Idempotency-Key"))
		switch r.URL.Path {
		case "/a":
			http.Redirect(w, r, "/b", http.StatusPermanentRedirect)
		case "/b":
			http.Redirect(w, r, "/c", http.StatusSeeOther)
		case "/c":
			http.Redirect(w, r, "/d", http.StatusTemporaryRedirect)
		}
	})
	for _, code := range []string{"header", "context"} {
		keys.values = nil
		req := newPost(t, srv.URL+"/a", "charge")
		if code == "header" {
			req.Header.Set("Idempotency-Key", "own")
		} else {
			req = req.WithContext(idempotency.WithKey(req.Context(), "own"))
		}
		resp, err := (&http.Client{Transport: &idempotency.Transport{Base: newBase(t), Retry: quick()}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		want := "POST own,POST own,GET ,GET "
		if got := strings.Join(keys.list(), ","); got != want {
			t.Errorf("%s: requests %q, want %q", code, got, want)
		}
	}
}
