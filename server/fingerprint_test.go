package server_test

import (
	"bytes"
	"mime"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/effectonce/idempotency/server"
)

// call is what a fingerprint is made of.
type call struct {
	method, target, body string
	header               http.Header
}

func (c call) fingerprint() []byte {
	r := httptest.NewRequest(c.method, c.target, strings.NewReader(c.body))
	for name, values := range c.header {
		r.Header[name] = values
	}
	return server.Fingerprint(r, []byte(c.body))
}

func typed(media string) http.Header { return http.Header{"Content-Type": {media}} }

var (
	asJSON = typed("application/json")
	asForm = typed("application/x-www-form-urlencoded")
)

func TestSameFingerprint(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		a, b call
	}{
		{"order of members",
			call{"POST", "/c", `{"a":1,"b":2}`, asJSON},
			call{"POST", "/c", ` { "b":2, "a":1 }`, asJSON}},
		{"escapes in strings",
			call{"POST", "/c", `{"a":"\u00fc"}`, asJSON},
			call{"POST", "/c", `{"a":"ü"}`, asJSON}},
		{"JSON by suffix",
			call{"POST", "/c", `{"a":1,"b":2}`, typed("application/merge-patch+json")},
			call{"POST", "/c", `{"b":2,"a":1}`, typed("application/merge-patch+json")}},
		{"spelling of the media type",
			call{"POST", "/c", `{}`, typed(`application/vnd.x+json; v="1"; p=2`)},
			call{"POST", "/c", `{}`, typed(`Application/VND.X+JSON;P=2;V=1`)}},
		{"charset of JSON",
			call{"POST", "/c", `{}`, typed("application/json; charset=UTF-8")},
			call{"POST", "/c", `{}`, asJSON}},
		{"order of a form's fields",
			call{"POST", "/c", "a=1&b=2&a=3", asForm},
			call{"POST", "/c", "b=2&a=1&a=3", asForm}},
		{"escapes in a form",
			call{"POST", "/c", "a=x+y", asForm},
			call{"POST", "/c", "%61=x%20y", asForm}},
		{"headers that say nothing of the content",
			call{"POST", "/c", "x", http.Header{"User-Agent": {"a"}, "Traceparent": {"1"}}},
			call{"POST", "/c", "x", http.Header{"User-Agent": {"b"}}}},
		{"scheme and host",
			call{"POST", "http://a/c?x=1", "x", nil},
			call{"POST", "https://b/c?x=1", "x", nil}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if a, b := tt.a.fingerprint(), tt.b.fingerprint(); !bytes.Equal(a, b) {
				t.Errorf("%+v\n%+v\ndiffer: %x, %x", tt.a, tt.b, a, b)
			}
		})
	}
}

func TestOtherFingerprint(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		a, b call
	}{
		{"method", call{"POST", "/c", "x", nil}, call{"PATCH", "/c", "x", nil}},
		{"path", call{"POST", "/orders/1/pay", "x", nil}, call{"POST", "/orders/2/pay", "x", nil}},
		{"escaped path", call{"POST", "/a%2Fb", "x", nil}, call{"POST", "/a/b", "x", nil}},
		{"query", call{"POST", "/c?x=1", "x", nil}, call{"POST", "/c?x=2", "x", nil}},
		{"query or path", call{"POST", "/c?x", "x", nil}, call{"POST", "/c%3Fx", "x", nil}},
		{"body", call{"POST", "/c", "x", nil}, call{"POST", "/c", "y", nil}},
		{"a body or none", call{"POST", "/c", "{}", asJSON}, call{"POST", "/c", "", asJSON}},
		{"media type", call{"POST", "/c", "{}", asJSON}, call{"POST", "/c", "{}", typed("text/plain")}},
		{"media type or none", call{"POST", "/c", "{}", asJSON}, call{"POST", "/c", "{}", nil}},
		{"parameter", call{"POST", "/c", "{}", typed("application/json;v=1")}, call{"POST", "/c", "{}", typed("application/json;v=2")}},
		{"several media types",
			call{"POST", "/c", "{}", http.Header{"Content-Type": {"application/json", "text/plain"}}},
			call{"POST", "/c", "{}", http.Header{"Content-Type": {"application/json"}}}},
		{"content encoding",
			call{"POST", "/c", "x", http.Header{"Content-Encoding": {"gzip"}}},
			call{"POST", "/c", "x", nil}},
		{"large numbers",
			call{"POST", "/c", `{"a":12345678901234567890}`, asJSON},
			call{"POST", "/c", `{"a":12345678901234567891}`, asJSON}},
		{"spelling of numbers",
			call{"POST", "/c", `{"a":1.0}`, asJSON},
			call{"POST", "/c", `{"a":1}`, asJSON}},
		{"which duplicate comes last",
			call{"POST", "/c", `{"a":1,"a":2}`, asJSON},
			call{"POST", "/c", `{"a":2,"a":1}`, asJSON}},
		{"which of two cases comes last",
			call{"POST", "/c", `{"a":1,"A":2}`, asJSON},
			call{"POST", "/c", `{"A":2,"a":1}`, asJSON}},
		{"lone surrogates",
			call{"POST", "/c", `{"a":"\ud800"}`, asJSON},
			call{"POST", "/c", `{"a":"\ud801"}`, asJSON}},
		{"invalid UTF-8",
			call{"POST", "/c", "{\"a\":\"\xff\"}", asJSON},
			call{"POST", "/c", "{\"a\":\"\xfe\"}", asJSON}},
		{"order in an array",
			call{"POST", "/c", `[1,2]`, asJSON},
			call{"POST", "/c", `[2,1]`, asJSON}},
		{"JSON of another charset",
			call{"POST", "/c", `{"a":1,"b":2}`, typed("application/json;charset=latin1")},
			call{"POST", "/c", `{"b":2,"a":1}`, typed("application/json;charset=latin1")}},
		{"JSON that is compressed",
			call{"POST", "/c", `{"a":1,"b":2}`, http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {"br"}}},
			call{"POST", "/c", `{"b":2,"a":1}`, http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {"br"}}}},
		{"order of a field's values",
			call{"POST", "/c", "a=1&a=2", asForm},
			call{"POST", "/c", "a=2&a=1", asForm}},
		{"field without and with empty value",
			call{"POST", "/c", "a", asForm},
			call{"POST", "/c", "a=", asForm}},
		{"where a field ends",
			call{"POST", "/c", "a=b%26c=d", asForm},
			call{"POST", "/c", "a=b&c=d", asForm}},
		{"forms that Go refuses",
			call{"POST", "/c", "a=%zz&b=1", asForm},
			call{"POST", "/c", "b=1&a=%zz", asForm}},
		{"forms with semicolons",
			call{"POST", "/c", "a=1;b=2&c=3", asForm},
			call{"POST", "/c", "c=3&a=1;b=2", asForm}},
		{"order in text",
			call{"POST", "/c", `{"a":1,"b":2}`, typed("text/plain")},
			call{"POST", "/c", `{"b":2,"a":1}`, typed("text/plain")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if a, b := tt.a.fingerprint(), tt.b.fingerprint(); bytes.Equal(a, b) {
				t.Errorf("%+v\n%+v\nhave one fingerprint", tt.a, tt.b)
			}
		})
	}
}

// A form may have a body that is, byte for byte, what another form is hashed
// as. Both are of the kind that is not canonical, so the kind tells them apart.
func TestRawIsNotCanonical(t *testing.T) {
	t.Parallel()
	form := call{"POST", "/c", "a=1", asForm}
	raw := call{"POST", "/c", "\x01a\x011", asForm} // the canonical form of the other
	if bytes.Equal(form.fingerprint(), raw.fingerprint()) {
		t.Error("a raw body passes for a canonical one")
	}
}

func TestFingerprintHasVersion(t *testing.T) {
	t.Parallel()
	got := call{"POST", "/c", "x", nil}.fingerprint()
	if len(got) != 33 || got[0] != 1 {
		t.Errorf("fingerprint %x; want version 1 and 32 bytes", got)
	}
}

// A router below the guard's own may have cut the path (http.StripPrefix), but
// the request is another one all the same.
func TestFingerprintOfPathAsSent(t *testing.T) {
	t.Parallel()
	var got [][]byte
	h := http.StripPrefix("/v1", http.StripPrefix("/eu", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got = append(got, server.Fingerprint(r, nil))
	})))
	h.ServeHTTP(nil, httptest.NewRequest("POST", "/v1/eu/c", nil))
	http.StripPrefix("/v2", h).ServeHTTP(nil, httptest.NewRequest("POST", "/v2/v1/eu/c", nil))
	if len(got) != 2 || bytes.Equal(got[0], got[1]) {
		t.Errorf("fingerprints %x", got)
	}
}

// FuzzFingerprint checks that two requests have one fingerprint only if a
// decoder that shares no code with ours finds them equal.
func FuzzFingerprint(f *testing.F) {
	f.Add("/c", "application/json", []byte(`{"a":1,"b":2}`), "/c", "application/json", []byte(`{"b":2,"a":1}`))
	f.Add("/c", "application/json", []byte(`[1]`), "/c", "application/json", []byte(`[1.0]`))
	f.Add("/c", "application/json", []byte(`{"a":1,"a":2}`), "/c", "application/json", []byte(`{"a":2}`))
	f.Add("/c", "application/x-www-form-urlencoded", []byte("a=1&b=2"), "/c", "application/x-www-form-urlencoded", []byte("b=2&a=%31"))
	f.Add("/c", "text/plain; a=1; b=2", []byte("x"), "/c", "text/plain;B=2;A=1", []byte("x"))
	f.Add("/c?a", "", []byte{}, "/c", "", []byte{})
	f.Fuzz(func(t *testing.T, path1, type1 string, body1 []byte, path2, type2 string, body2 []byte) {
		a := request(path1, type1)
		b := request(path2, type2)
		if !bytes.Equal(server.Fingerprint(a, body1), server.Fingerprint(b, body2)) {
			if path1 == path2 && type1 == type2 && bytes.Equal(body1, body2) {
				t.Fatal("a request has two fingerprints")
			}
			return
		}
		if path1 != path2 {
			t.Fatalf("one fingerprint for %q and %q", path1, path2)
		}
		if !sameType(type1, type2) {
			t.Fatalf("one fingerprint for types %q and %q", type1, type2)
		}
		if !sameBody(type1, body1, body2) {
			t.Fatalf("one fingerprint for bodies %q and %q of type %q", body1, body2, type1)
		}
	})
}

func request(path, media string) *http.Request {
	r := &http.Request{Method: "POST", URL: &url.URL{Path: path, RawPath: path}, Header: typed(media)}
	r.RequestURI = "/" + path
	return r
}

func sameType(a, b string) bool {
	if a == b {
		return true
	}
	ta, pa, erra := mime.ParseMediaType(a)
	tb, pb, errb := mime.ParseMediaType(b)
	for _, p := range []map[string]string{pa, pb} {
		if strings.EqualFold(p["charset"], "utf-8") {
			delete(p, "charset")
		}
		if cs, ok := p["charset"]; ok {
			p["charset"] = strings.ToLower(cs)
		}
	}
	return erra == nil && errb == nil && ta == tb && cmp.Equal(pa, pb)
}

func sameBody(media string, a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	t, _, _ := mime.ParseMediaType(media)
	switch {
	case t == "application/json" || strings.HasSuffix(t, "+json"):
		va, erra := decode(a)
		vb, errb := decode(b)
		return erra == nil && errb == nil && cmp.Equal(va, vb) && !duplicates(a) && !duplicates(b)
	case t == "application/x-www-form-urlencoded":
		va, erra := url.ParseQuery(string(a))
		vb, errb := url.ParseQuery(string(b))
		return erra == nil && errb == nil && cmp.Equal(va, vb)
	}
	return false
}

// duplicates reports whether an object in a valid JSON text has duplicate
// names. encoding/json drops them, so it shows in the number of names.
func duplicates(src []byte) bool {
	v, _ := decode(src)
	var kept func(any) int
	kept = func(v any) (n int) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				n += kept(e)
			}
		case map[string]any:
			for _, e := range v {
				n += 1 + kept(e)
			}
		}
		return n
	}
	colons, inString := 0, false // every colon outside of strings follows a name
	for i := 0; i < len(src); i++ {
		switch {
		case inString && src[i] == '\\':
			i++
		case src[i] == '"':
			inString = !inString
		case src[i] == ':' && !inString:
			colons++
		}
	}
	return colons != kept(v)
}

func BenchmarkFingerprint(b *testing.B) {
	for _, size := range []int{100, 1024} {
		b.Run(strconv.Itoa(size)+"B", func(b *testing.B) {
			body := jsonBody(size)
			r := httptest.NewRequest("POST", "/charges", nil)
			r.Header.Set("Content-Type", "application/json")
			b.ReportAllocs()
			fingerprint := server.NewFingerprinter()
			for b.Loop() {
				fingerprint(r, body)
			}
		})
	}
}

// jsonBody returns a JSON object of about size bytes, with members in no
// particular order.
func jsonBody(size int) []byte {
	b := []byte(`{"currency":"EUR","amount":1999`)
	for i := 0; len(b) < size-30; i++ {
		b = append(b, `,"item_`+strconv.Itoa(i*7919%100)+`":"some text"`...)
	}
	return append(b, '}')
}
