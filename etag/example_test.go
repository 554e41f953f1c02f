package etag_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"

	"github.com/effectonce/idempotency/etag"
)

// document is a resource with a version. Its lock stands for the database's
// UPDATE … WHERE version = $1.
type document struct {
	mu      sync.Mutex
	version int64
	text    string
}

func (d *document) lookup(*http.Request) (etag.State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return etag.State{Exists: d.version > 0, Tag: etag.FromVersion(d.version)}, nil
}

// write sets the text if the document is still at the version given.
func (d *document) write(version int64, text string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.version != version {
		return false
	}
	d.version, d.text = version+1, text
	return true
}

func (d *document) get(w http.ResponseWriter, _ *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w.Header().Set("ETag", etag.FromVersion(d.version).String())
	io.WriteString(w, d.text)
}

func (d *document) put(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	state, _ := etag.Checked(r.Context())
	version, _ := state.Tag.Version()
	if !d.write(version, string(text)) {
		etag.WriteProblem(w, etag.Failed(nil)) // changed since the check
		return
	}
	w.Header().Set("ETag", etag.FromVersion(version+1).String())
	w.WriteHeader(http.StatusNoContent)
}

func (d *document) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /", etag.Check(d.lookup, http.HandlerFunc(d.get)))
	mux.Handle("PUT /", etag.Require(etag.Check(d.lookup, http.HandlerFunc(d.put))))
	return mux
}

// Two writers have seen version 1. The first one's write makes it version 2, and
// the second one is refused. So is a third one, who has seen nothing.
func ExampleCheck() {
	server := httptest.NewServer((&document{version: 1, text: "draft"}).handler())
	defer server.Close()

	for _, ifMatch := range []string{`"1"`, `"1"`, ``} {
		req, _ := http.NewRequest("PUT", server.URL, http.NoBody)
		if ifMatch != "" {
			req.Header.Set("If-Match", ifMatch)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Printf("If-Match: %-3s → %s\n", ifMatch, resp.Status)
	}
	// Output:
	// If-Match: "1" → 204 No Content
	// If-Match: "1" → 412 Precondition Failed
	// If-Match:     → 428 Precondition Required
}

func ExampleUpdate() {
	server := httptest.NewServer((&document{version: 7, text: "draft"}).handler())
	defer server.Close()

	got, err := etag.Update(context.Background(), nil, server.URL,
		func(current etag.Representation) (etag.Representation, error) {
			return etag.Representation{Body: append([]byte("second "), current.Body...)}, nil
		})
	fmt.Printf("%s %s %v\n", got.Tag, got.Body, err)
	// Output: "8" second draft <nil>
}

func ExampleParseList() {
	list, err := etag.ParseList([]string{`"a,b", W/"c"`, `"d"`})
	fmt.Println(len(list.Tags), list, err)
	fmt.Println(etag.StrongMatch(list.Tags[1], list.Tags[1]), etag.WeakMatch(list.Tags[1], list.Tags[1]))
	// Output:
	// 3 "a,b", W/"c", "d" <nil>
	// false true
}
