package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

func newWebhook(t *testing.T, handle consumer.Handler) *consumer.Webhook {
	t.Helper()
	return &consumer.Webhook{
		Consumer: newLease(t),
		Verify:   consumer.Unverified,
		ID:       consumer.StandardWebhooksID,
		Handle:   func(ctx context.Context, _ *http.Request, _ []byte) error { return handle(ctx) },
	}
}

func post(h http.Handler, id, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "/webhook", strings.NewReader(body))
	if id != "" {
		r.Header.Set("webhook-id", id)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func wantCode(t *testing.T, w *httptest.ResponseRecorder, want int) {
	t.Helper()
	if w.Code != want {
		t.Fatalf("status %d (%s), want %d", w.Code, strings.TrimSpace(w.Body.String()), want)
	}
}

func TestWebhookOneEffect(t *testing.T) {
	t.Parallel()
	effects := 0
	h := newWebhook(t, func(context.Context) error { effects++; return nil })
	for range 5 {
		wantCode(t, post(h, "msg_1", "{}"), 204)
	}
	if effects != 1 {
		t.Errorf("%d effects of an event delivered 5 times", effects)
	}
}

func TestWebhookFailedIsSentAgain(t *testing.T) {
	t.Parallel()
	err := errHandler
	h := newWebhook(t, func(context.Context) error { return err })
	wantCode(t, post(h, "msg_1", "{}"), 500)
	err = nil
	wantCode(t, post(h, "msg_1", "{}"), 204)
}

func TestWebhookBusy(t *testing.T) {
	t.Parallel()
	var h *consumer.Webhook
	h = newWebhook(t, func(context.Context) error {
		dup := post(h, "msg_1", "{}")
		wantCode(t, dup, 503)
		if s := dup.Header().Get("Retry-After"); s != "1" {
			t.Errorf("Retry-After %q", s)
		}
		return nil
	})
	wantCode(t, post(h, "msg_1", "{}"), 204)
}

func TestWebhookPoison(t *testing.T) {
	t.Parallel()
	h := newWebhook(t, func(context.Context) error { return consumer.ErrPoison })
	wantCode(t, post(h, "msg_1", "{}"), 500) // nobody takes it

	var dead []string
	deadErr := errDown
	h.DeadLetter = func(_ context.Context, _ *http.Request, body []byte, res consumer.Result) error {
		dead = append(dead, string(body))
		if !errors.Is(res.Err, consumer.ErrPoison) {
			t.Errorf("%v", res.Err)
		}
		return deadErr
	}
	wantCode(t, post(h, "msg_1", "x"), 500)
	deadErr = nil
	wantCode(t, post(h, "msg_1", "x"), 204)
	if len(dead) != 2 || dead[1] != "x" {
		t.Errorf("dead letters: %q", dead)
	}
}

// What the sender's headers carry reaches the handler, and its body as well.
func TestWebhookHandsOnHeadersAndBody(t *testing.T) {
	t.Parallel()
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	h := newWebhook(t, nil)
	h.Verify = func(r *http.Request, body []byte) error {
		if b, err := io.ReadAll(r.Body); err != nil || string(b) != string(body) {
			t.Errorf("Verify reads %q, %v", b, err)
		}
		return nil
	}
	h.Handle = func(ctx context.Context, r *http.Request, body []byte) error {
		if got := r.Header.Get("Traceparent"); got != trace {
			t.Errorf("traceparent %q", got)
		}
		if r.Context() != ctx || dedup.Attempt(r.Context()) != 1 {
			t.Error("the request has another context than the handler")
		}
		if string(body) != `{"a":1}` {
			t.Errorf("body %q", body)
		}
		return nil
	}
	r := httptest.NewRequest("POST", "/", strings.NewReader(`{"a":1}`))
	r.Header.Set("webhook-id", "m")
	r.Header.Set("Traceparent", trace)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	wantCode(t, w, 204)
}

func TestWebhookRefuses(t *testing.T) {
	t.Parallel()
	forged := errors.New("forged")
	tests := []struct {
		name string
		edit func(*consumer.Webhook)
		req  func() *http.Request
		want int
	}{
		{"signature", func(h *consumer.Webhook) {
			h.Verify = func(*http.Request, []byte) error { return forged }
			h.ID = func(http.Header, []byte) (string, error) {
				t.Error("looked at an event that is not verified")
				return "x", nil
			}
		}, nil, 403},
		{"no id", nil, func() *http.Request { return httptest.NewRequest("POST", "/", nil) }, 400},
		{"empty id", func(h *consumer.Webhook) {
			h.ID = func(http.Header, []byte) (string, error) { return "", nil }
		}, nil, 400},
		{"method", nil, func() *http.Request { return httptest.NewRequest("GET", "/", nil) }, 405},
		{"too large", func(h *consumer.Webhook) { h.MaxBody = 3 }, nil, 413},
		{"cut off", nil, func() *http.Request { return httptest.NewRequest("POST", "/", iotest.ErrReader(io.ErrUnexpectedEOF)) }, 400},
		{"no consumer", func(h *consumer.Webhook) { h.Consumer = nil }, nil, 500},
		{"no verify", func(h *consumer.Webhook) { h.Verify = nil }, nil, 500},
		{"no extractor", func(h *consumer.Webhook) { h.ID = nil }, nil, 500},
		{"no handler", func(h *consumer.Webhook) { h.Handle = nil }, nil, 500},
		{"negative limit", func(h *consumer.Webhook) { h.MaxBody = -1 }, nil, 500},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newWebhook(t, never(t))
			if tt.edit != nil {
				tt.edit(h)
			}
			r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
			r.Header.Set("webhook-id", "m")
			if tt.req != nil {
				r = tt.req()
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			wantCode(t, w, tt.want)
		})
	}
}

func TestWebhookRespond(t *testing.T) {
	t.Parallel()
	h := newWebhook(t, ok)
	h.Respond = func(w http.ResponseWriter, _ *http.Request, res consumer.Result) {
		if res.Status == consumer.Done {
			fmt.Fprint(w, "[accepted]")
		}
	}
	if w := post(h, "m", ""); w.Body.String() != "[accepted]" {
		t.Errorf("body %q", w.Body.String())
	}
}

func ExampleWebhook() {
	webhook := &consumer.Webhook{
		Consumer: &consumer.Lease{Store: memstore.New(), Group: "billing", MaxAttempts: 5},
		Verify:   consumer.Unverified, // your provider's library goes here
		ID:       consumer.StripeID,
		Handle: func(_ context.Context, _ *http.Request, body []byte) error {
			fmt.Printf("handled %s\n", body)
			return nil
		},
	}
	for range 3 {
		r := httptest.NewRequest("POST", "/stripe", strings.NewReader(`{"id":"evt_1"}`))
		w := httptest.NewRecorder()
		webhook.ServeHTTP(w, r)
		fmt.Println(w.Code)
	}
	// Output:
	// handled {"id":"evt_1"}
	// 204
	// 204
	// 204
}

func ExampleLease() {
	c := &consumer.Lease{Store: memstore.New(), Group: "billing", MaxAttempts: 2, Retention: 72 * time.Hour}
	for delivery := 1; delivery <= 3; delivery++ {
		r := c.Handle(context.Background(), "evt_1", func(ctx context.Context) error {
			if dedup.Attempt(ctx) == 1 {
				return errors.New("payment provider is down")
			}
			return nil
		})
		fmt.Println(r.Status, r.Duplicate)
	}
	// Output:
	// failed false
	// done false
	// done true
}
