package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/gin-gonic/gin"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

func TestMain(m *testing.M) {
	gin.SetMode(gin.TestMode) // it logs its routes otherwise
	os.Exit(m.Run())
}

// post sends a request with the key "k" to h.
func post(h http.Handler, target, tenant, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", target, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", "k")
	r.Header.Set("X-Tenant", tenant)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func replayed(w *httptest.ResponseRecorder) bool {
	return w.Header().Get("Idempotent-Replayed") == "true"
}

// onFrameworks runs a test with the endpoint of each framework.
func onFrameworks(t *testing.T, test func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler)) {
	for _, f := range frameworks {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			test(t, f.target, f.routes)
		})
	}
}

func TestRepeatedRequest(t *testing.T) {
	t.Parallel()
	onFrameworks(t, func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler) {
		var b bank
		h := routes(newGuard(memstore.New()), &b)
		first := post(h, target, "acme", body)
		var got receipt
		if err := json.Unmarshal(first.Body.Bytes(), &got); err != nil {
			t.Fatalf("answer %d %s: %v", first.Code, first.Body, err)
		}
		if first.Code/100 != 2 || replayed(first) || got != (receipt{"42", 1, 1999}) {
			t.Errorf("answer %d %s", first.Code, first.Body)
		}
		again := post(h, target, "acme", `{"amount":1999, "account":"42"}`)
		if again.Code != first.Code || again.Body.String() != first.Body.String() || !replayed(again) ||
			again.Header().Get("Content-Type") != first.Header().Get("Content-Type") {
			t.Errorf("replay %d %s %v", again.Code, again.Body, again.Header())
		}
		if n := b.count("42"); n != 1 {
			t.Errorf("%d charges", n)
		}
		if w := post(h, target, "other", body); w.Code/100 != 2 || replayed(w) {
			t.Errorf("another tenant: %d %s", w.Code, w.Body)
		}
	})
}

// A handler's refusal, in each framework's own way, is an answer like others.
func TestRefusal(t *testing.T) {
	t.Parallel()
	onFrameworks(t, func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler) {
		var b bank
		h := routes(newGuard(memstore.New()), &b)
		first, again := post(h, target, "acme", `{"account":"42","amount":0}`), post(h, target, "acme", `{"account":"42","amount":0}`)
		if first.Code/100 != 4 || !strings.Contains(first.Body.String(), "nothing to charge") {
			t.Errorf("answer %d %s", first.Code, first.Body)
		}
		if again.Code != first.Code || again.Body.String() != first.Body.String() || !replayed(again) {
			t.Errorf("replay %d %s", again.Code, again.Body)
		}
	})
}

// The guard's own answers: no key, and a key that was used for something else.
func TestProblems(t *testing.T) {
	t.Parallel()
	onFrameworks(t, func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler) {
		var b bank
		h := routes(newGuard(memstore.New()), &b)
		post(h, target, "acme", body)
		reused := post(h, target, "acme", `{"account":"42","amount":1}`)
		if reused.Code/100 != 4 || !strings.Contains(reused.Body.String(), server.TypeKeyReused) {
			t.Errorf("answer %d %s", reused.Code, reused.Body)
		}
		if w := post(h, target, "", body); w.Code != 401 {
			t.Errorf("no tenant: %d %s", w.Code, w.Body)
		}
		if n := b.count("42"); n != 1 {
			t.Errorf("%d charges", n)
		}
	})
}

// One key on another account's path is another request of the same operation,
// so the routes' patterns reach the guard.
func TestPattern(t *testing.T) {
	t.Parallel()
	onFrameworks(t, func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler) {
		if target == chargeProcedure {
			t.Skip("a procedure's path has no parameters")
		}
		var b bank
		h := routes(newGuard(memstore.New()), &b)
		post(h, target, "acme", body)
		if w := post(h, "/accounts/43/charges", "acme", body); w.Code != 422 || b.count("43") != 0 {
			t.Errorf("answer %d %s", w.Code, w.Body)
		}
	})
}

// A transaction that lost a race runs its handler again, in every framework.
func TestTransactionRunsAgain(t *testing.T) {
	t.Parallel()
	onFrameworks(t, func(t *testing.T, target string, routes func(*server.Guard, *bank) http.Handler) {
		var b bank
		guard := newGuard(&racing{Store: memstore.New()}).With(func(o *server.Options) { o.Mode = dedup.Transaction })
		w := post(routes(guard, &b), target, "acme", body)
		var got receipt
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("answer %d %s: %v", w.Code, w.Body, err)
		}
		if w.Code/100 != 2 || got != (receipt{"42", 2, 1999}) { // this bank can't roll back, so it shows
			t.Errorf("answer %d %s", w.Code, w.Body)
		}
	})
}

// racing is a store whose first transaction loses a race when it commits.
type racing struct {
	dedup.Store
	commits atomic.Int64
}

func (s *racing) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	res, err := s.Claim(ctx, c)
	if err != nil || res.State != dedup.Won {
		return nil, res, err
	}
	return &racingTx{s, c}, res, nil
}

type racingTx struct {
	s *racing
	c dedup.Claim
}

func (tx *racingTx) Context(ctx context.Context) context.Context { return ctx }

func (tx *racingTx) Commit(ctx context.Context, done dedup.Completion) error {
	if tx.s.commits.Add(1) == 1 {
		if err := tx.Rollback(ctx); err != nil {
			return err
		}
		return dedup.ErrSerialization
	}
	return tx.s.Complete(ctx, tx.c.Key, tx.c.Token, done)
}

func (tx *racingTx) Rollback(ctx context.Context) error {
	return tx.s.Release(ctx, tx.c.Key, tx.c.Token)
}

// A client of Connect gets the answer, its repetition, and errors that it
// understands.
func TestConnectClient(t *testing.T) {
	t.Parallel()
	var b bank
	srv := httptest.NewServer(connectRoutes(newGuard(memstore.New()), &b))
	defer srv.Close()
	// As JSON, of which the guard ignores order and white space. Protobuf's binary
	// form writes maps in random order, so there a retry has to send the same bytes.
	client := connect.NewClient[structpb.Struct, structpb.Struct](srv.Client(), srv.URL+chargeProcedure, connect.WithProtoJSON())
	call := func(amount int) (*connect.Response[structpb.Struct], error) {
		msg, err := structpb.NewStruct(map[string]any{"account": "42", "amount": amount})
		if err != nil {
			t.Fatal(err)
		}
		r := connect.NewRequest(msg)
		r.Header().Set("Idempotency-Key", "k")
		r.Header().Set("X-Tenant", "acme")
		return client.CallUnary(t.Context(), r)
	}
	for i := range 2 {
		res, err := call(1999)
		if err != nil {
			t.Fatal(err)
		}
		if n := res.Msg.GetFields()["number"].GetNumberValue(); n != 1 || (res.Header().Get("Idempotent-Replayed") == "true") != (i == 1) {
			t.Errorf("answer %d: %v %v", i, res.Msg, res.Header())
		}
	}
	if _, err := call(1); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("another request with the key: %v", err)
	}
}

// Handlers for net/http go behind gin's and echo's own wrappers.
func TestPlainHandlers(t *testing.T) {
	t.Parallel()
	for name, routes := range map[string]func(*server.Guard, *bank) http.Handler{"gin": ginRoutes, "echo": echoRoutes} {
		h := routes(newGuard(memstore.New()), new(bank))
		first, again := post(h, "/ping", "acme", ""), post(h, "/ping", "acme", "")
		if first.Body.String() != "pong" || again.Body.String() != "pong" || replayed(first) || !replayed(again) {
			t.Errorf("%s: %d %s, %d %s", name, first.Code, first.Body, again.Code, again.Body)
		}
	}
}
