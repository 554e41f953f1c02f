package etag_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/effectonce/idempotency/etag"
)

const (
	before = "Tue, 01 Dec 2026 09:59:59 GMT"
	at     = "Tue, 01 Dec 2026 10:00:00 GMT"
)

// Half a second after at, which no header can say.
var modified = time.Date(2026, 12, 1, 10, 0, 0, 5e8, time.UTC)

func TestEvaluateInTheOrderOfRFC9110(t *testing.T) {
	t.Parallel()
	there := etag.State{Exists: true, Tag: etag.FromVersion(3), Modified: modified}
	weak := etag.State{Exists: true, Tag: etag.FromVersion(3).Weaken()}
	bare := etag.State{Exists: true}
	var gone etag.State
	type h map[string]string
	for _, tc := range []struct {
		header      h
		state       etag.State
		read, write int
	}{
		{h{}, there, 0, 0},
		{h{}, gone, 0, 0},
		{h{"If-Match": `"3"`}, there, 0, 0},
		{h{"If-Match": `"1", "3"`}, there, 0, 0},
		{h{"If-Match": `"2"`}, there, 412, 412},
		{h{"If-Match": `W/"3"`}, there, 412, 412}, // strong comparison
		{h{"If-Match": `"3"`}, weak, 412, 412},
		{h{"If-Match": `*`}, there, 0, 0},
		{h{"If-Match": `*`}, bare, 0, 0},
		{h{"If-Match": `"3"`}, bare, 412, 412},
		{h{"If-Match": `*`}, gone, 412, 412},
		{h{"If-Match": `"3"`}, gone, 412, 412},
		{h{"If-None-Match": `*`}, there, 304, 412},
		{h{"If-None-Match": `*`}, gone, 0, 0},
		{h{"If-None-Match": `"3"`}, there, 304, 412},
		{h{"If-None-Match": `W/"3"`}, there, 304, 412}, // weak comparison
		{h{"If-None-Match": `"3"`}, weak, 304, 412},
		{h{"If-None-Match": `"2"`}, there, 0, 0},
		{h{"If-None-Match": `"3"`}, gone, 0, 0},
		{h{"If-Unmodified-Since": before}, there, 412, 412},
		{h{"If-Unmodified-Since": at}, there, 0, 0},
		{h{"If-Unmodified-Since": before}, bare, 0, 0}, // no date known: ignored
		{h{"If-Unmodified-Since": "yesterday"}, there, 0, 0},
		{h{"If-Modified-Since": at}, there, 304, 0}, // reads only
		{h{"If-Modified-Since": before}, there, 0, 0},
		{h{"If-Modified-Since": at}, bare, 0, 0},
		{h{"If-Modified-Since": "yesterday"}, there, 0, 0},
		// If-Match makes If-Unmodified-Since void, If-None-Match the other.
		{h{"If-Match": `"3"`, "If-Unmodified-Since": before}, there, 0, 0},
		{h{"If-Match": `"2"`, "If-Unmodified-Since": at}, there, 412, 412},
		{h{"If-None-Match": `"2"`, "If-Modified-Since": at}, there, 0, 0},
		{h{"If-None-Match": `"3"`, "If-Modified-Since": before}, there, 304, 412},
		// If-Match first, then If-None-Match.
		{h{"If-Match": `"2"`, "If-None-Match": `"3"`}, there, 412, 412},
		{h{"If-Match": `"3"`, "If-None-Match": `"3"`}, there, 304, 412},
		{h{"If-Match": `"3"`, "If-None-Match": `"2"`}, there, 0, 0},
		{h{"If-Unmodified-Since": before, "If-None-Match": `"3"`}, there, 412, 412},
	} {
		header := http.Header{}
		for k, v := range tc.header {
			header.Set(k, v)
		}
		c, err := etag.ParseConditions(header)
		if err != nil {
			t.Fatal(err)
		}
		for method, want := range map[string]int{"GET": tc.read, "HEAD": tc.read, "PUT": tc.write, "DELETE": tc.write} {
			if got := c.Evaluate(method, tc.state); got != want {
				t.Errorf("%s, %v, %+v: %d, want %d", method, tc.header, tc.state, got, want)
			}
		}
	}
}

// serve runs a request, its headers in pairs, and reports whether it reached
// the handler within wrap.
func serve(wrap func(http.Handler) http.Handler, method string, pairs ...string) (*httptest.ResponseRecorder, bool, etag.State) {
	var ran bool
	var state etag.State
	h := wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ran = true
		state, _ = etag.Checked(r.Context())
	}))
	r := httptest.NewRequest(method, "/", nil)
	for i := 0; i < len(pairs); i += 2 {
		r.Header.Add(pairs[i], pairs[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w, ran, state
}

// wantProblem checks that an answer is a problem as RFC 9457 has it.
func wantProblem(t *testing.T, w *httptest.ResponseRecorder, status int, typ string) {
	t.Helper()
	var p etag.Problem
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
		t.Fatalf("status %d, body %q: %v", w.Code, w.Body, err)
	}
	if w.Code != status || p.Status != status || p.Type != typ || p.Title == "" {
		t.Errorf("answered %d with %+v, want %d %s", w.Code, p, status, typ)
	}
	if ct := w.Header().Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("Content-Type %q", ct)
	}
	if cc := w.Header().Get("Cache-Control"); cc != "no-store" {
		t.Errorf("Cache-Control %q, want no-store (RFC 6585, section 3)", cc)
	}
}

func TestRequire(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		method string
		header []string
		status int
		typ    string
	}{
		{"GET", nil, 200, ""},
		{"HEAD", nil, 200, ""},
		{"OPTIONS", nil, 200, ""},
		{"PUT", nil, 428, etag.TypeRequired},
		{"PATCH", nil, 428, etag.TypeRequired},
		{"DELETE", nil, 428, etag.TypeRequired},
		{"POST", nil, 428, etag.TypeRequired},
		{"PUT", []string{"If-Match", `"1"`}, 200, ""},
		{"PUT", []string{"If-Match", `*`}, 200, ""},
		{"PUT", []string{"If-None-Match", `*`}, 200, ""},
		{"PUT", []string{"If-None-Match", `"1"`}, 428, etag.TypeRequired}, // guards nothing
		{"PUT", []string{"If-Unmodified-Since", at}, 428, etag.TypeRequired},
		{"PUT", []string{"If-Match", `1`}, 400, etag.TypeInvalid},
		{"PUT", []string{"If-Match", ``}, 400, etag.TypeInvalid},
		{"PUT", []string{"If-Match", `"1"`, "If-None-Match", `*, "1"`}, 400, etag.TypeInvalid},
	} {
		w, ran, _ := serve(etag.Require, tc.method, tc.header...)
		if ran != (tc.status == 200) {
			t.Errorf("%s %v: handler ran: %v", tc.method, tc.header, ran)
		}
		if tc.status != 200 {
			wantProblem(t, w, tc.status, tc.typ)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	there := etag.State{Exists: true, Tag: etag.FromVersion(3), Modified: modified}
	check := func(s etag.State, err error) func(http.Handler) http.Handler {
		return func(next http.Handler) http.Handler {
			return etag.Check(func(*http.Request) (etag.State, error) { return s, err }, next)
		}
	}
	t.Run("goes on with the state checked", func(t *testing.T) {
		t.Parallel()
		_, ran, state := serve(check(there, nil), "PUT", "If-Match", `"1"`, "If-Match", `"3"`)
		if !ran || state != there {
			t.Errorf("ran %v, state %+v", ran, state)
		}
	})
	t.Run("stale", func(t *testing.T) {
		t.Parallel()
		w, ran, _ := serve(check(there, nil), "PUT", "If-Match", `"2"`)
		if ran {
			t.Error("the handler ran")
		}
		wantProblem(t, w, 412, etag.TypeFailed)
	})
	t.Run("not modified", func(t *testing.T) {
		t.Parallel()
		w, ran, _ := serve(check(there, nil), "GET", "If-None-Match", `W/"3"`)
		if ran || w.Code != 304 || w.Body.Len() > 0 || w.Header().Get("ETag") != `"3"` || w.Header().Get("Last-Modified") != at {
			t.Errorf("ran %v, %d %v %q", ran, w.Code, w.Header(), w.Body)
		}
	})
	t.Run("a read of nothing is the handler's", func(t *testing.T) {
		t.Parallel()
		if w, ran, _ := serve(check(etag.State{}, nil), "GET", "If-Match", `"3"`); !ran {
			t.Errorf("answered %d", w.Code)
		}
		if w, ran, _ := serve(check(etag.State{}, nil), "DELETE", "If-Match", `"3"`); ran {
			t.Errorf("a write of nothing passed: %d", w.Code)
		}
	})
	t.Run("malformed", func(t *testing.T) {
		t.Parallel()
		w, ran, _ := serve(check(there, nil), "GET", "If-None-Match", `3`)
		if ran {
			t.Error("the handler ran")
		}
		wantProblem(t, w, 400, etag.TypeInvalid)
	})
	t.Run("lookup fails", func(t *testing.T) {
		t.Parallel()
		w, ran, _ := serve(check(there, errors.New("secret host unreachable")), "PUT", "If-Match", `"3"`)
		if ran {
			t.Error("the handler ran")
		}
		wantProblem(t, w, 500, etag.TypeLookup)
		if got := w.Body.String(); strings.Contains(got, "secret") {
			t.Errorf("the cause got out: %s", got)
		}
	})
	t.Run("lookup answers", func(t *testing.T) {
		t.Parallel()
		err := fmt.Errorf("find: %w", &etag.Problem{Type: "about:blank", Title: "Not found", Status: 404})
		w, ran, _ := serve(check(there, err), "PUT", "If-Match", `"3"`)
		if ran {
			t.Error("the handler ran")
		}
		wantProblem(t, w, 404, "about:blank")
	})
	t.Run("OPTIONS has no conditions", func(t *testing.T) {
		t.Parallel()
		if _, ran, _ := serve(check(there, errors.New("down")), "OPTIONS", "If-Match", `"2"`); !ran {
			t.Error("refused")
		}
	})
}

func TestProblemUnwraps(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	if p := etag.Failed(cause); !errors.Is(p, cause) || p.Status != 412 {
		t.Errorf("Failed: %v", p)
	}
}
