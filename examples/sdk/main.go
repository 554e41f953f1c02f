// Sdk shows package acmepay, an SDK that embeds the Transport, against an API
// that makes each charge and then loses the answer, twice.
//
//	go run ./examples/sdk
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"

	"github.com/effectonce/idempotency/examples/sdk/acmepay"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "sdk:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) error {
	api := &ledger{charges: map[string]acmepay.Charge{}, asked: map[string]int{}}
	srv := httptest.NewServer(api)
	defer srv.Close()
	client, err := acmepay.New(acmepay.Options{APIKey: "sk_test", BaseURL: srv.URL})
	if err != nil {
		return err
	}
	for _, amount := range []int64{500, 700} {
		charge, err := client.CreateCharge(ctx, acmepay.ChargeParams{Amount: amount, Currency: "EUR"})
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "charged %d as %s\n", charge.Amount, charge.ID)
	}
	fmt.Fprintf(out, "requests: %d, charges: %d\n", api.requests, len(api.charges))
	return nil
}

// ledger is the API: one charge per key.
type ledger struct {
	mu       sync.Mutex
	charges  map[string]acmepay.Charge
	asked    map[string]int
	requests int
}

func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests++
	key := r.Header.Get("Idempotency-Key")
	charge, done := l.charges[key]
	if !done {
		if err := json.NewDecoder(r.Body).Decode(&charge); err != nil || key == "" {
			http.Error(w, "bad request", http.StatusBadRequest)
			return
		}
		charge.ID = fmt.Sprintf("ch_%d", len(l.charges)+1)
		l.charges[key] = charge
	}
	if l.asked[key]++; l.asked[key] <= 2 {
		w.WriteHeader(http.StatusBadGateway) // a proxy in between has lost the answer
		return
	}
	_ = json.NewEncoder(w).Encode(charge)
}
