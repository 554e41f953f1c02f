package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency"
)

// broken answers with a body that breaks off.
func broken(length int64, headers ...string) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		resp, err := status(201, "", headers...)(req)
		resp.ContentLength = length
		resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("half"), failingReader{io.ErrUnexpectedEOF}))
		return resp, err
	}
}

func TestAnswerLostHalfWay(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(*http.Request) (*http.Response, error){
		"length known": broken(8), "length unknown": broken(-1), "in a JSON answer": broken(-1, "Content-Type", "application/json; charset=utf-8"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := answering(first, first, status(201, "all of it"))
				resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
				if err != nil {
					t.Fatal(err)
				}
				if got := readAll(t, resp); got != "all of it" || resp.ContentLength != 9 {
					t.Errorf("answer %q of length %d", got, resp.ContentLength)
				}
				b.oneKey(t, 3)

				b = answering(first)
				resp, err = (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
				var e *idempotency.Error
				if resp != nil || !errors.As(err, &e) || !e.Ambiguous || !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("RoundTrip = %v, %v", resp, err)
				}
			})
		})
	}
}

// What is not buffered comes as it is, and may break off under the reader.
func TestAnswersThatAreNotBuffered(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		tr     idempotency.Transport
		answer func(*http.Request) (*http.Response, error)
		method string
	}{
		"event stream": {answer: broken(-1, "Content-Type", "text/event-stream")},
		"ndjson":       {answer: broken(-1, "Content-Type", "application/x-ndjson; charset=utf-8")},
		"Stream":       {tr: idempotency.Transport{Stream: func(*http.Request) bool { return true }}, answer: broken(-1)},
		"switched off": {tr: idempotency.Transport{MaxBufferedResponse: -1}, answer: broken(-1)},
		"over the cap": {tr: idempotency.Transport{MaxBufferedResponse: 3}, answer: broken(-1)},
		"no key":       {answer: broken(-1), method: "GET"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := answering(tt.answer)
			tt.tr.Base = b
			req := newPost(t, apiURL, "")
			if tt.method != "" {
				req.Method = tt.method
			}
			resp, err := tt.tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			if string(got) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) || b.count() != 1 {
				t.Errorf("read %q, %v after %d attempts", got, err, b.count())
			}
		})
	}
}

func TestLongAnswerIsPrefixPlusRest(t *testing.T) {
	t.Parallel()
	want := strings.Repeat("0123456789", 1000)
	for _, limit := range []int64{1, 9_999, 10_000, 10_001} {
		resp, err := (&idempotency.Transport{Base: answering(status(200, want)), MaxBufferedResponse: limit}).RoundTrip(newPost(t, apiURL, "x"))
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, resp); got != want {
			t.Errorf("limit %d: %d bytes came, want %d", limit, len(got), len(want))
		}
	}
}

func TestNeverResponseAndError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		body := newTracked("x")
		both := func(req *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 500, Header: http.Header{}, Body: body}, errLost
		}
		neither := func(req *http.Request) (*http.Response, error) { return nil, nil }
		for name, answer := range map[string]func(*http.Request) (*http.Response, error){"both": both, "neither": neither, "error": lost, "503": status(503, "")} {
			resp, err := (&idempotency.Transport{Base: answering(answer)}).RoundTrip(newPost(t, apiURL, "x"))
			if (resp == nil) == (err == nil) {
				t.Errorf("%s: RoundTrip = %v, %v", name, resp, err)
			}
		}
		body.check(t, "the response beside an error")
	})
}

func TestBaseWithoutBodyOrHeader(t *testing.T) {
	t.Parallel()
	bare := func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: 204}, nil }
	resp, err := (&http.Client{Transport: &idempotency.Transport{Base: answering(bare)}}).Do(newPost(t, apiURL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, resp); got != "" || resp.StatusCode != 204 {
		t.Errorf("answer %d %q", resp.StatusCode, got)
	}
}

// countsCloses is a base that counts how often its connections are closed.
type countsCloses struct {
	*base
	closes int
}

func (c *countsCloses) CloseIdleConnections() { c.closes++ }

func TestIdleConnectionsAreTheCallers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &countsCloses{base: answering(lost)}
		client := &http.Client{Transport: &idempotency.Transport{Base: c}}
		if _, err := client.Do(newPost(t, apiURL, "x")); err == nil {
			t.Fatal("no error")
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := client.Do(newPost(t, apiURL, "x").WithContext(ctx)); err == nil {
			t.Fatal("no error")
		}
		if c.closes != 0 {
			t.Errorf("a failure closed all idle connections %d times", c.closes)
		}
		client.CloseIdleConnections()
		if c.closes != 1 {
			t.Errorf("CloseIdleConnections reached the base %d times", c.closes)
		}
	})
}

// lateContext has ended without its Done channel having said so yet.
type lateContext struct {
	context.Context
	err error
}

func (c *lateContext) Err() error            { return c.err }
func (c *lateContext) Done() <-chan struct{} { return nil }

// The wait is over just as the caller cancels: nothing more is sent.
func TestNoAttemptAfterCancel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := &lateContext{Context: context.Background()}
		b := answering(status(503, ""), status(201, ""))
		seen := 0
		tr := &idempotency.Transport{Base: b, OnAttempt: func(context.Context, idempotency.Attempt) {
			seen++
			ctx.err = context.Canceled
		}}
		resp, err := tr.RoundTrip(newPost(t, apiURL, "x").WithContext(ctx))
		var e *idempotency.Error
		if resp != nil || !errors.Is(err, context.Canceled) || !errors.As(err, &e) || e.Attempts != 1 || b.count() != 1 || seen != 1 {
			t.Errorf("RoundTrip = %v, %v after %d attempts, %d of them seen", resp, err, b.count(), seen)
		}
	})
}

func TestConflictWaitIsNeverZero(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, tr := range map[string]*idempotency.Transport{
			"Retry-After: 0":      {Base: answering(status(409, "", "Retry-After", "0"), status(201, ""))},
			"Stripe, none":        {Base: answering(status(409, ""), status(201, "")), Provider: idempotency.Stripe()},
			"Mercado Pago, 423":   {Base: answering(status(423, ""), status(201, "")), Provider: idempotency.MercadoPago()},
			"Stripe, says to":     {Base: answering(status(409, "", "Stripe-Should-Retry", "true"), status(201, "")), Provider: idempotency.Stripe()},
			"Retry-After in past": {Base: answering(status(409, "", "Retry-After", "Sun, 06 Nov 1994 08:49:37 GMT"), status(201, ""))},
		} {
			began := time.Now()
			resp, err := tr.RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 201 || time.Since(began) <= 0 {
				t.Errorf("%s: status %d after %v", name, resp.StatusCode, time.Since(began))
			}
		}
	})
}

// A 500 that was answered and then a failed dial: the first may have acted.
func TestRefusedAnswersAreAmbiguous(t *testing.T) {
	t.Parallel()
	dial := func(*http.Request) (*http.Response, error) { return nil, dialError() }
	for name, tt := range map[string]struct {
		first     func(*http.Request) (*http.Response, error)
		ambiguous bool
	}{
		"500":         {status(500, ""), true},
		"503":         {status(503, ""), true},
		"504":         {status(504, ""), true},
		"in progress": {status(409, "", "Retry-After", "1"), true},
		"429":         {status(429, ""), false},
		"425":         {status(425, ""), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				_, err := (&idempotency.Transport{Base: answering(tt.first, dial)}).RoundTrip(newPost(t, apiURL, "x"))
				var e *idempotency.Error
				if !errors.As(err, &e) || e.Ambiguous != tt.ambiguous {
					t.Errorf("RoundTrip: %v, want ambiguous %v", err, tt.ambiguous)
				}
			})
		})
	}
}

func TestBufferedAnswerIsReadAndClosedFirst(t *testing.T) {
	t.Parallel()
	// A buffered body is read to the end and closed before the caller sees it.
	body := &trackedBody{Reader: bytes.NewReader([]byte("done"))}
	answer := func(req *http.Request) (*http.Response, error) {
		resp, err := status(201, "")(req)
		resp.Body, resp.ContentLength = body, 4
		return resp, err
	}
	resp, err := (&idempotency.Transport{Base: answering(answer)}).RoundTrip(newPost(t, apiURL, "x"))
	if err != nil {
		t.Fatal(err)
	}
	body.check(t, "a buffered answer")
	if got := readAll(t, resp); got != "done" {
		t.Errorf("answer %q", got)
	}
}
