package server_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

// answer is a response as it came off the wire.
type answer struct {
	Status   int
	Header   http.Header
	Trailer  http.Header
	Body     string
	Length   int64
	Replayed bool
	Err      error // of reading the body
}

// wire serves h over a real connection and returns how to send it requests.
func wire(t *testing.T, h http.Handler) func(r *http.Request) answer {
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.Start()
	t.Cleanup(srv.Close)
	// One connection a request: net/http repeats requests that carry a key when
	// a kept connection breaks.
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(r *http.Request) answer {
		u := srv.URL + r.URL.RequestURI()
		out, err := http.NewRequestWithContext(r.Context(), r.Method, u, r.Body)
		if err != nil {
			t.Fatal(err)
		}
		out.Header, out.ContentLength = r.Header, r.ContentLength
		res, err := client.Do(out)
		if err != nil {
			return answer{Err: err}
		}
		defer res.Body.Close()
		a := answer{Status: res.StatusCode, Header: res.Header, Length: res.ContentLength, Replayed: replayed(res)}
		b, err := io.ReadAll(res.Body)
		a.Body, a.Err, a.Trailer = string(b), err, res.Trailer
		for _, name := range []string{"Date", "Idempotent-Replayed", "Connection"} {
			a.Header.Del(name)
		}
		return a
	}
}

// What goes over the wire is the same for the first request, for its replay,
// and for the handler without a guard.
func TestWire(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		method string // "": POST
		h      http.HandlerFunc
	}{
		{"implicit 200", "", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }},
		{"nothing at all", "", func(http.ResponseWriter, *http.Request) {}},
		{"headers only", "", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", "1") }},
		{"status only", "", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }},
		{"204", "", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(204)
			if _, err := w.Write([]byte("x")); err != http.ErrBodyNotAllowed {
				t.Errorf("Write after 204: %v", err)
			}
		}},
		{"304", "", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Etag", `"1"`); w.WriteHeader(304) }},
		{"HEAD", "HEAD", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "5")
			if n, err := w.Write([]byte("hello")); n != 5 || err != nil {
				t.Errorf("Write for HEAD: %d, %v", n, err)
			}
		}},
		{"HEAD without looking at it", "HEAD", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "5")
			w.Header().Set("Content-Type", "text/plain")
		}},
		{"304 with the length of what it stands for", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "5")
			w.WriteHeader(304)
		}},
		{"redirect", "", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/done", http.StatusSeeOther) }},
		{"sniffed type", "", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "<!doc")
			io.WriteString(w, "type html>")
		}},
		{"type sniffed from the first piece", "", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "<!doc")
			w.(http.Flusher).Flush()
			io.WriteString(w, "type html>")
		}},
		{"type suppressed", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			io.WriteString(w, "<!doctype html>")
		}},
		{"encoded", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "x")
			io.WriteString(w, "<!doctype html>")
		}},
		{"3 kB of unknown length", "", func(w http.ResponseWriter, _ *http.Request) { w.Write(bytes.Repeat([]byte("x"), 3000)) }},
		{"binary", "", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("\x00\xff\r\n\x80")) }},
		{"lists", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Add("Link", `<a>; rel="x, y"`)
			w.Header().Add("Link", "<b>")
			w.Header().Add("Expires", "Thu, 01 Jan 2026 00:00:00 GMT")
			w.Header().Set("Location", "/1")
			w.Header().Set("Etag", `"1"`)
		}},
		{"status after header changes", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", "1")
			w.WriteHeader(201)
			w.Header().Set("X", "2")
			w.Header().Set("Y", "2")
			w.WriteHeader(500)
			io.WriteString(w, "x")
		}},
		{"content length", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "5")
			io.WriteString(w, "hello")
			if _, err := io.WriteString(w, "x"); err != http.ErrContentLength {
				t.Errorf("Write past Content-Length: %v", err)
			}
		}},
		{"invalid content length", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "many")
			io.WriteString(w, "hello")
		}},
		{"declared trailers", "", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "Sum, x-other")
			w.Header().Add("Trailer", "Unset, Sum")
			io.WriteString(w, "hello")
			w.Header().Set("Sum", "1")
			w.Header().Add("X-Other", "2")
			w.Header().Add("X-Other", "3, 4")
			w.Header().Set("Late", "not declared")
		}},
		{"flushed trailers", "", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "hello")
			w.(http.Flusher).Flush()
			w.Header().Set(http.TrailerPrefix+"Sum", "1")
		}},
	} {
		for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
			t.Run(fmt.Sprint(tt.name, " ", mode), func(t *testing.T) {
				t.Parallel()
				h := counted(tt.h)
				guard := server.New(newFakeTx(), with(func(o *server.Options) {
					o.Mode, o.Methods = mode, []string{"POST", "HEAD"}
				}))
				send, bare := wire(t, guard.Handler(h)), wire(t, tt.h)
				method := tt.method
				if method == "" {
					method = "POST"
				}
				request := func() *http.Request {
					r := httptest.NewRequest(method, "/charges", nil)
					r.Header.Set("Idempotency-Key", "k")
					return r
				}
				want := bare(request())
				first, again := send(request()), send(request())
				if mode == dedup.Transaction && strings.HasPrefix(tt.name, "type sniffed") {
					want.Header.Set("Content-Type", "text/html; charset=utf-8") // there is only one piece
				}
				want.Length, first.Length, again.Length = 0, 0, 0 // how it is framed is up to the connection
				for _, a := range []*answer{&want, &first, &again} {
					a.Header.Del("Content-Length")
				}
				if diff := cmp.Diff(want, first, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("first answer (-bare +guarded):\n%s", diff)
				}
				if !again.Replayed {
					t.Error("second answer is no replay")
				}
				again.Replayed = false
				if diff := cmp.Diff(first, again, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("replay (-first +replay):\n%s", diff)
				}
				h.want(t, 1)
			})
		}
	}
}

// net/http sends trailers with a prefix only after a flush. The guard knows
// them in time even if there was none, as in transaction mode.
func TestTrailersInTransaction(t *testing.T) {
	t.Parallel()
	send := wire(t, server.New(newFakeTx(), with(func(o *server.Options) { o.Mode = dedup.Transaction })).
		Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "hello")
			w.Header().Set(http.TrailerPrefix+"Sum", "1")
		})))
	for range 2 {
		if a := send(post("k", "x")); a.Trailer.Get("Sum") != "1" || a.Body != "hello" {
			t.Errorf("answer %+v", a)
		}
	}
}

// Headers that were there before the guard belong to the other response; those
// of connections and cookies to nobody else.
func TestHeadersNotStored(t *testing.T) {
	t.Parallel()
	guard := server.New(memstore.New(), with(func(o *server.Options) {
		o.DropHeaders = append(server.DefaultDropHeaders(), "x-internal")
	}))
	inner := guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		if h.Get("X-Request-Id") == "" {
			t.Error("the handler does not see the headers that were set before")
		}
		h.Add("Vary", "Accept")
		h.Del("X-Powered-By")
		h.Set("Cache-Control", "private")
		h.Add("Set-Cookie", "a=1")
		h.Add("Set-Cookie", "b=2")
		h.Set("X-Internal", "1")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Keep-Alive", "1")
		h.Set("Date", "Thu, 01 Jan 2026 00:00:00 GMT")
		h.Set("Idempotent-Replayed", "false")
		h.Set("Kept", "1")
	}))
	id := 0
	g := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id++
		w.Header().Set("X-Request-Id", fmt.Sprint(id))
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.Header().Set("Vary", "Origin")
		w.Header().Set("X-Powered-By", "outer")
		w.Header().Set("Cache-Control", "no-store")
		inner.ServeHTTP(w, r)
	})
	request := func(origin string) *http.Response {
		r := post("k", "x")
		r.Header.Set("Origin", origin)
		return do(g, r)
	}
	first, again := request("a"), request("b")
	want := http.Header{
		"X-Request-Id": {"1"}, "Access-Control-Allow-Origin": {"a"}, "Vary": {"Origin", "Accept"}, "Cache-Control": {"private"},
		"Set-Cookie": {"a=1", "b=2"}, "X-Internal": {"1"}, "Connection": {"X-Hop"}, "X-Hop": {"1"}, "Keep-Alive": {"1"},
		"Date": {"Thu, 01 Jan 2026 00:00:00 GMT"}, "Idempotent-Replayed": {"false"}, "Kept": {"1"},
	}
	if diff := cmp.Diff(want, first.Header, ignoreEmptyValues); diff != "" {
		t.Errorf("first answer:\n%s", diff)
	}
	want = http.Header{
		"X-Request-Id": {"2"}, "Access-Control-Allow-Origin": {"b"}, "Vary": {"Origin", "Accept"}, "Cache-Control": {"private"},
		"Idempotent-Replayed": {"true"}, "Kept": {"1"},
	}
	if diff := cmp.Diff(want, again.Header, ignoreEmptyValues); diff != "" {
		t.Errorf("replay:\n%s", diff)
	}
}

var ignoreEmptyValues = cmpopts.IgnoreMapEntries(func(_ string, v []string) bool { return len(v) == 0 })

func TestTombstone(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 1000) + strings.Repeat("y", 500)
	for _, tt := range []struct {
		name string
		h    func(w http.ResponseWriter)
	}{
		{"written at once", func(w http.ResponseWriter) { io.WriteString(w, large) }},
		{"written in pieces", func(w http.ResponseWriter) {
			for i := 0; i < len(large); i += 100 {
				w.Write([]byte(large[i : i+100]))
			}
		}},
		{"streamed", func(w http.ResponseWriter) {
			io.WriteString(w, large[:10])
			w.(http.Flusher).Flush()
			io.WriteString(w, large[10:])
			io.WriteString(w, "")
		}},
	} {
		for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
			t.Run(fmt.Sprint(tt.name, " ", mode), func(t *testing.T) {
				t.Parallel()
				h := counted(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Location", "/charges/1")
					w.Header().Set("Etag", `"7"`)
					w.Header().Set("X-Other", "1")
					w.WriteHeader(201)
					tt.h(w)
				})
				guard := server.New(newFakeTx(), with(func(o *server.Options) { o.Mode, o.MaxStoredResponse = mode, 1000 }))
				send := wire(t, guard.Handler(h))
				if a := send(post("k", "x")); a.Status != 201 || a.Body != large || a.Err != nil || a.Header.Get("X-Other") != "1" {
					t.Errorf("first answer %d, %d bytes, %v", a.Status, len(a.Body), a.Err)
				}
				for range 2 {
					res := do(guard.Handler(h), post("k", "x"))
					if !replayed(res) || res.Header.Get("Location") != "/charges/1" || res.Header.Get("Etag") != `"7"` || res.Header.Get("X-Other") != "" {
						t.Errorf("later answer has headers %v", res.Header)
					}
					body := bodyOf(t, res)
					res.Body = io.NopCloser(strings.NewReader(body))
					wantProblem(t, res, 410, server.TypeResponseGone)
					if !strings.Contains(body, `"original_status":201`) {
						t.Errorf("problem %s", body)
					}
				}
				h.want(t, 1)
			})
		}
	}
}

// What fits exactly is kept; headers count by themselves.
func TestStoredResponseLimit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		body, header int
		kept         bool
	}{{1000, 0, true}, {1001, 0, false}, {1000, 900, true}, {0, 1001, false}} {
		h := counted(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("h", tt.header))
			w.Header().Set("Location", strings.Repeat("l", tt.header))
			w.Header()["Content-Type"] = nil
			io.WriteString(w, strings.Repeat("x", tt.body))
		})
		if tt.kept {
			h.h = func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("X", strings.Repeat("h", tt.header))
				io.WriteString(w, strings.Repeat("x", tt.body))
			}
		}
		g := server.New(memstore.New(), with(func(o *server.Options) { o.MaxStoredResponse = 1000 })).Handler(h)
		do(g, post("k", "x"))
		res := do(g, post("k", "x"))
		if kept := res.StatusCode == 200; kept != tt.kept {
			t.Errorf("%+v: later answer %d", tt, res.StatusCode)
		}
		if len(res.Header.Get("Location")) > 1000 {
			t.Error("a tombstone has headers over the limit")
		}
		h.want(t, 1)
	}
}

// An answer that is shorter than it said is broken for the first client, and is
// not passed on as if it were whole.
func TestIncompleteAnswer(t *testing.T) {
	t.Parallel()
	h := counted(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		w.WriteHeader(201)
		io.WriteString(w, "half")
	})
	send := wire(t, server.New(memstore.New(), single).Handler(h))
	if a := send(post("k", "x")); a.Err == nil {
		t.Errorf("first answer %+v", a)
	}
	if a := send(post("k", "x")); a.Status != 410 || a.Err != nil {
		t.Errorf("second answer %+v", a)
	}
	h.want(t, 1)
}

func TestPanic(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		h     func(w http.ResponseWriter)
		abort bool // the first client sees its connection cut
	}{
		{"before anything", func(http.ResponseWriter) { panic("boom") }, false},
		{"after writing", func(w http.ResponseWriter) { w.WriteHeader(201); io.WriteString(w, "half"); panic("boom") }, false},
		{"invalid status", func(w http.ResponseWriter) { w.WriteHeader(42) }, false},
		{"abort", func(w http.ResponseWriter) { io.WriteString(w, "half"); panic(http.ErrAbortHandler) }, true},
	} {
		for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
			t.Run(fmt.Sprint(tt.name, " ", mode), func(t *testing.T) {
				t.Parallel()
				h := counted(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("X-Half", "1")
					tt.h(w)
				})
				var logged lines
				store := newFakeTx()
				send := wire(t, server.New(store, with(func(o *server.Options) {
					o.Mode, o.Logger = mode, slog.New(slog.NewTextHandler(&logged, nil))
				})).Handler(h))
				for i := range 2 {
					a := send(post("k", "x"))
					wantCut := tt.abort && (i == 0 || mode == dedup.Transaction)
					if (a.Err != nil) != wantCut {
						t.Fatalf("answer %d: %+v", i, a)
					}
					if !wantCut && (a.Status != 500 || !strings.Contains(a.Body, server.TypePanic) || a.Header.Get("X-Half") != "") {
						t.Errorf("answer %d: %+v", i, a)
					}
				}
				// A panic may come after the effect. Only a transaction undoes it.
				if mode == dedup.Lease {
					h.want(t, 1)
				} else {
					h.want(t, 2)
					store.wantTx(t, 0, 2)
				}
				if stack := strings.Contains(logged.String(), "capture_test.go"); stack == tt.abort {
					t.Errorf("log %s", logged.String())
				}
			})
		}
	}
}

// A panic in a stream: the client sees it end, and is told on the next try.
func TestPanicInStream(t *testing.T) {
	t.Parallel()
	h := counted(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json") // what the guard's answer will have
		w.Header().Set("X-Stream", "1")
		io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic("boom")
	})
	send := wire(t, server.New(memstore.New(), single).Handler(h))
	if a := send(post("k", "x")); a.Err == nil || a.Body != "half" {
		t.Errorf("first answer %+v", a)
	}
	a := send(post("k", "x"))
	if a.Status != 500 || !a.Replayed || a.Header.Get("Content-Type") != "application/problem+json" || a.Header.Get("X-Stream") != "" {
		t.Errorf("second answer %+v", a)
	}
	h.want(t, 1)
}

// lines is a log that may be written to and read at once.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Without a logger a panic is reported where net/http reports it.
func TestPanicIsNotSilent(t *testing.T) {
	t.Parallel()
	var logged lines
	srv := httptest.NewUnstartedServer(server.New(memstore.New(), single).Handler(
		http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })))
	srv.Config.ErrorLog = log.New(&logged, "", 0)
	srv.Start()
	defer srv.Close()
	r, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, nil)
	r.Header.Set("Idempotency-Key", "k")
	res, err := srv.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if !strings.Contains(logged.String(), "boom") {
		t.Errorf("log %q", logged.String())
	}
}

func TestStream(t *testing.T) {
	t.Parallel()
	proceed := make(chan struct{})
	h := counted(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(202)
		io.WriteString(w, "one ")
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
		<-proceed
		io.WriteString(w, "two")
	})
	srv := httptest.NewServer(server.New(memstore.New(), single).Handler(h))
	defer srv.Close()
	request := func() *http.Response {
		r, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, nil)
		r.Header.Set("Idempotency-Key", "k")
		res, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	res := request()
	one := make([]byte, 4)
	if _, err := io.ReadFull(res.Body, one); err != nil || string(one) != "one " {
		t.Errorf("before the handler went on: %q, %v", one, err)
	}
	close(proceed)
	if rest := bodyOf(t, res); rest != "two" {
		t.Errorf("the rest is %q", rest)
	}
	res.Body.Close()
	res = request()
	defer res.Body.Close()
	if got := bodyOf(t, res); res.StatusCode != 202 || got != "one two" || !replayed(res) {
		t.Errorf("replay %d %q", res.StatusCode, got)
	}
	h.want(t, 1)
}

// In transaction mode nothing leaves before the commit.
func TestNothingBeforeCommit(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	store := newFakeTx()
	store.commit = func(int64) error {
		if w.Flushed || w.Body.Len() > 0 || len(w.Header()) > 0 {
			t.Errorf("before the commit: %q %v", w.Body, w.Header())
		}
		return nil
	}
	guard := server.New(store, with(func(o *server.Options) { o.Mode, o.MaxStoredResponse = dedup.Transaction, 10 }))
	guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "more than may be stored")
		w.(http.Flusher).Flush()
	})).ServeHTTP(w, post("k", "x"))
	store.wantTx(t, 1, 0)
	if w.Code != 200 || w.Body.String() != "more than may be stored" {
		t.Errorf("answer %d %q", w.Code, w.Body)
	}
}

func TestInformational(t *testing.T) {
	t.Parallel()
	guard := server.New(memstore.New(), single)
	send := wire(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Outer", "1")
		guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "<a>")
			w.WriteHeader(http.StatusContinue) // was sent before
			w.Header().Set("X", "1")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			w.WriteHeader(201)
		})).ServeHTTP(w, r)
	}))
	var got []string
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		got = append(got, fmt.Sprint(code, h["Outer"], h["Link"]))
		return nil
	}}
	for i := range 2 {
		r := post("k", "x")
		a := send(r.WithContext(httptrace.WithClientTrace(t.Context(), trace)))
		if a.Status != 201 || a.Header.Get("Link") != "" || a.Header.Get("X") != "1" || a.Header.Get("Outer") != "1" {
			t.Errorf("answer %d: %+v", i, a)
		}
	}
	if diff := cmp.Diff([]string{"103 [1] [<a>]"}, got); diff != "" {
		t.Errorf("informational answers:\n%s", diff)
	}
}

func TestHijackIsRefused(t *testing.T) {
	t.Parallel()
	var logged lines
	h := counted(func(w http.ResponseWriter, r *http.Request) {
		if _, _, err := w.(http.Hijacker).Hijack(); !errors.Is(err, server.ErrHijack) {
			t.Errorf("Hijack: %v", err)
		}
		if _, _, err := http.NewResponseController(w).Hijack(); !errors.Is(err, server.ErrHijack) {
			t.Errorf("Hijack by http.ResponseController: %v", err)
		}
		w.WriteHeader(http.StatusSwitchingProtocols)
	})
	send := wire(t, server.New(memstore.New(), with(func(o *server.Options) {
		o.Logger = slog.New(slog.NewTextHandler(&logged, nil))
	})).Handler(h))
	if a := send(post("k", "x")); a.Status != 500 {
		t.Errorf("answer %+v", a)
	}
	if !strings.Contains(logged.String(), server.ErrHijack.Error()) {
		t.Errorf("log %q", logged.String())
	}
}

// http.ResponseController reaches the connection through the guard.
func TestResponseController(t *testing.T) {
	t.Parallel()
	h := counted(func(w http.ResponseWriter, _ *http.Request) {
		rc := http.NewResponseController(w)
		if err := rc.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		if err := rc.SetWriteDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		if err := rc.EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		if err := rc.Flush(); err != nil {
			t.Error(err)
		}
	})
	if a := wire(t, server.New(memstore.New(), single).Handler(h))(post("k", "x")); a.Status != 200 {
		t.Errorf("answer %+v", a)
	}
	h.want(t, 1)
}

// A type that an outer handler set is not guessed anew.
func TestStreamWithTypeFromOutside(t *testing.T) {
	t.Parallel()
	guarded := server.New(memstore.New(), single).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "{}")
		w.(http.Flusher).Flush()
	}))
	send := wire(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		guarded.ServeHTTP(w, r)
	}))
	for range 2 {
		if a := send(post("k", "x")); a.Header.Get("Content-Type") != "application/json" {
			t.Errorf("headers %v", a.Header)
		}
	}
}

func TestInvalidContentLengthIsNotStored(t *testing.T) {
	t.Parallel()
	g := server.New(memstore.New(), single).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "many")
	}))
	for range 2 {
		if res := do(g, post("k", "x")); res.Header.Get("Content-Length") != "" {
			t.Errorf("headers %v", res.Header)
		}
	}
}

func TestSuperfluousWriteHeader(t *testing.T) {
	t.Parallel()
	var logged lines
	g := server.New(memstore.New(), with(func(o *server.Options) {
		o.Logger = slog.New(slog.NewTextHandler(&logged, nil))
	})).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(201)
		w.WriteHeader(500)
	}))
	if res := do(g, post("key-in-full", "body-in-full")); res.StatusCode != 201 {
		t.Errorf("status %d", res.StatusCode)
	}
	if s := logged.String(); !strings.Contains(s, "superfluous WriteHeader") || strings.Contains(s, "in-full") {
		t.Errorf("log %q", s)
	}
}

// The files that a large form is kept in are removed after the request.
func TestMultipartFilesAreRemoved(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("file", "a.txt")
	if err != nil {
		t.Fatal(err)
	}
	part.Write(bytes.Repeat([]byte("x"), 100_000))
	form.Close()
	files := func() int {
		names, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	h := counted(func(_ http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		if files() == 0 {
			t.Skip("this system keeps its temporary files elsewhere: ", os.TempDir())
		}
	})
	r := post("k", body.String())
	r.Header.Set("Content-Type", form.FormDataContentType())
	do(server.New(memstore.New(), single).Handler(h), r)
	if n := files(); n != 0 {
		t.Errorf("%d files are left", n)
	}
	h.want(t, 1)
}
