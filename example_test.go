package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/effectonce/idempotency"
)

// flaky is an API that loses its first answers, and says which key came.
func flaky(losses int) *httptest.Server {
	seen := 0
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if seen++; seen <= losses {
			panic(http.ErrAbortHandler)
		}
		for _, name := range []string{"Idempotency-Key", "PayPal-Request-Id"} {
			if key := r.Header.Get(name); key != "" {
				fmt.Fprintf(w, "request %d, %s of %d characters", seen, name, len(key))
			}
		}
	}))
}

func show(resp *http.Response) {
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println(resp.StatusCode, string(body))
}

// The zero value is a drop-in: one key for each request, kept on its retries.
func Example() {
	api := flaky(2)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{}}
	resp, err := client.Post(api.URL, "application/json", strings.NewReader(`{"cents": 100}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	show(resp)
	// Output: 200 request 3, Idempotency-Key of 36 characters
}

// A header that the caller sets is the key, on every retry.
func ExampleTransport_ownKey() {
	api := flaky(1)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{}}
	req, err := http.NewRequest(http.MethodPost, api.URL, strings.NewReader(`{"cents": 100}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	req.Header.Set("Idempotency-Key", "order-1234")
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	show(resp)
	// Output: 200 request 2, Idempotency-Key of 10 characters
}

// Where the operation has a name, its key can be made from it: whoever sends
// it, and whenever, sends the same one.
func ExampleDeterministic() {
	ctx := idempotency.WithKey(context.Background(), idempotency.Deterministic("capture", "order-1234"))
	fmt.Println(idempotency.Deterministic("capture", "order-1234") == idempotency.Deterministic("capture", "order-1234"))
	fmt.Println(idempotency.Deterministic("capture", "order-1", "234") == idempotency.Deterministic("capture", "order-1234"))
	_ = ctx // http.NewRequestWithContext(ctx, …)
	// Output:
	// true
	// false
}

// Providers differ in header, key length and in what their answers mean.
func ExampleProvider() {
	api := flaky(0)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{Provider: idempotency.PayPal()}}
	resp, err := client.Post(api.URL, "application/json", strings.NewReader(`{}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	show(resp)
	// Output: 200 request 1, PayPal-Request-Id of 36 characters
}

// A request that got no answer may have been acted on. Its key goes on with
// it, in this process or another.
func ExampleError() {
	api := flaky(2)
	defer api.Close()

	client := &http.Client{Transport: &idempotency.Transport{
		Retry: idempotency.RetryPolicy{MaxAttempts: 2, MaxWait: time.Millisecond},
	}}
	_, err := client.Post(api.URL, "application/json", strings.NewReader(`{"cents": 100}`))
	var lost *idempotency.Error
	if !errors.As(err, &lost) {
		fmt.Println("unexpected:", err)
		return
	}
	fmt.Println("after", lost.Attempts, "attempts; may it have acted?", lost.Ambiguous)

	// Later: the same request with the key that was kept.
	ctx := idempotency.WithKey(context.Background(), lost.Key)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, api.URL, strings.NewReader(`{"cents": 100}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	show(resp)
	// Output:
	// after 2 attempts; may it have acted? true
	// 200 request 3, Idempotency-Key of 36 characters
}

// A Budget is shared by all that call one service. When the service is down,
// retries stop before they add to its trouble.
func ExampleBudget() {
	api := flaky(1000)
	defer api.Close()

	budget := &idempotency.Budget{Capacity: 10} // for two retries
	client := &http.Client{Transport: &idempotency.Transport{
		Retry: idempotency.RetryPolicy{MaxAttempts: 10, MaxWait: time.Millisecond, Budget: budget},
	}}
	for range 2 {
		_, err := client.Post(api.URL, "application/json", strings.NewReader(`{}`))
		var lost *idempotency.Error
		if errors.As(err, &lost) {
			fmt.Println(lost.Attempts, "attempts, budget spent:", errors.Is(err, idempotency.ErrBudgetSpent))
		}
	}
	// Output:
	// 3 attempts, budget spent: true
	// 1 attempts, budget spent: true
}

// A handler that calls another service names its steps. Run again for the same
// operation, it sends the same keys.
func ExampleWithStep() {
	var keys []string
	api := roundTripper(func(req *http.Request) (*http.Response, error) {
		keys = append(keys, req.Header.Get("Idempotency-Key"))
		return &http.Response{StatusCode: http.StatusCreated, Body: http.NoBody}, nil
	})
	client := &http.Client{Transport: &idempotency.Transport{Base: api}}

	handle := func(ctx context.Context) { // package server sets the operation
		for i := range 2 {
			step := idempotency.WithStep(ctx, fmt.Sprintf("line-%d", i+1))
			req, err := http.NewRequestWithContext(step, http.MethodPost, "https://api.example.com/lines", nil)
			if err != nil {
				fmt.Println(err)
				return
			}
			resp, err := client.Do(req)
			if err != nil {
				fmt.Println(err)
				return
			}
			resp.Body.Close()
		}
	}
	ctx := idempotency.WithOperation(context.Background(), "order-1234")
	handle(ctx)
	handle(ctx) // after a crash
	fmt.Println(keys[0] == keys[2], keys[1] == keys[3], keys[0] == keys[1])
	// Output: true true false
}
