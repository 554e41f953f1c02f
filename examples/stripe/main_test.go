package main

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stripe/stripe-go/v82"

	"github.com/effectonce/idempotency"
)

func TestRun(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	const want = `key of stripe-go: pi_1, asked 3 times
key order-1042: pi_2, asked 3 times
key order-1043: no answer, may have acted: true
key order-1043, again: pi_3
payment intents: 3
`
	if out.String() != want {
		t.Errorf("output\n%s\nwant\n%s", out.String(), want)
	}
}

// Stripe's own errors come through as they are.
func TestErrorsOfTheAPI(t *testing.T) {
	t.Parallel()
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n++
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Stripe-Should-Retry", "false")
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, `{"error":{"type":"api_error","message":"sorry"}}`)
	}))
	t.Cleanup(srv.Close)
	_, err := newClient("sk_test_123", srv.URL).V1PaymentIntents.Create(t.Context(), &stripe.PaymentIntentCreateParams{Amount: stripe.Int64(500)})
	var apiErr *stripe.Error
	var lost *idempotency.Error
	if !errors.As(err, &apiErr) || apiErr.Msg != "sorry" || errors.As(err, &lost) || n != 1 {
		t.Errorf("Create: %v after %d requests", err, n)
	}
}
