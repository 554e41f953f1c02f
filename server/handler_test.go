package server_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/internal/operation"
	"github.com/effectonce/idempotency/server"
)

func created(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Location", "/charges/1")
	w.WriteHeader(http.StatusCreated)
	io.WriteString(w, `{"id":1}`)
}

func TestReplay(t *testing.T) {
	t.Parallel()
	for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
		h := counted(created)
		g := server.New(newFakeTx(), with(func(o *server.Options) { o.Mode = mode })).Handler(h)

		first := do(g, post("k", `{"a":1,"b":2}`))
		again := do(g, post(`"k"`, `{"b":2, "a":1}`))
		if first.StatusCode != 201 || bodyOf(t, first) != `{"id":1}` || replayed(first) {
			t.Errorf("first answer %d %v", first.StatusCode, first.Header)
		}
		if again.StatusCode != 201 || bodyOf(t, again) != `{"id":1}` || !replayed(again) || again.Header.Get("Location") != "/charges/1" {
			t.Errorf("replay %d %v", again.StatusCode, again.Header)
		}
		h.want(t, 1)
	}
}

func TestUnguarded(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		opts server.Options
		r    func() *http.Request
	}{
		{"no key", single, func() *http.Request { return post("", "x") }},
		{"method", single, func() *http.Request {
			r := httptest.NewRequest("PUT", "/charges", nil)
			r.Header.Set("Idempotency-Key", "k")
			return r
		}},
		{"method, key required", with(func(o *server.Options) { o.Required = true }),
			func() *http.Request { return httptest.NewRequest("GET", "/charges", nil) }},
		{"method, malformed key", single, func() *http.Request {
			r := httptest.NewRequest("GET", "/charges", nil)
			r.Header.Set("Idempotency-Key", `"`)
			return r
		}},
		{"methods given", with(func(o *server.Options) { o.Methods = []string{"PUT"} }), func() *http.Request { return post("k", "x") }},
		{"header given", with(func(o *server.Options) { o.Header = "x-request-id" }), func() *http.Request { return post("k", "x") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(created)
			g := server.New(memstore.New(), tt.opts).Handler(h)
			do(g, tt.r())
			if res := do(g, tt.r()); res.StatusCode != 201 || replayed(res) {
				t.Errorf("answer %d %v", res.StatusCode, res.Header)
			}
			h.want(t, 2)
		})
	}
}

func TestGuarded(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		opts server.Options
		r    func() *http.Request
	}{
		{"PATCH", single, func() *http.Request {
			r := httptest.NewRequest("PATCH", "/charges/1", strings.NewReader("x"))
			r.Header.Set("Idempotency-Key", "k")
			return r
		}},
		{"no body", single, func() *http.Request {
			r := httptest.NewRequest("POST", "/charges", nil)
			r.Header.Set("Idempotency-Key", "k")
			return r
		}},
		{"methods given", with(func(o *server.Options) { o.Methods = []string{"PUT"} }), func() *http.Request {
			r := httptest.NewRequest("PUT", "/charges", nil)
			r.Header.Set("Idempotency-Key", "k")
			return r
		}},
		{"header given", with(func(o *server.Options) { o.Header = "x-request-id" }), func() *http.Request {
			r := post("", "x")
			r.Header.Set("X-Request-Id", "k")
			return r
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(created)
			g := server.New(memstore.New(), tt.opts).Handler(h)
			do(g, tt.r())
			if res := do(g, tt.r()); res.StatusCode != 201 || !replayed(res) {
				t.Errorf("answer %d %v", res.StatusCode, res.Header)
			}
			h.want(t, 1)
		})
	}
}

// Requests that are refused before anything is claimed.
func TestRefused(t *testing.T) {
	t.Parallel()
	manyKeys := post("k", "x")
	manyKeys.Header.Add("Idempotency-Key", "l")
	drained := post("k", "x")
	drained.Body = http.NoBody
	parsed := post("k", "a=1")
	parsed.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if err := parsed.ParseForm(); err != nil {
		t.Fatal(err)
	}
	parsed.ContentLength = -1 // came in chunks
	multi := post("k", "--b\r\nContent-Disposition: form-data; name=f; filename=g\r\n\r\nx\r\n--b--\r\n")
	multi.Header.Set("Content-Type", "multipart/form-data; boundary=b")
	if err := multi.ParseMultipartForm(1000); err != nil {
		t.Fatal(err)
	}
	multi.ContentLength = -1
	slow := post("k", "")
	slow.Body, slow.ContentLength = io.NopCloser(failing{fmt.Errorf("read: %w", os.ErrDeadlineExceeded)}), 1
	large := post("k", strings.Repeat("x", 11))
	chunked := post("k", strings.Repeat("x", 11))
	chunked.ContentLength = -1
	broken := post("k", "")
	broken.Body, broken.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader("x"), failing{io.ErrUnexpectedEOF})), -1

	for _, tt := range []struct {
		name   string
		opts   func(o *server.Options)
		r      *http.Request
		status int
		typ    string
	}{
		{"no key", func(o *server.Options) { o.Required = true }, post("", "x"), 400, server.TypeKeyMissing},
		{"malformed key", nil, post(`"`, "x"), 400, server.TypeKeyInvalid},
		{"long key", nil, post(strings.Repeat("k", 256), "x"), 400, server.TypeKeyInvalid},
		{"keys that differ", nil, manyKeys, 400, server.TypeKeyInvalid},
		{"large body", func(o *server.Options) { o.MaxRequestBody = 10 }, large, 413, server.TypeBodyTooLarge},
		{"large body of unknown length", func(o *server.Options) { o.MaxRequestBody = 10 }, chunked, 413, server.TypeBodyTooLarge},
		{"broken body", nil, broken, 400, server.TypeBodyUnreadable},
		{"slow body", nil, slow, 408, server.TypeBodyUnreadable},
		{"body read before", nil, drained, 500, server.TypeMisconfigured},
		{"form read before", nil, parsed, 500, server.TypeMisconfigured},
		{"files read before", nil, multi, 500, server.TypeMisconfigured},
		{"no tenant", func(o *server.Options) { o.Scope = func(*http.Request) (string, error) { return "", nil } },
			post("k", "x"), 500, server.TypeScopeUnknown},
		{"tenant fails", func(o *server.Options) {
			o.Scope = func(*http.Request) (string, error) { return "a", errors.New("no") }
		},
			post("k", "x"), 500, server.TypeScopeUnknown},
		{"tenant is refused", func(o *server.Options) {
			o.Scope = func(*http.Request) (string, error) {
				return "", fmt.Errorf("who: %w", &server.Problem{Type: "about:blank", Status: 401, Title: "Unauthorized"})
			}
		}, post("k", "x"), 401, "about:blank"},
		{"fingerprint fails", func(o *server.Options) {
			o.Fingerprint = func(*http.Request, []byte) ([]byte, error) { return nil, errors.New("no") }
		}, post("k", "x"), 400, server.TypeBodyUnreadable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(created)
			opts := single
			if tt.opts != nil {
				tt.opts(&opts)
			}
			store := &claims{Store: memstore.New()}
			wantProblem(t, do(server.New(store, opts).Handler(h), tt.r), tt.status, tt.typ)
			h.want(t, 0)
			if n := store.n.Load(); n != 0 {
				t.Errorf("%d claims", n)
			}
		})
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// claims counts claims.
type claims struct {
	dedup.Store
	n atomic.Int64
}

func (s *claims) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	s.n.Add(1)
	return s.Store.Claim(ctx, c)
}

// A body of exactly the limit passes, and reaches the handler whole.
func TestRequestBody(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 511, 512, 513, 100_000} {
		for _, known := range []bool{true, false} {
			body := strings.Repeat("x", size)
			h := counted(func(w http.ResponseWriter, r *http.Request) {
				got, err := io.ReadAll(r.Body)
				if err != nil || string(got) != body {
					t.Errorf("the handler read %d bytes of %d: %v", len(got), size, err)
				}
				if err := r.Body.Close(); err != nil {
					t.Error(err)
				}
			})
			g := server.New(memstore.New(), with(func(o *server.Options) { o.MaxRequestBody = int64(max(size, 1)) })).Handler(h)
			r := post("k", body)
			if !known {
				r.ContentLength = -1
			}
			do(g, r)
			h.want(t, 1)
		}
	}
}

func TestKeyReuse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(r *http.Request)
	}{
		{"query", func(r *http.Request) { r.URL.RawQuery = "x=1"; r.RequestURI += "?x=1" }},
		{"media type", func(r *http.Request) { r.Header.Set("Content-Type", "text/plain") }},
		{"content encoding", func(r *http.Request) { r.Header.Set("Content-Encoding", "gzip") }},
		{"body", func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader(`{"a":2}`)), 7 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			running, finish := make(chan struct{}), make(chan struct{})
			h := counted(func(w http.ResponseWriter, r *http.Request) {
				close(running)
				<-finish
				created(w, r)
			})
			g := server.New(memstore.New(), single).Handler(h)
			var wg sync.WaitGroup
			wg.Go(func() { do(g, post("k", `{"a":1}`)) })
			<-running

			other := post("k", `{"a":1}`)
			tt.change(other)
			wantProblem(t, do(g, other), 422, server.TypeKeyReused) // also while the first one runs
			close(finish)
			wg.Wait()
			other = post("k", `{"a":1}`)
			tt.change(other)
			wantProblem(t, do(g, other), 422, server.TypeKeyReused)
			h.want(t, 1)
		})
	}
}

func TestInProgress(t *testing.T) {
	t.Parallel()
	running, finish := make(chan struct{}), make(chan struct{})
	h := counted(func(w http.ResponseWriter, r *http.Request) {
		close(running)
		<-finish
		created(w, r)
	})
	guard := server.New(memstore.New(), single)
	g := guard.Handler(h)
	var wg sync.WaitGroup
	wg.Go(func() { do(g, post("k", "x")) })
	<-running
	res := do(g, post("k", "x"))
	wantProblem(t, res, 409, server.TypeInProgress)
	if after := res.Header.Get("Retry-After"); after != "1" {
		t.Errorf("Retry-After %q", after)
	}
	// One that waits gets the answer.
	waiting := guard.With(func(o *server.Options) { o.Wait = time.Minute }).Handler(h)
	wg.Go(func() {
		if res := do(waiting, post("k", "x")); res.StatusCode != 201 || !replayed(res) {
			t.Errorf("after waiting: %d %v", res.StatusCode, res.Header)
		}
	})
	close(finish)
	wg.Wait()
	h.want(t, 1)
}

func TestConcurrentDuplicates(t *testing.T) {
	t.Parallel()
	h := counted(created)
	g := server.New(memstore.New(), single).Handler(h)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			res := do(g, post("k", "x"))
			if res.StatusCode != 201 && res.StatusCode != 409 {
				t.Errorf("status %d", res.StatusCode)
			}
		})
	}
	wg.Wait()
	h.want(t, 1)
}

func TestScopes(t *testing.T) {
	t.Parallel()
	h := counted(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Header.Get("Tenant"), r.URL)
	})
	guard := server.New(memstore.New(), server.Options{
		Scope: func(r *http.Request) (string, error) { return r.Header.Get("Tenant"), nil },
	})
	mux := http.NewServeMux()
	mux.Handle("POST /charges", guard.Handler(h))
	mux.Handle("POST /refunds", guard.Handler(h))
	mux.Handle("PATCH /charges", guard.Handler(h))
	mux.Handle("POST /orders/{id}/pay", guard.Handler(h))
	request := func(method, target, tenant string) *http.Response {
		r := httptest.NewRequest(method, target, nil)
		r.Header.Set("Idempotency-Key", "k")
		r.Header.Set("Tenant", tenant)
		return do(mux, r)
	}
	for _, tt := range []struct{ method, target, tenant string }{
		{"POST", "/charges", "a"}, {"POST", "/charges", "b"}, {"POST", "/refunds", "a"}, {"PATCH", "/charges", "a"},
		{"POST", "/orders/1/pay", "a"},
	} {
		for _, again := range []bool{false, true} {
			res := request(tt.method, tt.target, tt.tenant)
			if got := bodyOf(t, res); got != tt.tenant+" "+tt.target || replayed(res) != again {
				t.Errorf("%+v: answer %q, replayed %t, want %t", tt, got, replayed(res), again)
			}
		}
	}
	// The same operation on something else is another request.
	wantProblem(t, request("POST", "/orders/2/pay", "a"), 422, server.TypeKeyReused)

	// A deploy that renames a wildcard keeps the keys alive.
	renamed := http.NewServeMux()
	renamed.Handle("POST /orders/{order}/pay", guard.Handler(h))
	r := httptest.NewRequest("POST", "/orders/1/pay", nil)
	r.Header.Set("Idempotency-Key", "k")
	r.Header.Set("Tenant", "a")
	if res := do(renamed, r); !replayed(res) {
		t.Errorf("after renaming a wildcard: %d %v", res.StatusCode, res.Header)
	}
	h.want(t, 5)
}

// The guard may also stand before the router.
func TestAroundMux(t *testing.T) {
	t.Parallel()
	h := counted(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.PathValue("id")) })
	mux := http.NewServeMux()
	mux.Handle("POST /orders/{id}/pay", h)
	g := server.New(memstore.New(), single).Handler(mux)
	for _, id := range []string{"1", "2"} {
		for _, again := range []bool{false, true} {
			r := httptest.NewRequest("POST", "/orders/"+id+"/pay", nil)
			r.Header.Set("Idempotency-Key", "k")
			if res := do(g, r); bodyOf(t, res) != id || replayed(res) != again {
				t.Errorf("order %s: %d %v", id, res.StatusCode, res.Header)
			}
		}
	}
	h.want(t, 2)
}

func TestOperationOption(t *testing.T) {
	t.Parallel()
	h := counted(created)
	guard := server.New(memstore.New(), with(func(o *server.Options) {
		o.Operation = "charge"
		o.Fingerprint = func(_ *http.Request, body []byte) ([]byte, error) { return body, nil }
	}))
	old, renamed := httptest.NewRequest("POST", "/charge", nil), httptest.NewRequest("POST", "/v2/charges", nil)
	for i, r := range []*http.Request{old, renamed} {
		r.Header.Set("Idempotency-Key", "k")
		if res := do(guard.Handler(h), r); res.StatusCode != 201 || replayed(res) != (i == 1) {
			t.Errorf("%s: %d %v", r.URL, res.StatusCode, res.Header)
		}
	}
	wantProblem(t, do(guard.Handler(h), post("k", "x")), 422, server.TypeKeyReused)
	h.want(t, 1)
}

func TestStoreDown(t *testing.T) {
	t.Parallel()
	for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
		h := counted(created)
		res := do(server.New(down{}, with(func(o *server.Options) { o.Mode = mode })).Handler(h), post("k", "x"))
		wantProblem(t, res, 503, server.TypeUnavailable)
		if res.Header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		h.want(t, 0)
	}
}

type down struct{ dedup.TxStore }

func (down) Claim(context.Context, dedup.Claim) (dedup.Result, error) {
	return dedup.Result{}, dedup.ErrBusy
}

func (down) Begin(context.Context, dedup.Claim) (dedup.Tx, dedup.Result, error) {
	return nil, dedup.Result{}, dedup.ErrBusy
}

func TestMisconfigured(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		store dedup.Store
		opts  server.Options
	}{
		{"no store", nil, single},
		{"no scope", memstore.New(), server.Options{}},
		{"no transactions", memstore.New(), with(func(o *server.Options) { o.Mode = dedup.Transaction })},
		{"recovery without function", memstore.New(), with(func(o *server.Options) { o.Abandoned = dedup.Recover })},
		{"negative time", memstore.New(), with(func(o *server.Options) { o.TTL = -1 })},
		{"negative size", memstore.New(), with(func(o *server.Options) { o.MaxStoredResponse = -1 })},
		{"negative size of request", memstore.New(), with(func(o *server.Options) { o.MaxRequestBody = -1 })},
		{"header", memstore.New(), with(func(o *server.Options) { o.Header = "a b" })},
		{"method", memstore.New(), with(func(o *server.Options) { o.Methods = []string{""} })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := counted(created)
			guard := server.New(tt.store, tt.opts)
			if err := guard.Validate(); err == nil || !strings.HasPrefix(err.Error(), "server: ") {
				t.Errorf("Validate() = %v", err)
			}
			wantProblem(t, do(guard.Handler(h), post("k", "x")), 500, server.TypeMisconfigured)
			wantProblem(t, do(guard.Handler(h), post("", "x")), 500, server.TypeMisconfigured)
			h.want(t, 0)
		})
	}
	if err := server.New(memstore.New(), single).Validate(); err != nil {
		t.Errorf("Validate of good options: %v", err)
	}
}

func TestWith(t *testing.T) {
	t.Parallel()
	guard := server.New(memstore.New(), single)
	required := guard.With(func(o *server.Options) { o.Required = true })
	h := counted(created)
	wantProblem(t, do(required.Handler(h), post("", "x")), 400, server.TypeKeyMissing)
	if res := do(guard.Handler(h), post("", "x")); res.StatusCode != 201 {
		t.Errorf("With changed the guard that it was called on: %d", res.StatusCode)
	}
	// They share the store.
	do(guard.Handler(h), post("k", "x"))
	if res := do(required.Handler(h), post("k", "x")); !replayed(res) {
		t.Errorf("answer %d %v", res.StatusCode, res.Header)
	}
}

// What the caller does with the options afterwards is of no consequence.
func TestOptionsAreCopied(t *testing.T) {
	t.Parallel()
	methods := []string{"POST"}
	g := server.New(memstore.New(), with(func(o *server.Options) { o.Methods = methods })).Handler(counted(created))
	methods[0] = "PUT"
	do(g, post("k", "x"))
	if res := do(g, post("k", "x")); !replayed(res) {
		t.Error("the request is not guarded any more")
	}
}

func TestErrorHandler(t *testing.T) {
	t.Parallel()
	guard := server.New(down{}, with(func(o *server.Options) {
		o.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, p *server.Problem) {
			if !errors.Is(p, dedup.ErrBusy) {
				t.Errorf("cause of %v", p)
			}
			http.Error(w, p.Type, http.StatusTeapot)
		}
	}))
	res := do(guard.Handler(counted(created)), post("k", "x"))
	if res.StatusCode != http.StatusTeapot || bodyOf(t, res) != server.TypeUnavailable+"\n" || res.Header.Get("Retry-After") == "" {
		t.Errorf("answer %d %v", res.StatusCode, res.Header)
	}
}

// The client goes away while the handler runs: it runs to its end, and its
// answer is there for the retry.
func TestClientDisconnects(t *testing.T) {
	t.Parallel()
	for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
		running, finish, finished := make(chan struct{}), make(chan struct{}), make(chan struct{})
		h := counted(func(w http.ResponseWriter, r *http.Request) {
			close(running)
			<-finish
			if err := r.Context().Err(); err != nil {
				t.Errorf("the handler's context ended: %v", err)
			}
			if _, err := io.WriteString(w, "done"); err != nil {
				t.Errorf("the handler was told of the client: %v", err)
			}
		})
		gone := make(chan struct{})
		g := server.New(newFakeTx(), with(func(o *server.Options) { o.Mode = mode })).Handler(h)
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("First") != "" {
				go func() { <-r.Context().Done(); close(gone) }()
				defer close(finished)
			}
			g.ServeHTTP(w, r)
		}))
		defer srv.Close()

		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-running; cancel() }()
		first, _ := http.NewRequestWithContext(ctx, "POST", srv.URL, strings.NewReader("x"))
		first.Header.Set("Idempotency-Key", "k")
		first.Header.Set("First", "true")
		if _, err := srv.Client().Do(first); !errors.Is(err, context.Canceled) {
			t.Fatalf("first request: %v", err)
		}
		<-gone // the server has noticed
		close(finish)
		<-finished
		retry, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, strings.NewReader("x"))
		retry.Header.Set("Idempotency-Key", "k")
		res, err := srv.Client().Do(retry)
		if err != nil {
			t.Fatal(err)
		}
		if got := bodyOf(t, res); got != "done" || !replayed(res) {
			t.Errorf("retry: %d %q %v", res.StatusCode, got, res.Header)
		}
		res.Body.Close()
		h.want(t, 1)
	}
}

// A client that waits to be invited to send its body is not, if it will be
// refused.
func TestExpectContinue(t *testing.T) {
	t.Parallel()
	h := counted(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	srv := httptest.NewServer(server.New(memstore.New(), with(func(o *server.Options) { o.MaxRequestBody = 10 })).Handler(h))
	defer srv.Close()
	for _, tt := range []struct {
		key    string
		length int
		want   string
	}{
		{"k", 5, "HTTP/1.1 100 Continue"},
		{"k", 11, "HTTP/1.1 413 Request Entity Too Large"},
		{`"`, 5, "HTTP/1.1 400 Bad Request"},
	} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nIdempotency-Key: %s\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", tt.key, tt.length)
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || strings.TrimSpace(line) != tt.want {
			t.Errorf("%+v: %q, %v", tt, line, err)
		}
	}
}

func TestHandlerContext(t *testing.T) {
	t.Parallel()
	var ids []string
	h := counted(func(_ http.ResponseWriter, r *http.Request) {
		ids = append(ids, operation.From(r.Context()))
		if n := dedup.Attempt(r.Context()); n != 1 {
			t.Errorf("attempt %d", n)
		}
	})
	g := server.New(memstore.New(), with(func(o *server.Options) {
		o.NotExecuted = func(int, http.Header) bool { return true } // so that each request runs
	})).Handler(h)
	for _, key := range []string{"k", "k", "l"} {
		do(g, post(key, "x"))
	}
	if len(ids) != 3 || ids[0] == "" || ids[0] != ids[1] || ids[0] == ids[2] {
		t.Errorf("operations %q", ids)
	}
}

func TestObserver(t *testing.T) {
	t.Parallel()
	var got []string
	g := server.New(memstore.New(), with(func(o *server.Options) {
		o.Observer = func(_ context.Context, e dedup.Event) {
			s := e.Kind.String()
			if e.Kind == dedup.EventClaimed {
				s += " " + e.State.String()
			}
			got = append(got, s)
		}
	})).Handler(counted(created))
	do(g, post("k", "x"))
	do(g, post("k", "x"))
	do(g, post("k", "y"))
	want := []string{"claimed won", "ran", "stored", "claimed completed", "claimed mismatch"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
