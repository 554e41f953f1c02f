package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency"
)

// What the tests of go-retryablehttp and rehttp ask of a RoundTripper and the
// other files here have not asked yet.

// Every kind of body that http.NewRequest knows, and those that it does not,
// is there again for each attempt.
func TestEveryKindOfBodyIsSentAgain(t *testing.T) {
	t.Parallel()
	half := strings.NewReader("the charge")
	if _, err := half.Seek(4, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		body io.Reader
		want string
	}{
		"bytes.Buffer":          {bytes.NewBufferString("charge"), "charge"},
		"bytes.Reader":          {bytes.NewReader([]byte("charge")), "charge"},
		"strings.Reader":        {strings.NewReader("charge"), "charge"},
		"read in part before":   {half, "charge"},
		"a reader":              {io.LimitReader(strings.NewReader("charges"), 6), "charge"},
		"a reader and seeker":   {struct{ io.ReadSeeker }{strings.NewReader("charge")}, "charge"},
		"a pipe":                {pipe("charge"), "charge"},
		"nil":                   {nil, ""},
		"a reader with nothing": {io.MultiReader(), ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(lost, status(503, ""), lost, status(201, ""))
			client := &http.Client{Transport: &idempotency.Transport{Base: b, Retry: quick()}}
			resp, err := client.Post(apiURL, "text/plain", tt.body)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			b.oneKey(t, 4)
			for i, got := range b.bodies {
				if got != tt.want {
					t.Errorf("attempt %d has the body %q, want %q", i+1, got, tt.want)
				}
			}
		})
	}
}

// pipe returns a reader that another goroutine fills.
func pipe(s string) io.Reader {
	r, w := io.Pipe()
	go func() {
		_, err := io.WriteString(w, s)
		w.CloseWithError(err)
	}()
	return r
}

func TestHeadersGoWithEveryAttempt(t *testing.T) {
	t.Parallel()
	b := answering(lost, status(503, ""), status(201, ""))
	client := &http.Client{Transport: &idempotency.Transport{Base: b, Retry: quick()}}
	resp, err := client.PostForm(apiURL, url.Values{"amount": {"500"}, "to": {"a&b"}})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	b.oneKey(t, 3)
	for i, req := range b.reqs {
		if ct := req.Header.Get("Content-Type"); ct != "application/x-www-form-urlencoded" || b.bodies[i] != "amount=500&to=a%26b" {
			t.Errorf("attempt %d: Content-Type %q, body %q", i+1, ct, b.bodies[i])
		}
	}
}

func TestOneAttemptIsNoRetry(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(*http.Request) (*http.Response, error){
		"lost": lost, "503": status(503, ""), "in progress": status(409, "", "Retry-After", "1"), "cut": broken(8),
	} {
		for kind, length := range map[string]int64{"GetBody": 0, "one-time body": -1} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				b := answering(answer)
				req := newPost(t, apiURL, "x")
				if length < 0 {
					req = withBody(req, io.NopCloser(strings.NewReader("x")), length)
				}
				resp, err := (&idempotency.Transport{Base: b, Retry: idempotency.RetryPolicy{MaxAttempts: 1}}).RoundTrip(req)
				if err == nil {
					resp.Body.Close()
				}
				b.oneKey(t, 1)
				if errors.Is(err, idempotency.ErrBodyNotRepeatable) {
					t.Errorf("RoundTrip: %v, which is not the reason", err)
				}
			})
		}
	}
}

// timeoutError is what a connection's deadline gives.
type timeoutError struct{}

func (timeoutError) Error() string   { return "i/o timeout" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

func TestErrorsOfTheNetworkAreRetried(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{
		"timeout":           timeoutError{},
		"timeout of a read": &net.OpError{Op: "read", Err: timeoutError{}},
		"EOF":               io.EOF,
		"half an answer":    io.ErrUnexpectedEOF,
		"reset":             &net.OpError{Op: "write", Err: errors.New("connection reset by peer")},
		"no such host":      &net.DNSError{Err: "no such host", IsNotFound: true},
		"wrapped":           &url.Error{Op: "Post", URL: apiURL, Err: io.EOF},
		// The base's own deadline, as that of a wrapper inside, is not the caller's.
		"deadline of the base": context.DeadlineExceeded,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(func(*http.Request) (*http.Response, error) { return nil, err }, status(201, ""))
			resp, err := (&idempotency.Transport{Base: b, Retry: quick()}).RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			b.oneKey(t, 2)
		})
	}
}

// The client's own timeout spans all attempts. A pause that would outlast it is
// not begun, so that it is the last loss that is reported.
func TestClientTimeoutSpansAllAttempts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := answering(lost)
		client := &http.Client{
			Timeout:   30 * time.Second,
			Transport: &idempotency.Transport{Base: b, Retry: idempotency.RetryPolicy{MaxAttempts: 1000, MinWait: 8 * time.Second}},
		}
		began := time.Now()
		_, err := client.Do(newPost(t, apiURL, "x"))
		var e *idempotency.Error
		if !errors.Is(err, errLost) || !errors.As(err, &e) || e.Attempts < 2 || time.Since(began) > client.Timeout {
			t.Errorf("Do: %v after %v", err, time.Since(began))
		}
	})
}

// The client's timeout still ends the reading of a body that is slow to come.
func TestClientTimeoutEndsASlowBody(t *testing.T) {
	t.Parallel()
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	client := newClient(t)
	client.Timeout = 50 * time.Millisecond
	resp, err := client.Do(newPost(t, srv.URL, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	var timeout net.Error
	if string(got) != "data: 1\n\n" || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("read %q, %v", got, err)
	}
}

// The timeouts of http.Transport are losses like others.
func TestTimeoutOfTheBaseIsRetried(t *testing.T) {
	t.Parallel()
	var got received
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got.add(r) == 1 {
			<-r.Context().Done()
		}
	})
	base := newBase(t)
	base.ResponseHeaderTimeout = 100 * time.Millisecond
	client := &http.Client{Transport: &idempotency.Transport{Base: base, Retry: quick()}}
	resp, err := client.Do(newPost(t, srv.URL, "charge"))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	got.check(t, 2, "charge")
}

// A ring of redirects ends where the client says, and is not gone round again.
func TestEndlessRedirects(t *testing.T) {
	t.Parallel()
	var got received
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got.add(r)
		http.Redirect(w, r, "/", http.StatusTemporaryRedirect)
	})
	resp, err := newClient(t).Do(newPost(t, srv.URL, "charge"))
	if err == nil {
		t.Errorf("status %d, want an error", resp.StatusCode)
	}
	if resp != nil {
		resp.Body.Close()
	}
	got.check(t, 10, "charge")
}

// A TLS server that the client does not trust hears of one attempt.
func TestUntrustedServerIsAskedOnce(t *testing.T) {
	t.Parallel()
	conns := make(chan struct{}, 10)
	srv := httptest.NewUnstartedServer(http.NotFoundHandler())
	srv.Config.ErrorLog = quietLog()
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns <- struct{}{}
		}
	}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	if _, err := newClient(t).Do(newPost(t, srv.URL, "x")); err == nil {
		t.Fatal("no error")
	}
	if n := len(conns); n != 1 {
		t.Errorf("%d connections, want one", n)
	}
}
