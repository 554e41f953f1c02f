package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

func Example() {
	charges := 0
	charge := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		charges++
		w.Header().Set("Location", fmt.Sprint("/charges/", charges))
		w.WriteHeader(http.StatusCreated)
	})
	tenantOf := func(r *http.Request) (string, error) {
		account, _, ok := r.BasicAuth() // which something before the guard has checked
		if !ok {
			return "", errors.New("not authenticated")
		}
		return account, nil
	}

	guard := server.New(memstore.New(), server.Options{Scope: tenantOf})
	if err := guard.Validate(); err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("POST /charges", guard.Handler(charge))

	for _, body := range []string{`{"amount":100,"currency":"EUR"}`, `{"currency":"EUR","amount":100}`, `{"amount":999}`} {
		r := httptest.NewRequest("POST", "/charges", strings.NewReader(body))
		r.SetBasicAuth("acme", "secret")
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", "order-17")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		fmt.Printf("%d %s replayed=%t\n", w.Code, w.Header().Get("Location"), w.Header().Get("Idempotent-Replayed") == "true")
	}
	fmt.Println("charges:", charges)
	// Output:
	// 201 /charges/1 replayed=false
	// 201 /charges/1 replayed=true
	// 422  replayed=false
	// charges: 1
}

// Options differ by route: this one insists on a key, and keeps answers for a
// week.
func ExampleGuard_With() {
	guard := server.New(memstore.New(), server.Options{Scope: server.SingleTenant})
	payouts := guard.With(func(o *server.Options) {
		o.Required = true
		o.TTL = 7 * 24 * time.Hour
	})

	mux := http.NewServeMux()
	mux.Handle("POST /notes", guard.Handler(http.NotFoundHandler()))
	mux.Handle("POST /payouts", payouts.Handler(http.NotFoundHandler()))

	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest("POST", "/payouts", nil))
	fmt.Println(w.Code, w.Body)
	// Output:
	// 400 {"type":"urn:effectonce:idempotency:key-missing","title":"The request needs an idempotency key","status":400,"detail":"Send one in the Idempotency-Key header."}
}

// A process died while it charged a card. The next request with its key finds
// out from the provider what became of it.
func ExampleOptions_recover() {
	store := memstore.New()
	guard := server.New(store, server.Options{
		Scope:     server.SingleTenant,
		Operation: "charge",
		Abandoned: dedup.Recover,
		Recover: func(w http.ResponseWriter, r *http.Request) error {
			// The handler had sent its call with a key that is derived from the
			// operation, so the provider can be asked by it.
			charge, err := findCharge(r.Context())
			if err != nil {
				return err // not known now: the client will ask again
			}
			w.WriteHeader(http.StatusCreated)
			fmt.Fprint(w, charge)
			return nil
		},
	})
	crashed := make(chan struct{})
	go guard.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(crashed)
		select {}
	})).ServeHTTP(httptest.NewRecorder(), chargeRequest())
	<-crashed
	endLease(store) // which time does

	w := httptest.NewRecorder()
	guard.Handler(http.NotFoundHandler()).ServeHTTP(w, chargeRequest())
	fmt.Println(w.Code, w.Body)
	// Output:
	// 201 ch_42
}

func findCharge(context.Context) (string, error) { return "ch_42", nil }

func chargeRequest() *http.Request {
	r := httptest.NewRequest("POST", "/charges", nil)
	r.Header.Set("Idempotency-Key", "k")
	return r
}

func endLease(store dedup.Store) {
	key := server.StoreKey(server.SingleTenantName, "charge", "k")
	rec, err := store.Get(context.Background(), key)
	if err == nil {
		err = store.Renew(context.Background(), key, rec.Token, 0)
	}
	if err != nil {
		fmt.Println(err)
	}
}

// An operator has found out what became of an operation whose outcome was
// unknown, and gives it its answer.
func ExampleResponse() {
	store := memstore.New()
	guard := server.New(store, server.Options{Scope: server.SingleTenant, Operation: "charge"})
	crashed := make(chan struct{})
	go guard.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(crashed)
		select {}
	})).ServeHTTP(httptest.NewRecorder(), chargeRequest())
	<-crashed
	endLease(store) // which time does

	h := guard.Handler(http.NotFoundHandler())
	w := httptest.NewRecorder()
	h.ServeHTTP(w, chargeRequest())
	fmt.Println(w.Code)

	answer := server.Response(http.StatusCreated, http.Header{"Location": {"/charges/42"}}, nil)
	key := server.StoreKey(server.SingleTenantName, "charge", "k")
	if err := store.Resolve(context.Background(), key, &answer, 24*time.Hour); err != nil {
		fmt.Println(err)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, chargeRequest())
	fmt.Println(w.Code, w.Header().Get("Location"))
	// Output:
	// 500
	// 201 /charges/42
}
