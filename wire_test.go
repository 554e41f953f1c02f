package idempotency_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/effectonce/idempotency"
)

// newBase is a pool of connections of the test's own.
func newBase(t *testing.T) *http.Transport {
	t.Helper()
	base := http.DefaultTransport.(*http.Transport).Clone()
	t.Cleanup(base.CloseIdleConnections)
	return base
}

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv
}

func newClient(t *testing.T) *http.Client {
	return &http.Client{Transport: &idempotency.Transport{Base: newBase(t), Retry: quick()}}
}

// received is what a server saw of the requests it got.
type received struct {
	mu     sync.Mutex
	keys   []string
	bodies []string
}

func (r *received) add(req *http.Request) int {
	body, _ := io.ReadAll(req.Body)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys = append(r.keys, req.Header.Get("Idempotency-Key"))
	r.bodies = append(r.bodies, string(body))
	return len(r.keys)
}

func (r *received) check(t *testing.T, want int, body string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.keys) != want {
		t.Fatalf("the server got %d requests, want %d", len(r.keys), want)
	}
	for i := range r.keys {
		if r.keys[i] == "" || r.keys[i] != r.keys[0] || r.bodies[i] != body {
			t.Errorf("request %d: key %q (the first's is %q), body %q", i+1, r.keys[i], r.keys[0], r.bodies[i])
		}
	}
}

func TestOneConnectionServesAllRetries(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 8 << 10, 64 << 10} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			var conns, n atomic.Int32
			srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if n.Add(1)%4 != 0 {
					w.WriteHeader(http.StatusServiceUnavailable)
					_, _ = w.Write(make([]byte, size))
				}
			}))
			srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
				if s == http.StateNew {
					conns.Add(1)
				}
			}
			srv.Start()
			t.Cleanup(srv.Close)
			client := newClient(t)
			for range 3 {
				resp, err := client.Post(srv.URL, "text/plain", strings.NewReader("x"))
				if err != nil {
					t.Fatal(err)
				}
				readAll(t, resp)
			}
			if n.Load() != 12 || conns.Load() != 1 {
				t.Errorf("%d requests on %d connections, want 12 on one", n.Load(), conns.Load())
			}
		})
	}
}

// The refused answer's body never comes. The retry is not held up by it.
func TestStalledErrorBodyDoesNotBlock(t *testing.T) {
	t.Parallel()
	var got received
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got.add(r) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			w.(http.Flusher).Flush()
			<-r.Context().Done() // until the client cuts the connection
		}
	})
	resp, err := newClient(t).Post(srv.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	got.check(t, 2, "x")
}

func TestRedirectsKeepTheKey(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			var got received
			srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
				switch n := got.add(r); {
				case r.URL.Path == "/a" && n == 1, r.URL.Path == "/b" && n == 3:
					w.WriteHeader(http.StatusServiceUnavailable)
				case r.URL.Path == "/a":
					http.Redirect(w, r, "/b", code)
				default:
					_, _ = io.WriteString(w, "done")
				}
			})
			resp, err := newClient(t).Post(srv.URL+"/a", "text/plain", strings.NewReader("charge"))
			if err != nil {
				t.Fatal(err)
			}
			if body := readAll(t, resp); body != "done" {
				t.Errorf("answer %d %q", resp.StatusCode, body)
			}
			got.check(t, 4, "charge")
		})
	}
}

func TestRedirectToGetCarriesNoKey(t *testing.T) {
	t.Parallel()
	for _, own := range []string{"", "own-key"} {
		var key atomic.Value
		srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				http.Redirect(w, r, "/receipt", http.StatusSeeOther)
				return
			}
			key.Store(r.Header.Get("Idempotency-Key"))
		})
		req := newPost(t, srv.URL, "x")
		if own != "" {
			req.Header.Set("Idempotency-Key", own)
		}
		resp, err := newClient(t).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
		if key.Load() != "" {
			t.Errorf("the GET carries the key %q", key.Load())
		}
	}
}

// A redirect opens the bodies that are sent and no other, and all are closed.
func TestRedirectLeaksNoBody(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/a" {
			http.Redirect(w, r, "/b", http.StatusTemporaryRedirect)
		}
	})
	var opened []*trackedBody
	req := newPost(t, srv.URL+"/a", "x")
	req.GetBody = func() (io.ReadCloser, error) {
		b := newTracked("x")
		opened = append(opened, b)
		return b, nil
	}
	req.Body, _ = req.GetBody()
	resp, err := newClient(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if len(opened) != 2 {
		t.Errorf("%d bodies were opened for two requests", len(opened))
	}
	for _, b := range opened {
		b.check(t, "a redirect")
	}
}

func TestMalformedLocationIsTheCallersToJudge(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Location"] = []string{"http://%zz/"}
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	resp, err := (&idempotency.Transport{Base: newBase(t)}).RoundTrip(newPost(t, srv.URL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if resp.StatusCode != 307 || resp.Header.Get("Location") != "http://%zz/" {
		t.Errorf("answer %d, Location %q", resp.StatusCode, resp.Header.Get("Location"))
	}
}

func TestBehindReverseProxy(t *testing.T) {
	t.Parallel()
	var got received
	backend := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got.add(r) == 1 {
			w.WriteHeader(http.StatusBadGateway)
		}
	})
	target, err := url.Parse(backend.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: &idempotency.Transport{Base: newBase(t), Retry: quick()},
	})
	t.Cleanup(proxy.Close)
	plain := &http.Client{Transport: newBase(t)}
	resp, err := plain.Post(proxy.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if resp.StatusCode != 200 {
		t.Errorf("status %d", resp.StatusCode)
	}
	got.check(t, 2, "x")
}

// Each kind of body, refused once and then taken, as the server sees it.
func TestBodiesOnTheWire(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "upload")
	if err := os.WriteFile(path, []byte("headerpayload"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		make   func(*http.Request)
		body   string
		length int64
	}{
		"NoBody":   {func(r *http.Request) { r.Body = http.NoBody }, "", 0},
		"nil body": {func(r *http.Request) { r.Body = nil }, "", 0},
		"a file at an offset": {func(r *http.Request) {
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = f.Seek(6, io.SeekStart)
			r.Body, r.ContentLength = f, 7
		}, "payload", 7},
		"chunked": {func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader("pay"), strings.NewReader("load"))), -1
		}, "payload", -1},
		"Expect: 100-continue": {func(r *http.Request) {
			r.Header.Set("Expect", "100-continue")
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("payload")), 7
		}, "payload", 7},
		"trailers": {func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("payload")), -1
			r.Trailer = http.Header{"Checksum": {"123"}}
		}, "payload", -1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got received
			srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
				n := got.add(r)
				if r.ContentLength != tt.length {
					t.Errorf("request %d has the length %d, want %d", n, r.ContentLength, tt.length)
				}
				if name == "trailers" && r.Trailer.Get("Checksum") != "123" {
					t.Errorf("request %d has the trailers %v", n, r.Trailer)
				}
				if n == 1 {
					w.WriteHeader(http.StatusServiceUnavailable)
				}
			})
			req := newPost(t, srv.URL, "")
			req.GetBody = nil
			tt.make(req)
			resp, err := newClient(t).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			got.check(t, 2, tt.body)
		})
	}
}

// cutAfterHeader sends the header and part of the body, then drops the line.
func cutAfterHeader(w http.ResponseWriter, chunked bool) {
	conn, buf, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	if chunked {
		_, _ = buf.WriteString("HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
	} else {
		_, _ = buf.WriteString("HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\nhalf")
	}
	_ = buf.Flush()
}

func TestConnectionCutInTheMiddleOfTheAnswer(t *testing.T) {
	t.Parallel()
	for name, chunked := range map[string]bool{"length": false, "chunked": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got received
			srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if got.add(r) < 3 {
					cutAfterHeader(w, chunked)
					return
				}
				w.Header().Set("Trailer", "Checksum")
				_, _ = io.WriteString(w, "all of it")
				w.Header().Set("Checksum", "9")
			})
			resp, err := newClient(t).Post(srv.URL, "text/plain", strings.NewReader("x"))
			if err != nil {
				t.Fatal(err)
			}
			if body := readAll(t, resp); body != "all of it" || resp.Trailer.Get("Checksum") != "9" {
				t.Errorf("answer %q, trailers %v", body, resp.Trailer)
			}
			got.check(t, 3, "x")
		})
	}
}

// A server that reads a request, acts and dies: net/http sends again by itself
// on a new connection, which is refused. That is no proof that nothing was sent.
func TestDialErrorAfterASendIsAmbiguous(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"body": "charge", "no body": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			acted := make(chan struct{})
			go func() {
				defer close(acted)
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				r := bufio.NewReader(conn)
				for i := range 2 {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					if i == 0 {
						_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
					} else {
						_ = ln.Close() // it has acted, and is gone
					}
				}
			}()
			tr := &idempotency.Transport{Base: newBase(t), Retry: idempotency.RetryPolicy{MaxAttempts: 1}}
			client := &http.Client{Transport: tr}
			url := "http://" + ln.Addr().String()
			resp, err := client.Do(newPost(t, url, body))
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			resp, err = client.Do(newPost(t, url, body))
			if err == nil {
				resp.Body.Close()
			}
			<-acted
			var e *idempotency.Error
			if !errors.As(err, &e) || !e.Ambiguous {
				t.Errorf("Do: %v, want an ambiguous error", err)
			}
			// And one that never had a connection is clear.
			if _, err = client.Do(newPost(t, url, body)); !errors.As(err, &e) || e.Ambiguous {
				t.Errorf("Do: %v, want an error that is not ambiguous", err)
			}
		})
	}
}

func TestUntrustedCertificateIsNotRetried(t *testing.T) {
	t.Parallel()
	srv := httptest.NewUnstartedServer(http.NotFoundHandler())
	srv.Config.ErrorLog = quietLog()
	srv.StartTLS()
	t.Cleanup(srv.Close)
	_, err := newClient(t).Do(newPost(t, srv.URL, "x"))
	var e *idempotency.Error
	var verify *tls.CertificateVerificationError
	if !errors.As(err, &e) || e.Attempts != 1 || e.Ambiguous || !errors.As(err, &verify) {
		t.Errorf("Do: %v", err)
	}
	plain := serve(t, func(http.ResponseWriter, *http.Request) {})
	_, err = newClient(t).Do(newPost(t, strings.Replace(plain.URL, "http:", "https:", 1), "x"))
	if !errors.As(err, &e) || e.Attempts != 1 || e.Ambiguous || !errors.Is(err, http.ErrSchemeMismatch) {
		t.Errorf("Do to a server without TLS: %v", err)
	}
}

func TestClientTimeoutIsTheCallers(t *testing.T) {
	t.Parallel()
	hang := func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() }
	srv := serve(t, hang)
	client := newClient(t)
	client.Timeout = 30 * time.Millisecond
	_, err := client.Do(newPost(t, srv.URL, "x"))
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Do: %v, want the client's timeout", err)
	}
	// net/http puts an error of its own in the place of ours. A deadline of the
	// context leaves it whole.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err = newClient(t).Do(newPost(t, srv.URL, "x").WithContext(ctx))
	var e *idempotency.Error
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || e.Key == "" || !e.Ambiguous {
		t.Errorf("Do: %v, want an Error with the key", err)
	}
}

func TestAttemptTimeoutOnTheWire(t *testing.T) {
	t.Parallel()
	var got received
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch got.add(r) {
		case 1: // no answer
			<-r.Context().Done()
		case 2: // half an answer
			w.WriteHeader(http.StatusCreated)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(w, "done")
		}
	})
	policy := quick()
	policy.AttemptTimeout = 200 * time.Millisecond
	client := &http.Client{Transport: &idempotency.Transport{Base: newBase(t), Retry: policy}}
	resp, err := client.Do(newPost(t, srv.URL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); body != "done" {
		t.Errorf("answer %q", body)
	}
	got.check(t, 3, "x")
}

func TestCookiesAndCheckRedirect(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch c, err := r.Cookie("session"); {
		case r.URL.Path == "/login":
			http.SetCookie(w, &http.Cookie{Name: "session", Value: "s"})
			http.Redirect(w, r, "/home", http.StatusTemporaryRedirect)
		case err != nil || c.Value != "s":
			w.WriteHeader(http.StatusForbidden)
		}
	})
	client := newClient(t)
	client.Jar, _ = cookiejar.New(nil)
	resp, err := client.Do(newPost(t, srv.URL+"/login", "x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if resp.StatusCode != 200 || resp.Request.URL.Path != "/home" {
		t.Errorf("status %d at %s", resp.StatusCode, resp.Request.URL)
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err = client.Do(newPost(t, srv.URL+"/login", "x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if resp.StatusCode != http.StatusTemporaryRedirect || resp.Header.Get("Location") != "/home" {
		t.Errorf("status %d, Location %q", resp.StatusCode, resp.Header.Get("Location"))
	}
	stop := errors.New("no further")
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return stop }
	if _, err = client.Do(newPost(t, srv.URL+"/login", "x")); !errors.Is(err, stop) {
		t.Errorf("Do: %v", err)
	}
}

func TestThroughAProxy(t *testing.T) {
	t.Parallel()
	var got received
	proxy := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Host != "api.example.com" {
			t.Errorf("the proxy got %s", r.URL)
		}
		if got.add(r) == 1 {
			w.WriteHeader(http.StatusBadGateway)
		}
	})
	proxyURL, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	base := newBase(t)
	base.Proxy = http.ProxyURL(proxyURL)
	client := &http.Client{Transport: &idempotency.Transport{Base: base, Retry: quick()}}
	resp, err := client.Do(newPost(t, "http://api.example.com/charges", "x"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	got.check(t, 2, "x")
}

// An upgraded connection stays one that can be written to.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		conn, buf, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = buf.Flush()
		_, _ = io.Copy(conn, conn)
	})
	policy := quick()
	policy.AttemptTimeout = time.Minute
	for name, method := range map[string]string{"with a key": "POST", "without": "GET"} {
		req := newPost(t, srv.URL, "")
		req.Method, req.Body, req.GetBody = method, nil, nil
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := (&idempotency.Transport{Base: newBase(t), Retry: policy}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		conn, ok := resp.Body.(io.ReadWriteCloser)
		if !ok {
			t.Fatalf("%s: the body is a %T", name, resp.Body)
		}
		got := make([]byte, 4)
		if _, err := io.WriteString(conn, "ping"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "ping" {
			t.Errorf("%s: echo %q, %v", name, got, err)
		}
		conn.Close()
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	var n atomic.Int32
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1)%3 == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, r.Header.Get("Idempotency-Key"))
	})
	policy := quick()
	policy.MaxAttempts, policy.Budget = 20, &idempotency.Budget{Capacity: 1 << 20}
	client := &http.Client{Transport: &idempotency.Transport{Base: newBase(t), Retry: policy}}
	var mu sync.Mutex
	keys := map[string]bool{}
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			resp, err := client.Post(srv.URL, "text/plain", strings.NewReader("x"))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			key, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != 200 {
				t.Errorf("status %d, %v", resp.StatusCode, err)
			}
			mu.Lock()
			keys[string(key)] = true
			mu.Unlock()
		})
	}
	all.Wait()
	if len(keys) != 100 {
		t.Errorf("%d keys for 100 operations", len(keys))
	}
}
