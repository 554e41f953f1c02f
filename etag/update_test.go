package etag_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strconv"
	"sync"
	"testing"

	"github.com/effectonce/idempotency/etag"
)

// counter is a resource that holds a number, with a guard of If-Match made in
// the write. It is no model of the package: it compares in its own way.
type counter struct {
	mu      sync.Mutex
	version int // 0: there is none
	body    string
	puts    []*http.Request
	onPut   func(w http.ResponseWriter, r *http.Request) bool // true: answered
}

func (c *counter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Method == "GET" {
		if c.version == 0 {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("ETag", strconv.Quote(strconv.Itoa(c.version)))
		w.Header().Set("Content-Type", "text/plain")
		io.WriteString(w, c.body)
		return
	}
	c.puts = append(c.puts, r)
	if c.onPut != nil && c.onPut(w, r) {
		return
	}
	if c.version == 0 && r.Header.Get("If-None-Match") != "*" ||
		c.version > 0 && r.Header.Get("If-Match") != strconv.Quote(strconv.Itoa(c.version)) {
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	}
	c.version++
	c.body = string(body)
	w.Header().Set("ETag", strconv.Quote(strconv.Itoa(c.version)))
}

func start(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func increment(cur etag.Representation) (etag.Representation, error) {
	n := 0
	if cur.Exists {
		var err error
		if n, err = strconv.Atoi(string(cur.Body)); err != nil {
			return cur, err
		}
	}
	return etag.Representation{ContentType: "text/plain", Body: []byte(strconv.Itoa(n + 1))}, nil
}

func wantUpdateError(t *testing.T, err, target error, ambiguous bool) *etag.UpdateError {
	t.Helper()
	var e *etag.UpdateError
	if !errors.As(err, &e) || !errors.Is(err, target) || e.Ambiguous != ambiguous {
		t.Fatalf("error %v, want %v (ambiguous %v)", err, target, ambiguous)
	}
	return e
}

func TestUpdateCreatesThenChanges(t *testing.T) {
	t.Parallel()
	c := &counter{}
	url := start(t, c)
	for want := range 2 {
		got, err := etag.Update(t.Context(), nil, url, increment)
		if err != nil {
			t.Fatal(err)
		}
		if v, ok := got.Tag.Version(); !ok || int(v) != want+1 || string(got.Body) != strconv.Itoa(want+1) || !got.Exists {
			t.Errorf("wrote %+v", got)
		}
	}
	if c.body != "2" || len(c.puts) != 2 {
		t.Errorf("body %q after %d writes", c.body, len(c.puts))
	}
	for _, r := range c.puts {
		if r.Header.Get("Content-Type") != "text/plain" || r.Header.Get("Accept-Encoding") != "identity" {
			t.Errorf("sent %v", r.Header)
		}
	}
}

// No increment of 20 writers at once is lost.
func TestUpdateLosesNoWrite(t *testing.T) {
	t.Parallel()
	c := &counter{version: 1, body: "0"}
	url := start(t, c)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := (etag.Updater{Attempts: 1000}).Update(t.Context(), url, increment); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if c.body != "20" {
		t.Errorf("20 increments came to %s", c.body)
	}
}

func TestUpdateWritesNothingWhereNothingChanges(t *testing.T) {
	t.Parallel()
	c := &counter{version: 4, body: "7"}
	got, err := etag.Update(t.Context(), nil, start(t, c), func(etag.Representation) (etag.Representation, error) {
		return etag.Representation{Body: []byte("7")}, nil
	})
	if err != nil || string(got.Body) != "7" || len(c.puts) != 0 {
		t.Errorf("%+v, %v after %d writes", got, err, len(c.puts))
	}
	if v, _ := got.Tag.Version(); v != 4 {
		t.Errorf("tag %v", got.Tag)
	}
}

func TestUpdateGivesUp(t *testing.T) {
	t.Parallel()
	c := &counter{version: 1, body: "0"}
	c.onPut = func(w http.ResponseWriter, _ *http.Request) bool {
		c.version++ // another writer, each time
		return false
	}
	url := start(t, c)
	_, err := etag.Updater{Attempts: 3}.Update(t.Context(), url, increment)
	e := wantUpdateError(t, err, etag.ErrConflict, false)
	if e.Attempts != 3 || e.Status != 412 || len(c.puts) != 3 || c.body != "0" {
		t.Errorf("%+v after %d writes, body %s", e, len(c.puts), c.body)
	}
}

func TestUpdateErrors(t *testing.T) {
	t.Parallel()
	answer := func(status int, tag string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if tag != "" {
				w.Header().Set("ETag", tag)
			}
			if status == 301 || status == 303 {
				w.Header().Set("Location", "/elsewhere")
			}
			if r.URL.Path == "/elsewhere" {
				status = 200
			}
			w.WriteHeader(status)
			io.WriteString(w, "12345")
		}
	}
	put := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "PUT" {
				h(w, r)
				return
			}
			answer(200, `"1"`)(w, r)
		}
	}
	for _, tc := range []struct {
		name      string
		h         http.HandlerFunc
		u         etag.Updater
		want      error
		ambiguous bool
	}{
		{"no tag", answer(200, ""), etag.Updater{}, etag.ErrNoStrongTag, false},
		{"weak tag", answer(200, `W/"1"`), etag.Updater{}, etag.ErrNoStrongTag, false},
		{"malformed tag", answer(200, `1`), etag.Updater{}, etag.ErrNoStrongTag, false},
		{"too large", answer(200, `"1"`), etag.Updater{MaxBody: 4}, etag.ErrTooLarge, false},
		{"read fails", answer(500, ""), etag.Updater{}, etag.ErrStatus, false},
		{"read redirected", answer(301, ""), etag.Updater{}, etag.ErrRedirected, false},
		{"write redirected", put(answer(301, "")), etag.Updater{}, etag.ErrRedirected, true},
		{"write refused", put(answer(403, "")), etag.Updater{}, etag.ErrStatus, false},
		{"write fails", put(answer(500, "")), etag.Updater{}, etag.ErrStatus, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := tc.u.Update(t.Context(), start(t, tc.h), increment)
			wantUpdateError(t, err, tc.want, tc.ambiguous)
		})
	}
	t.Run("exactly MaxBody", func(t *testing.T) {
		t.Parallel()
		if _, err := (etag.Updater{MaxBody: 5}).Update(t.Context(), start(t, answer(200, `"1"`)), increment); err != nil {
			t.Error(err)
		}
	})
	t.Run("change fails", func(t *testing.T) {
		t.Parallel()
		mine := errors.New("mine")
		_, err := etag.Update(t.Context(), nil, start(t, answer(200, `"1"`)), func(etag.Representation) (etag.Representation, error) {
			return etag.Representation{}, mine
		})
		wantUpdateError(t, err, mine, false)
	})
	t.Run("settings", func(t *testing.T) {
		t.Parallel()
		for _, u := range []etag.Updater{{Attempts: -1}, {MaxBody: -1}} {
			if _, err := u.Update(t.Context(), "http://127.0.0.1:1", increment); err == nil {
				t.Errorf("%+v was taken", u)
			}
		}
		if _, err := etag.Update(t.Context(), nil, "http://127.0.0.1:1", nil); err == nil {
			t.Error("no change function was taken")
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		c := &counter{version: 1, body: "0", onPut: func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(412)
			return true
		}}
		rounds := 0
		_, err := etag.Update(ctx, nil, start(t, c), func(cur etag.Representation) (etag.Representation, error) {
			if rounds++; rounds == 2 {
				cancel()
			}
			return increment(cur)
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	})
}

// again sends each PUT twice and loses the first answer, as a retrying
// transport does on a bad network.
type again struct{}

func (again) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPut {
		first := r.Clone(r.Context())
		first.Body, _ = r.GetBody()
		resp, err := http.DefaultTransport.RoundTrip(first)
		if err != nil {
			return nil, err
		}
		resp.Body.Close()
	}
	return http.DefaultTransport.RoundTrip(r)
}

// The trap: the write was done, its answer lost, and the repeated request got
// 412. An Update that took it for a refusal would add twice.
func TestUpdateDoesNotWriteTwiceAfterALostAnswer(t *testing.T) {
	t.Parallel()
	c := &counter{version: 1, body: "0"}
	_, err := etag.Update(t.Context(), &http.Client{Transport: again{}}, start(t, c), increment)
	e := wantUpdateError(t, err, etag.ErrLostAnswer, true)
	if c.body != "1" || e.Status != 412 || e.Attempts != 1 {
		t.Errorf("counter at %s, %+v", c.body, e)
	}
}

// The caller's own trace goes on working.
func TestUpdateKeepsTheTrace(t *testing.T) {
	t.Parallel()
	wrote := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteHeaders: func() { wrote++ }})
	if _, err := etag.Update(ctx, nil, start(t, &counter{}), increment); err != nil || wrote != 2 {
		t.Errorf("%d requests seen, %v", wrote, err)
	}
}

// With a key, and a server that answers a repeated key by its stored answer,
// the lost answer comes back, and a true refusal is a refusal.
func TestUpdateWithKey(t *testing.T) {
	t.Parallel()
	stored := map[string]int{}
	c := &counter{version: 1, body: "0"}
	rival := true
	c.onPut = func(w http.ResponseWriter, r *http.Request) bool {
		key := r.Header.Get("Idempotency-Key")
		if status, ok := stored[key]; ok {
			w.Header().Set("Idempotent-Replayed", "true")
			w.WriteHeader(status)
			return true
		}
		if rival {
			rival = false
			c.version, c.body = c.version+1, "10"
			stored[key] = 412
			return false
		}
		stored[key] = 200
		return false
	}
	n := 0
	u := etag.Updater{
		Client: &http.Client{Transport: again{}},
		Header: http.Header{"Authorization": {"Bearer x"}},
		Key:    func() (string, error) { n++; return "key-" + strconv.Itoa(n), nil },
	}
	if _, err := u.Update(t.Context(), start(t, c), increment); err != nil {
		t.Fatal(err)
	}
	if c.body != "11" || n != 2 || len(stored) != 2 {
		t.Errorf("counter at %s after %d keys", c.body, n)
	}
	if got := c.puts[0].Header.Get("Authorization"); got != "Bearer x" {
		t.Errorf("Authorization %q", got)
	}
	if u.Header.Get("Idempotency-Key") != "" {
		t.Error("the caller's header was changed")
	}
	broken := errors.New("no entropy")
	u.Key = func() (string, error) { return "", broken }
	_, err := u.Update(t.Context(), start(t, c), increment)
	wantUpdateError(t, err, broken, false)
}
