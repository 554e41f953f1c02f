package idempotency_test

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency"
)

func TestStatusesRetriedAndNot(t *testing.T) {
	t.Parallel()
	replayed := []string{"Idempotent-Replayed", "true"}
	tests := []struct {
		name     string
		provider idempotency.Provider
		status   int
		headers  []string
		attempts int
	}{
		{name: "408", status: 408, attempts: 4},
		{name: "425", status: 425, attempts: 4},
		{name: "429", status: 429, attempts: 4},
		{name: "500", status: 500, attempts: 4},
		{name: "502", status: 502, attempts: 4},
		{name: "503", status: 503, attempts: 4},
		{name: "504", status: 504, attempts: 4},
		{name: "400", status: 400, attempts: 1},
		{name: "409 without Retry-After", status: 409, attempts: 1},
		{name: "422", status: 422, attempts: 1},
		{name: "422 with Retry-After", status: 422, headers: []string{"Retry-After", "1"}, attempts: 1},
		{name: "501", status: 501, attempts: 1},
		{name: "stored 500", status: 500, headers: replayed, attempts: 1},
		{name: "stored 503 with Retry-After", status: 503, headers: append([]string{"Retry-After", "1"}, replayed...), attempts: 1},
		{name: "Stripe says no", provider: idempotency.Stripe(), status: 503, headers: []string{"Stripe-Should-Retry", "false"}, attempts: 1},
		{name: "Stripe says yes", provider: idempotency.Stripe(), status: 402, headers: []string{"Stripe-Should-Retry", "true"}, attempts: 4},
		{name: "Adyen says yes", provider: idempotency.Adyen(), status: 422, headers: []string{"Transient-Error", "true"}, attempts: 4},
		{name: "Increase's 409", provider: idempotency.Increase(), status: 409, headers: []string{"Retry-After", "1"}, attempts: 1},
		{name: "GoCardless's 409", provider: idempotency.GoCardless(), status: 409, attempts: 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(status(tt.status, "why", tt.headers...))
				resp, err := (&idempotency.Transport{Base: b, Provider: tt.provider}).RoundTrip(newPost(t, apiURL, "x"))
				if err != nil {
					t.Fatal(err)
				}
				b.oneKey(t, tt.attempts)
				// Whether retried in vain or not at all: the last answer, whole.
				if got := readAll(t, resp); resp.StatusCode != tt.status || got != "why" {
					t.Errorf("answer %d %q", resp.StatusCode, got)
				}
			})
		})
	}
}

func TestWaitsAsAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(http.TimeFormat) }
		tests := map[string]struct {
			headers []string
			min     time.Duration
			max     time.Duration
		}{
			"seconds":      {[]string{"Retry-After", "7"}, 7 * time.Second, 7 * time.Second},
			"a fraction":   {[]string{"Retry-After", "1.5"}, 1500 * time.Millisecond, 1500 * time.Millisecond},
			"milliseconds": {[]string{"Retry-After-Ms", "250"}, 250 * time.Millisecond, 250 * time.Millisecond},
			"a date":       {[]string{"Retry-After", in(20 * time.Second)}, 19 * time.Second, 20 * time.Second},
			"a past date":  {[]string{"Retry-After", in(-time.Hour)}, time.Millisecond, time.Second},
			"zero":         {[]string{"Retry-After", "0"}, time.Millisecond, time.Second},
			"nonsense":     {[]string{"Retry-After", "soon"}, 1, 200 * time.Millisecond},
			"negative":     {[]string{"Retry-After", "-5"}, 1, 200 * time.Millisecond},
		}
		for name, tt := range tests {
			if strings.HasSuffix(name, "a date") {
				tt.headers[1] = in(20 * time.Second) // from now, since the others have waited
			}
			b := answering(status(503, "", tt.headers...), status(201, ""))
			began := time.Now()
			resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if d := time.Since(began); d < tt.min || d > tt.max {
				t.Errorf("%s: waited %v, want %v to %v", name, d, tt.min, tt.max)
			}
		}
	})
}

// Neither slept through nor overflowed.
func TestLongRetryAfterIsReturnedAtOnce(t *testing.T) {
	t.Parallel()
	for _, v := range []string{"61", "7200", "10000000000", "99999999999999999999999999", strings.Repeat("9", 400)} {
		synctest.Test(t, func(t *testing.T) {
			b := answering(status(429, "slow down", "Retry-After", v))
			began := time.Now()
			resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			if got := readAll(t, resp); got != "slow down" || b.count() != 1 || time.Since(began) != 0 {
				t.Errorf("Retry-After %.20s: %q after %d attempts and %v", v, got, b.count(), time.Since(began))
			}
		})
	}
}

func TestPausesAreJitteredAndBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var longest time.Duration
		distinct := map[time.Duration]bool{}
		tr := &idempotency.Transport{
			Base:  answering(status(503, "")),
			Retry: idempotency.RetryPolicy{MaxAttempts: 20, MinWait: 100 * time.Millisecond, MaxWait: time.Second},
			OnAttempt: func(_ context.Context, a idempotency.Attempt) {
				if a.Retry {
					longest = max(longest, a.Wait)
					distinct[a.Wait] = true
					if bound := min(time.Second, 100*time.Millisecond<<(a.Number-1)); a.Wait <= 0 || a.Wait > bound {
						t.Errorf("pause %d is %v, want up to %v", a.Number, a.Wait, bound)
					}
				}
			},
		}
		for range 20 {
			resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		if longest < 800*time.Millisecond || len(distinct) < 100 {
			t.Errorf("longest of 380 pauses %v, %d different: that is no full jitter", longest, len(distinct))
		}
	})
}

// A wait that the deadline would cut is not begun: the caller gets what there
// is.
func TestDeadlineKeepsTheLastAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		b := answering(status(503, "last words", "Retry-After", "10"))
		began := time.Now()
		resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x").WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, resp); got != "last words" || time.Since(began) != 0 {
			t.Errorf("%q after %v", got, time.Since(began))
		}
	})
}

func TestInProgressIsWaitedOutByTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		busy := status(409, "still at it", "Retry-After", "2")
		budget := &idempotency.Budget{Capacity: 1} // too small for any retry
		tr := &idempotency.Transport{
			Base:  answering(busy, busy, busy, busy, busy, busy, busy, busy, status(201, "done")),
			Retry: idempotency.RetryPolicy{Budget: budget},
		}
		resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, resp); got != "done" {
			t.Errorf("answer %d %q", resp.StatusCode, got)
		}

		b := answering(busy)
		began := time.Now()
		resp, err = (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, resp); got != "still at it" || resp.StatusCode != 409 {
			t.Errorf("answer %d %q", resp.StatusCode, got)
		}
		if d := time.Since(began); d < 50*time.Second || d > time.Minute {
			t.Errorf("waited %v, want a minute at the most", d)
		}
	})
}

func TestExhaustedOnErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := answering(lost)
		client := &http.Client{Transport: &idempotency.Transport{Base: b}}
		resp, err := client.Do(newPost(t, apiURL, "x"))
		if resp != nil {
			t.Error("a response beside the error")
		}
		var e *idempotency.Error
		if !errors.As(err, &e) || !errors.Is(err, errLost) {
			t.Fatalf("Do: %v", err)
		}
		if e.Attempts != 4 || !e.Ambiguous || e.Key != b.oneKey(t, 4) {
			t.Errorf("error %+v", e)
		}
		if n := strings.Count(err.Error(), "api.example.com"); n != 1 {
			t.Errorf("the URL is %d times in %q", n, err)
		}
	})
}

func TestAmbiguity(t *testing.T) {
	t.Parallel()
	dial := &net.OpError{Op: "dial", Err: errors.New("refused")}
	fail := func(err error) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) { return nil, err }
	}
	tests := map[string]struct {
		answers   []func(*http.Request) (*http.Response, error)
		attempts  int
		ambiguous bool
	}{
		"never connected":       {[]func(*http.Request) (*http.Response, error){fail(dial)}, 4, false},
		"unknown host":          {[]func(*http.Request) (*http.Response, error){fail(&net.DNSError{})}, 4, false},
		"lost once":             {[]func(*http.Request) (*http.Response, error){lost, fail(dial)}, 4, true},
		"read error":            {[]func(*http.Request) (*http.Response, error){fail(&net.OpError{Op: "read", Err: errLost})}, 4, true},
		"unknown authority":     {[]func(*http.Request) (*http.Response, error){fail(x509.UnknownAuthorityError{})}, 1, false},
		"wrong host":            {[]func(*http.Request) (*http.Response, error){fail(x509.HostnameError{Certificate: &x509.Certificate{}, Host: "h"})}, 1, false},
		"certificate not valid": {[]func(*http.Request) (*http.Response, error){fail(x509.CertificateInvalidError{Cert: &x509.Certificate{}})}, 1, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(tt.answers...)
				_, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
				var e *idempotency.Error
				if !errors.As(err, &e) {
					t.Fatalf("RoundTrip: %v", err)
				}
				if e.Attempts != tt.attempts || e.Ambiguous != tt.ambiguous {
					t.Errorf("%d attempts, ambiguous %v; want %d, %v", e.Attempts, e.Ambiguous, tt.attempts, tt.ambiguous)
				}
			})
		})
	}
}

func TestRequestsThatCantBeSentAreNotRetried(t *testing.T) {
	t.Parallel()
	bad := map[string]func(*http.Request){
		"scheme":       func(r *http.Request) { r.URL.Scheme = "gopher" },
		"no host":      func(r *http.Request) { r.URL.Host = "" },
		"header name":  func(r *http.Request) { r.Header["A b"] = []string{"c"} },
		"header value": func(r *http.Request) { r.Header["A"] = []string{"b\r\nc"} },
		"method":       func(r *http.Request) { r.Method = "PO ST" },
	}
	for name, spoil := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			attempts := 0
			tr := &idempotency.Transport{
				Base:      &http.Transport{},
				Provider:  idempotency.Provider{Methods: []string{"POST", "PO ST"}},
				OnAttempt: func(context.Context, idempotency.Attempt) { attempts++ },
			}
			body := newTracked("x")
			req := newPost(t, apiURL, "")
			req.Body, req.GetBody = body, nil
			spoil(req)
			resp, err := tr.RoundTrip(req)
			var e *idempotency.Error
			if resp != nil || !errors.As(err, &e) || e.Ambiguous || attempts > 1 {
				t.Errorf("RoundTrip = %v, %v after %d attempts", resp, err, attempts)
			}
			body.check(t, name)
		})
	}
}

func TestCancelledWhileWaiting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		b := answering(status(503, "", "Retry-After", "30"))
		began := time.Now()
		resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x").WithContext(ctx))
		if resp != nil || !errors.Is(err, context.Canceled) {
			t.Fatalf("RoundTrip = %v, %v; want context.Canceled", resp, err)
		}
		var e *idempotency.Error
		if !errors.As(err, &e) || e.Key == "" || e.Attempts != 1 {
			t.Errorf("error %+v", e)
		}
		if d := time.Since(began); d != time.Second {
			t.Errorf("returned after %v", d)
		}
		synctest.Wait() // and leaves no goroutine behind, or the bubble fails
	})
}

func TestCancelledBeforeAndDuringAnAttempt(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	b := answering(func(*http.Request) (*http.Response, error) { cancel(); return nil, ctx.Err() })
	_, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x").WithContext(ctx))
	if !errors.Is(err, context.Canceled) || b.count() != 1 {
		t.Errorf("RoundTrip: %v after %d attempts", err, b.count())
	}
	body := newTracked("x")
	req := newPost(t, apiURL, "").WithContext(ctx)
	req.Body, req.GetBody = body, nil
	_, err = (&idempotency.Transport{Base: b}).RoundTrip(req)
	var e *idempotency.Error
	if !errors.Is(err, context.Canceled) || !errors.As(err, &e) || e.Ambiguous || b.count() != 1 {
		t.Errorf("RoundTrip with an ended context: %v after %d attempts", err, b.count())
	}
	body.check(t, "an ended context")
}

func TestBudgetStopsRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		budget := &idempotency.Budget{Capacity: 10, Cost: 5, Refund: 1}
		b := answering(lost)
		tr := &idempotency.Transport{Base: b, Retry: idempotency.RetryPolicy{MaxAttempts: 10, Budget: budget}}
		_, err := tr.RoundTrip(newPost(t, apiURL, "x"))
		if !errors.Is(err, idempotency.ErrBudgetSpent) || !errors.Is(err, errLost) || b.count() != 3 {
			t.Fatalf("RoundTrip: %v after %d attempts, want 3 and ErrBudgetSpent", err, b.count())
		}
		// Another Transport shares it.
		other := answering(status(503, "busy"))
		resp, err := (&idempotency.Transport{Base: other, Retry: tr.Retry}).RoundTrip(newPost(t, apiURL, "x"))
		if err != nil || other.count() != 1 || readAll(t, resp) != "busy" {
			t.Errorf("%v after %d attempts", err, other.count())
		}
		// Successes fill it again.
		for range 5 {
			resp, err := (&idempotency.Transport{Base: answering(status(201, "")), Retry: tr.Retry}).RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		again := answering(lost, status(201, ""))
		resp, err = (&idempotency.Transport{Base: again, Retry: tr.Retry}).RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatalf("after five successes: %v", err)
		}
		resp.Body.Close()
	})
}

func TestAttemptTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hang := func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}
		b := answering(hang, status(201, "done"))
		tr := &idempotency.Transport{Base: b, Retry: idempotency.RetryPolicy{AttemptTimeout: time.Second}}
		resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, resp); got != "done" {
			t.Errorf("answer %q", got)
		}
		b.oneKey(t, 2)

		_, err = (&idempotency.Transport{Base: answering(hang), Retry: tr.Retry}).RoundTrip(newPost(t, apiURL, "x"))
		if !errors.Is(err, idempotency.ErrAttemptTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			t.Errorf("RoundTrip: %v, want the attempt's timeout and not the caller's end", err)
		}
		var timeout interface{ Timeout() bool }
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("%v is no timeout", err)
		}
	})
}

// The attempt's time does not run on while the caller reads.
func TestAttemptTimeoutSparesTheBody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var attemptCtx context.Context
		b := answering(func(r *http.Request) (*http.Response, error) {
			attemptCtx = r.Context()
			return status(200, "long")(r)
		})
		tr := &idempotency.Transport{Base: b, MaxBufferedResponse: -1, Retry: idempotency.RetryPolicy{AttemptTimeout: time.Second}}
		resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if attemptCtx.Err() != nil {
			t.Error("the context ended under the reader")
		}
		resp.Body.Close()
		if attemptCtx.Err() == nil {
			t.Error("the context lives on after the body was closed")
		}
	})
}

func TestSettingsThatCannotWork(t *testing.T) {
	t.Parallel()
	for name, tr := range map[string]*idempotency.Transport{
		"negative attempts": {Retry: idempotency.RetryPolicy{MaxAttempts: -1}},
		"negative wait":     {Retry: idempotency.RetryPolicy{MinWait: -1}},
		"bounds crossed":    {Retry: idempotency.RetryPolicy{MinWait: 2, MaxWait: 1}},
		"header":            {Provider: idempotency.Provider{Header: "not a header"}},
		"key length":        {Provider: idempotency.Provider{MaxKeyLength: -1}},
		"budget":            {Retry: idempotency.RetryPolicy{Budget: &idempotency.Budget{Cost: -1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr.Base = answering(status(200, ""))
			body := newTracked("x")
			req := newPost(t, apiURL, "")
			req.Body, req.GetBody = body, nil
			resp, err := tr.RoundTrip(req)
			if !errors.Is(err, idempotency.ErrConfig) || resp != nil {
				t.Errorf("RoundTrip = %v, %v; want ErrConfig", resp, err)
			}
			body.check(t, name)
		})
	}
}
