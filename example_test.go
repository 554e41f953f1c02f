package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/idempotency"
)

// payments is an API that charges once per key. Of each charge's first answers
// it loses as many as lose says, after the charge was made.
type payments struct {
	*httptest.Server
	header string
	lose   int

	mu      sync.Mutex
	asked   map[string]int // by key
	charges int
}

func newPayments(header string, lose int) *payments {
	p := &payments{header: header, lose: lose, asked: map[string]int{}}
	p.Server = httptest.NewServer(p)
	return p
}

func (p *payments) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get(p.header)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asked[key] == 0 {
		p.charges++
	}
	if p.asked[key]++; p.asked[key] <= p.lose {
		panic(http.ErrAbortHandler) // cuts the connection
	}
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, "charge %d, asked %d times", p.charges, p.asked[key])
}

// The Transport goes into any http.Client. Here the first two answers are lost.
// The charge is made once all the same, since all three requests carry one key.
func ExampleTransport() {
	api := newPayments("Idempotency-Key", 2)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{}}
	resp, err := client.Post(api.URL+"/charges", "application/json", strings.NewReader(`{"amount":500}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(resp.Status)
	fmt.Println(string(body))
	// Output:
	// 201 Created
	// charge 1, asked 3 times
}

// A key of the caller's own goes into the header, as without the Transport.
func ExampleTransport_ownKey() {
	api := newPayments("Idempotency-Key", 1)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{}}
	req, _ := http.NewRequest(http.MethodPost, api.URL+"/charges", strings.NewReader(`{"amount":500}`))
	req.Header.Set("Idempotency-Key", "invoice-1042")
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, api.asked)
	// Output:
	// 201 Created map[invoice-1042:2]
}

// Where the operation has a name, its key need not be stored anywhere: it is
// the same in every process and after every crash.
func ExampleDeterministic() {
	api := newPayments("Idempotency-Key", 0)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{}}
	for range 2 { // say, a job that was started again
		ctx := idempotency.WithKey(context.Background(), idempotency.Deterministic("capture", "order-1042"))
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, api.URL+"/captures", nil)
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		fmt.Println(string(body))
	}
	// Output:
	// charge 1, asked 1 times
	// charge 1, asked 2 times
}

// Providers differ in the header, in the keys that they take, and in how they
// say that a request is still in progress.
func ExampleProvider() {
	api := newPayments("PayPal-Request-Id", 1)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{Provider: idempotency.PayPal()}}
	resp, err := client.Post(api.URL+"/v2/checkout/orders", "application/json", strings.NewReader(`{}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(string(body))
	// Output:
	// charge 1, asked 2 times
}

// When all attempts were in vain, the Error has the key. Stored with the order,
// it lets another run go on with the same operation.
func ExampleWithKey_resume() {
	api := newPayments("Idempotency-Key", 2)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{
		Retry: idempotency.RetryPolicy{MaxAttempts: 2, MinWait: time.Millisecond},
	}}
	req, _ := http.NewRequest(http.MethodPost, api.URL+"/charges", strings.NewReader(`{"amount":500}`))
	_, err := client.Do(req)
	var e *idempotency.Error
	if !errors.As(err, &e) {
		fmt.Println(err)
		return
	}
	fmt.Printf("attempts: %d, may have acted: %v\n", e.Attempts, e.Ambiguous)
	stored := e.Key

	// Later, or elsewhere:
	ctx := idempotency.WithKey(context.Background(), stored)
	req, _ = http.NewRequestWithContext(ctx, http.MethodPost, api.URL+"/charges", strings.NewReader(`{"amount":500}`))
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(string(body))
	// Output:
	// attempts: 2, may have acted: true
	// charge 1, asked 3 times
}

// A budget that all clients of a service share keeps their retries from adding
// to its trouble: here it has room for three.
func ExampleBudget() {
	api := newPayments("Idempotency-Key", 100)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{
		Retry: idempotency.RetryPolicy{
			MinWait: time.Millisecond,
			MaxWait: time.Millisecond,
			Budget:  &idempotency.Budget{Capacity: 15, Cost: 5},
		},
	}}
	for range 3 {
		_, err := client.Post(api.URL+"/charges", "application/json", strings.NewReader(`{"amount":500}`))
		var e *idempotency.Error
		if errors.As(err, &e) {
			fmt.Println("attempts:", e.Attempts, "budget spent:", errors.Is(err, idempotency.ErrBudgetSpent))
		}
	}
	// Output:
	// attempts: 4 budget spent: false
	// attempts: 1 budget spent: true
	// attempts: 1 budget spent: true
}

// A handler that runs again after a crash sends its calls under the same keys
// again, if it names them. The server and consumer packages set the operation.
func ExampleWithStep() {
	api := newPayments("Idempotency-Key", 0)
	defer api.Close()
	client := &http.Client{Transport: &idempotency.Transport{}}

	handler := func(ctx context.Context) {
		for _, step := range []string{"charge", "fee"} {
			req, _ := http.NewRequestWithContext(idempotency.WithStep(ctx, step), http.MethodPost, api.URL, nil)
			resp, err := client.Do(req)
			if err != nil {
				fmt.Println(err)
				return
			}
			resp.Body.Close()
		}
	}
	ctx := idempotency.WithOperation(context.Background(), "order-1042")
	handler(ctx)
	handler(ctx) // once more, after a crash
	fmt.Println("charges:", api.charges)
	// Output:
	// charges: 2
}
