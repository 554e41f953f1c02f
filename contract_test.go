package idempotency_test

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/jarcoal/httpmock"

	"github.com/effectonce/idempotency"
)

// The contract as a table, seen from an application: the calls of an SDK
// against a mocked API.
func TestContract(t *testing.T) {
	t.Parallel()
	answer := func(status int, body string, headers ...string) httpmock.Responder {
		r := httpmock.NewStringResponder(status, body)
		for i := 0; i+1 < len(headers); i += 2 {
			r = r.HeaderSet(http.Header{headers[i]: {headers[i+1]}})
		}
		return r
	}
	broken := httpmock.NewErrorResponder(errLost)
	done := answer(201, `{"id":"ch_1"}`)
	tests := []struct {
		name      string
		method    string
		key       string // that of the call, if it brings one
		provider  idempotency.Provider
		api       []httpmock.Responder // one an attempt, the last repeats
		calls     int
		keyed     bool
		status    int // 0: an error
		ambiguous bool
	}{
		{name: "POST done at once", method: "POST", api: []httpmock.Responder{done}, calls: 1, keyed: true, status: 201},
		{name: "POST lost twice", method: "POST", api: []httpmock.Responder{broken, broken, done}, calls: 3, keyed: true, status: 201},
		{name: "POST always lost", method: "POST", api: []httpmock.Responder{broken}, calls: 4, keyed: true, ambiguous: true},
		{name: "POST with its own key", method: "POST", key: "order-7", api: []httpmock.Responder{broken, done}, calls: 2, keyed: true, status: 201},
		{name: "PATCH throttled", method: "PATCH", api: []httpmock.Responder{answer(429, ""), done}, calls: 2, keyed: true, status: 201},
		{name: "PUT fails once", method: "PUT", api: []httpmock.Responder{answer(502, ""), done}, calls: 2, status: 201},
		{name: "DELETE lost once", method: "DELETE", api: []httpmock.Responder{broken, answer(204, "")}, calls: 2, status: 204},
		{name: "GET fails for good", method: "GET", api: []httpmock.Responder{answer(503, "")}, calls: 4, status: 503},
		{name: "in progress, then done", method: "POST", api: []httpmock.Responder{answer(409, "", "Retry-After", "1"), done}, calls: 2, keyed: true, status: 201},
		{name: "conflict", method: "POST", api: []httpmock.Responder{answer(409, "taken")}, calls: 1, keyed: true, status: 409},
		{name: "a GET's 409 is no request in progress", method: "GET", api: []httpmock.Responder{answer(409, "", "Retry-After", "1")}, calls: 1, status: 409},
		{name: "other body under the key", method: "POST", api: []httpmock.Responder{answer(422, "")}, calls: 1, keyed: true, status: 422},
		{name: "stored failure", method: "POST", api: []httpmock.Responder{answer(500, "", "Idempotent-Replayed", "true")}, calls: 1, keyed: true, status: 500},
		{name: "Stripe: in progress without Retry-After", provider: idempotency.Stripe(), method: "POST", api: []httpmock.Responder{answer(409, ""), done}, calls: 2, keyed: true, status: 201},
		{name: "Mercado Pago: locked", provider: idempotency.MercadoPago(), method: "POST", api: []httpmock.Responder{answer(423, ""), done}, calls: 2, keyed: true, status: 201},
		{name: "Modern Treasury: in progress without Retry-After", provider: idempotency.ModernTreasury(), method: "POST", api: []httpmock.Responder{answer(409, ""), done}, calls: 2, keyed: true, status: 201},
		{name: "Mercado Pago: conflict", provider: idempotency.MercadoPago(), method: "POST", api: []httpmock.Responder{answer(409, "")}, calls: 1, keyed: true, status: 409},
		{name: "PayPal's PATCH has no key and no second try", provider: idempotency.PayPal(), method: "PATCH", api: []httpmock.Responder{answer(503, "")}, calls: 1, status: 503},
		{name: "PayPal", provider: idempotency.PayPal(), method: "POST", api: []httpmock.Responder{broken, done}, calls: 2, keyed: true, status: 201},
		{name: "IETF", provider: idempotency.IETF(), method: "POST", key: `"mine"`, api: []httpmock.Responder{broken, done}, calls: 2, keyed: true, status: 201},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				header := tt.provider.Header
				if header == "" {
					header = "Idempotency-Key"
				}
				var keys, bodies []string
				mock := httpmock.NewMockTransport()
				mock.RegisterResponder(tt.method, apiURL, func(req *http.Request) (*http.Response, error) {
					body, err := io.ReadAll(req.Body)
					if err != nil {
						t.Errorf("reading the body: %v", err)
					}
					bodies = append(bodies, string(body))
					keys = append(keys, req.Header.Get(header))
					return tt.api[min(len(keys), len(tt.api))-1](req)
				})
				client := &http.Client{Transport: &idempotency.Transport{Base: mock, Provider: tt.provider}}
				req := newPost(t, apiURL, "amount=5")
				req.Method = tt.method
				if tt.key != "" {
					req.Header.Set(header, tt.key)
				}
				resp, err := client.Do(req)
				if tt.status == 0 {
					var e *idempotency.Error
					if !errors.As(err, &e) || e.Attempts != tt.calls || e.Ambiguous != tt.ambiguous || e.Key != keys[0] {
						t.Errorf("Do: %v, want an *Error", err)
					}
				} else if err != nil {
					t.Fatal(err)
				} else if resp.Body.Close(); resp.StatusCode != tt.status {
					t.Errorf("status %d, want %d", resp.StatusCode, tt.status)
				}
				if n := mock.GetTotalCallCount(); n != tt.calls {
					t.Errorf("%d calls, want %d", n, tt.calls)
				}
				for i := range keys {
					if keys[i] != keys[0] || bodies[i] != "amount=5" {
						t.Errorf("call %d has the key %q and the body %q", i+1, keys[i], bodies[i])
					}
				}
				if got := keys[0] != ""; got != tt.keyed || tt.key != "" && keys[0] != tt.key {
					t.Errorf("key %q", keys[0])
				}
			})
		})
	}
}

// Where the API is not reached at all, nothing was done.
func TestContractNoResponder(t *testing.T) {
	t.Parallel()
	client := &http.Client{Transport: &idempotency.Transport{Base: httpmock.NewMockTransport(), Retry: quick()}}
	resp, err := client.Do(newPost(t, apiURL, "x"))
	if resp != nil || !errors.Is(err, httpmock.NoResponderFound) {
		t.Errorf("Do = %v, %v", resp, err)
	}
}
