package idempotency_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/effectonce/idempotency"
)

// withBody gives req a body that can be read once only, as http.NewRequest does
// for readers that it does not know.
func withBody(req *http.Request, body io.ReadCloser, length int64) *http.Request {
	req.Body, req.GetBody, req.ContentLength = body, nil, length
	return req
}

func TestBodyWithoutGetBodyIsBuffered(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		limit    int64
		body     string
		attempts int
	}{
		"within the default": {0, strings.Repeat("x", 1<<20), 2},
		"over the default":   {0, strings.Repeat("x", 1<<20+1), 1},
		"at the limit":       {10, "0123456789", 2},
		"over the limit":     {10, "0123456789a", 1},
		"no buffering":       {-1, "x", 1},
		"empty":              {0, "", 2},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(lost, status(201, ""))
				body := newTracked(tt.body)
				req := withBody(newPost(t, apiURL, ""), body, -1)
				resp, err := (&idempotency.Transport{Base: b, MaxBufferedBody: tt.limit}).RoundTrip(req)
				if resp != nil {
					resp.Body.Close()
				}
				b.oneKey(t, tt.attempts)
				if tt.attempts == 1 && !errors.Is(err, idempotency.ErrBodyNotRepeatable) || tt.attempts == 2 && err != nil {
					t.Errorf("RoundTrip: %v", err)
				}
				for i, got := range b.bodies {
					if got != tt.body {
						t.Errorf("attempt %d has a body of %d bytes, want %d", i+1, len(got), len(tt.body))
					}
				}
				body.check(t, name)
				if body.closed != 1 {
					t.Errorf("the body was closed %d times", body.closed)
				}
			})
		})
	}
}

// A body that can't be read can't be sent.
func TestFailingBody(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	b := answering(status(201, ""))
	body := &trackedBody{Reader: io.MultiReader(strings.NewReader("half"), failingReader{boom})}
	resp, err := (&idempotency.Transport{Base: b}).RoundTrip(withBody(newPost(t, apiURL, ""), body, -1))
	var e *idempotency.Error
	if resp != nil || !errors.Is(err, boom) || !errors.As(err, &e) || e.Ambiguous || b.count() != 0 {
		t.Errorf("RoundTrip = %v, %v after %d attempts", resp, err, b.count())
	}
	body.check(t, "a failing body")
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

func TestFailingGetBody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		b := answering(lost)
		req := newPost(t, apiURL, "x")
		req.GetBody = func() (io.ReadCloser, error) { return nil, boom }
		resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
		var e *idempotency.Error
		if resp != nil || !errors.Is(err, boom) || !errors.As(err, &e) || !e.Ambiguous || b.count() != 1 {
			t.Errorf("RoundTrip = %v, %v after %d attempts", resp, err, b.count())
		}
	})
}

// zeros is a body of n bytes that takes no memory.
type zeros struct{ n int64 }

func (z *zeros) Read(p []byte) (int, error) {
	if z.n == 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), z.n)
	z.n -= n
	return int(n), nil
}

// Not parallel: it watches the whole process's allocations.
func TestHugeBodyTakesNoMemory(t *testing.T) {
	const size = 1 << 30
	read := int64(0)
	discard := roundTripper(func(req *http.Request) (*http.Response, error) {
		n, err := io.Copy(io.Discard, req.Body)
		req.Body.Close()
		read += n
		if read == size {
			return nil, errLost
		}
		return &http.Response{StatusCode: 201, Header: http.Header{}, Body: http.NoBody}, err
	})
	req := withBody(newPost(t, apiURL, ""), io.NopCloser(&zeros{size}), size)
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(&zeros{size}), nil }
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	resp, err := (&idempotency.Transport{Base: discard, Retry: quick()}).RoundTrip(req)
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if read != 2*size {
		t.Errorf("the base read %d bytes, want the body twice", read)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 4<<20 {
		t.Errorf("sending 1 GiB twice allocated %d bytes", used)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// Each attempt's body is its own: a base that still writes the one before
// shares nothing with the next.
func TestFreshBodyPerAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var bodies []io.ReadCloser
		var straggler []byte
		b := roundTripper(func(req *http.Request) (*http.Response, error) {
			bodies = append(bodies, req.Body)
			if len(bodies) == 1 {
				go func(body io.ReadCloser) {
					<-release
					straggler, _ = io.ReadAll(body)
					body.Close()
				}(req.Body)
				return nil, errLost
			}
			got, _ := io.ReadAll(req.Body)
			req.Body.Close()
			if string(got) != "charge" {
				t.Errorf("attempt %d sent %q", len(bodies), got)
			}
			return status(201, "")(req)
		})
		for name, body := range map[string]io.Reader{"GetBody": strings.NewReader("charge"), "buffered": io.MultiReader(strings.NewReader("charge"))} {
			bodies, release = nil, make(chan struct{})
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, apiURL, body)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			close(release)
			synctest.Wait()
			if string(straggler) != "charge" || len(bodies) != 2 || bodies[0] == bodies[1] {
				t.Errorf("%s: the first attempt's body was touched: %q", name, straggler)
			}
		}
	})
}

// net/http needs both for GOAWAY, and redirects need them too.
func TestRetriedRequestKeepsLengthAndGetBody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := answering(lost, lost, status(201, ""))
		resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "charge"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		for i, req := range b.reqs {
			if req.ContentLength != 6 || req.GetBody == nil {
				t.Fatalf("attempt %d: length %d, GetBody %v", i+1, req.ContentLength, req.GetBody != nil)
			}
			body, err := req.GetBody()
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := io.ReadAll(body); string(got) != "charge" {
				t.Errorf("attempt %d: GetBody gives %q", i+1, got)
			}
		}
	})
}

func TestNoBodyStaysNone(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]io.ReadCloser{"nil": nil, "NoBody": http.NoBody} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(status(503, ""), status(201, ""))
				req := withBody(newPost(t, apiURL, ""), body, 0)
				resp, err := (&idempotency.Transport{Base: b}).RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				b.oneKey(t, 2)
				for i, req := range b.reqs {
					if req.Body != nil && req.Body != http.NoBody || req.ContentLength != 0 {
						t.Errorf("attempt %d: body %v of length %d", i+1, req.Body, req.ContentLength)
					}
				}
			})
		})
	}
}

func TestCallersRequestIsLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := answering(lost, status(503, ""), status(201, ""))
		body := io.NopCloser(strings.NewReader("charge"))
		req := newPost(t, apiURL, "charge")
		req.Body, req.RequestURI = body, "/charges"
		req.Header["X-Mine"] = []string{"1"}
		resp, err := (&idempotency.Transport{Base: b, Provider: idempotency.PayPal()}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if len(req.Header) != 1 || req.Body != body || req.RequestURI != "/charges" || req.ContentLength != 6 {
			t.Errorf("the caller's request has become %+v", req)
		}
		b.reqs[0].Header["X-Mine"][0] = "2"
		if req.Header.Get("X-Mine") != "1" {
			t.Error("the sent request shares header values with the caller's")
		}
	})
}

// Every way that ends before the base has the body closes it once.
func TestBodyIsClosedOnceOnEveryPath(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, tr := range map[string]*idempotency.Transport{
		"sent":           {Base: answering(status(201, ""))},
		"key func fails": {Base: answering(status(201, "")), Key: func(*http.Request) (string, error) { return "", boom }},
		"settings":       {Base: answering(status(201, "")), Retry: idempotency.RetryPolicy{MaxAttempts: -1}},
	} {
		for kind, get := range map[string]func() (io.ReadCloser, error){
			"GetBody":    func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader([]byte("x"))), nil },
			"no GetBody": nil,
		} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				body := newTracked("x")
				req := newPost(t, apiURL, "")
				req.Body, req.GetBody = body, get
				if resp, err := tr.RoundTrip(req); err == nil {
					resp.Body.Close()
				}
				body.check(t, name)
				if body.closed != 1 {
					t.Errorf("closed %d times", body.closed)
				}
			})
		}
	}
}

// A body that can be sent only once, as that of a request without a key, goes out
// as it comes: its writer may be waiting for the other side.
func TestBodyOfOneAttemptIsNotReadAhead(t *testing.T) {
	t.Parallel()
	r, w := io.Pipe()
	arrived := make(chan struct{})
	go func() {
		io.WriteString(w, "a")
		<-arrived
		io.WriteString(w, "b")
		w.Close()
	}()
	tr := &idempotency.Transport{
		Key: func(*http.Request) (string, error) { return "", nil },
		Base: roundTripper(func(req *http.Request) (*http.Response, error) {
			if _, err := io.ReadFull(req.Body, make([]byte, 1)); err != nil {
				return nil, err
			}
			close(arrived)
			rest, err := io.ReadAll(req.Body)
			if err != nil || string(rest) != "b" {
				t.Errorf("the rest is %q, %v", rest, err)
			}
			req.Body.Close()
			return &http.Response{StatusCode: 201, Body: http.NoBody, Request: req}, nil
		}),
	}
	req := newPost(t, apiURL, "")
	req.Body, req.GetBody, req.ContentLength = r, nil, -1
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}
