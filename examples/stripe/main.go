// Stripe sends stripe-go's requests through the Transport, to a stub of the API
// that acts and loses its answers.
//
//	go run ./examples/stripe
//
// stripe-go writes an Idempotency-Key into each request itself, its own or that
// of SetIdempotencyKey. The Transport respects it: what it adds are the retries,
// a budget, answers that break off half way, and an error that says whether the
// charge may have been made and under which key. So stripe-go's own retries are
// switched off. To go on later, hand the Error's key to SetIdempotencyKey;
// WithKey would come second to the header.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"time"

	"github.com/stripe/stripe-go/v82"

	"github.com/effectonce/idempotency"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "stripe:", err)
		os.Exit(1)
	}
}

// newClient returns Stripe's client on top of the Transport. url is "" for the
// real API.
func newClient(secret, url string) *stripe.Client {
	config := &stripe.BackendConfig{
		MaxNetworkRetries: stripe.Int64(0),
		LeveledLogger:     &stripe.LeveledLogger{Level: stripe.LevelNull},
		HTTPClient: &http.Client{
			Timeout: 80 * time.Second, // for all attempts together
			Transport: &idempotency.Transport{
				Provider: idempotency.Stripe(),
				Retry:    idempotency.RetryPolicy{MinWait: 20 * time.Millisecond, Budget: &idempotency.Budget{}},
			},
		},
	}
	if url != "" {
		config.URL = &url
	}
	return stripe.NewClient(secret, stripe.WithBackends(stripe.NewBackendsWithConfig(config)))
}

func run(ctx context.Context, out io.Writer) error {
	api := &stub{intents: map[string]string{}, asked: map[string]int{}, lose: 2}
	srv := httptest.NewServer(api)
	defer srv.Close()
	client := newClient("sk_test_123", srv.URL)
	pay := func(key string) (*stripe.PaymentIntent, error) {
		params := &stripe.PaymentIntentCreateParams{Amount: stripe.Int64(500), Currency: stripe.String("eur")}
		if key != "" {
			params.SetIdempotencyKey(key)
		}
		return client.V1PaymentIntents.Create(ctx, params)
	}

	for _, key := range []string{"", "order-1042"} {
		intent, err := pay(key)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "key %s: %s, asked %d times\n", cmp.Or(key, "of stripe-go"), intent.ID, api.attempts(key))
	}

	api.setLose(100) // more than are tried
	_, err := pay("order-1043")
	var lost *idempotency.Error
	if !errors.As(err, &lost) {
		return fmt.Errorf("no Error of the Transport: %w", err)
	}
	fmt.Fprintf(out, "key %s: no answer, may have acted: %v\n", lost.Key, lost.Ambiguous)
	api.setLose(0)
	intent, err := pay(lost.Key)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "key %s, again: %s\n", lost.Key, intent.ID)

	api.mu.Lock()
	defer api.mu.Unlock()
	fmt.Fprintf(out, "payment intents: %d\n", len(api.intents))
	return nil
}

// stub is the part of Stripe's API that matters here: one payment intent per
// key, and answers that don't arrive.
type stub struct {
	mu      sync.Mutex
	intents map[string]string // ids by key
	asked   map[string]int
	last    string // key
	lose    int    // of the answers under a key, the first ones
}

func (s *stub) setLose(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lose = n
}

// attempts returns how often the key was asked with, by default the last one.
func (s *stub) attempts(key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[cmp.Or(key, s.last)]
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Idempotency-Key")
	if r.FormValue("amount") != "500" || key == "" {
		http.Error(w, `{"error":{"message":"bad request"}}`, http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = key
	if s.intents[key] == "" {
		s.intents[key] = fmt.Sprintf("pi_%d", len(s.intents)+1)
	}
	if s.asked[key]++; s.asked[key] <= s.lose {
		if s.asked[key] == 1 { // as Stripe has it while the first is running
			w.WriteHeader(http.StatusConflict)
			return
		}
		panic(http.ErrAbortHandler) // cuts the connection
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":%q,"object":"payment_intent","amount":500}`, s.intents[key])
}
