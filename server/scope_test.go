package server_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/effectonce/idempotency/server"
)

func TestOperation(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ pattern, method, target, want string }{
		{"", "POST", "/orders/1/pay?x=1", "POST /orders/1/pay"},
		{"", "POST", "/a%2Fb", "POST /a%2Fb"},
		{"/charges", "POST", "/charges", "POST /charges"},
		{"POST /charges", "POST", "/charges", "POST /charges"},
		{"POST  /charges", "POST", "/charges", "POST /charges"},
		{"POST /orders/{id}/pay", "POST", "/orders/1/pay", "POST /orders/{}/pay"},
		{"/files/{path...}", "PATCH", "/files/a/b", "PATCH /files/{...}"},
		{"/files/{$}", "POST", "/files/", "POST /files/{$}"},
		{"POST pay.example.com/{id}", "POST", "/1", "POST pay.example.com/{}"},
		{"/o/{id:[0-9]{3}}/x", "POST", "/o/123/x", "POST /o/{}/x"},
		{"/o/{id:a b}/x", "POST", "/o/1/x", "POST /o/{}/x"},
		{"/o/:id/x/*rest", "POST", "/o/1/x/y", "POST /o/:/x/*"},
		{"/v1/*", "POST", "/v1/x", "POST /v1/*"},
		{"/v1/orders:cancel", "POST", "/v1/orders:cancel", "POST /v1/orders:cancel"},
		{"/broken/{id", "POST", "/broken/1", "POST /broken/{"},
	} {
		r := httptest.NewRequest(tt.method, tt.target, nil)
		r.Pattern = tt.pattern
		if got := server.OperationOf(r); got != tt.want {
			t.Errorf("operation of %s %s on %q = %q, want %q", tt.method, tt.target, tt.pattern, got, tt.want)
		}
	}
}

// The pattern is what net/http's mux sets it to.
func TestOperationOfMux(t *testing.T) {
	t.Parallel()
	var got string
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders/{id}/pay", func(_ http.ResponseWriter, r *http.Request) { got = server.OperationOf(r) })
	mux.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/orders/1/pay", nil))
	if got != "POST /orders/{}/pay" {
		t.Errorf("operation %q", got)
	}
}

func TestScope(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	seen := map[string]string{}
	for _, tt := range []struct{ tenant, operation string }{
		{"acme", "POST /charges"},
		{"acmeP", "OST /charges"},
		{"acme", "PATCH /charges"},
		{"other", "POST /charges"},
		{"", "4:acmePOST /charges"},
		{"1:a", "b"},
		{"1", ":ab"},
		{long, "POST /charges"},
		{long + "x", "POST /charges"},
		{"acme", long},
		{"a\x00", "POST /charges"},
		{"a\xff", "POST /charges"},
	} {
		key := server.StoreKey(tt.tenant, tt.operation, "k")
		s := key.Scope
		if err := key.Validate(); err != nil {
			t.Errorf("scope of %q, %q: %v", tt.tenant, tt.operation, err)
		}
		name := tt.tenant + " | " + tt.operation
		if other, ok := seen[s]; ok {
			t.Errorf("%q and %q have one scope, %q", name, other, s)
		}
		seen[s] = name
	}
	if got := server.StoreKey("acme", "POST /charges", "k").Scope; got != "4:acmePOST /charges" {
		t.Errorf("scope %q is not what is stored by now", got)
	}
}
