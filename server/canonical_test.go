package server_test

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/effectonce/idempotency/server"
)

func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, src, want string }{
		{"white space", " { \"b\" : [ 1 , true ,\tnull ] ,\r\n\"a\" : { } } ", `{"a":{},"b":[1,true,null]}`},
		{"nested order", `{"b":{"d":1,"c":2},"a":[{"z":1,"y":2}]}`, `{"a":[{"y":2,"z":1}],"b":{"c":2,"d":1}}`},
		{"array order stays", `[3,1,2]`, `[3,1,2]`},
		{"scalar", ` "x" `, `"x"`},
		{"large numbers keep their digits", `{"b":12345678901234567890,"a":12345678901234567891}`, `{"a":12345678901234567891,"b":12345678901234567890}`},
		{"spellings of numbers stay", `[1,1.0,1e0,1E+0,-0,0.10,10e-1]`, `[1,1.0,1e0,1E+0,-0,0.10,10e-1]`},
		{"escapes that are not needed", `"\u0061\/\u20ac\ud83d\ude00"`, `"a/€😀"`},
		{"escapes that are", "\"\\u0000\\u001F\\b\\f\\n\\r\\t\\\"\\\\\\u000a\"", `"\u0000\u001f\b\f\n\r\t\"\\\n"`},
		{"DEL and separators are not escaped", "\"\x7f\u2028\"", "\"\x7f\u2028\""},
		// The example of RFC 8785, section 3.2.3, with its values shortened.
		{"order by UTF-16",
			`{"\u20ac":"Euro","\r":"CR","\ufb33":"Hebrew","1":"One","\ud83d\ude00":"Emoji","\u0080":"Control","\u00f6":"O"}`,
			"{\"\\r\":\"CR\",\"1\":\"One\",\"\u0080\":\"Control\",\"ö\":\"O\",\"€\":\"Euro\",\"😀\":\"Emoji\",\"\ufb33\":\"Hebrew\"}"},
		{"escaped names sort by what they say", `{"\u0062":1,"a":2}`, `{"a":2,"b":1}`},
		{"prefix first", `{"ab":1,"a":2,"":3}`, `{"":3,"a":2,"ab":1}`},
		{"deep", strings.Repeat("[", 65) + strings.Repeat("]", 65), strings.Repeat("[", 65) + strings.Repeat("]", 65)},
		{"names that differ in case, in order", `{"A":1,"a":2}`, `{"A":1,"a":2}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := server.Canonical([]byte(tt.src))
			if !ok || string(got) != tt.want {
				t.Errorf("canonical form of %s\n got %s, %t\nwant %s", tt.src, got, ok, tt.want)
			}
		})
	}
}

func TestNoCanonicalJSON(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, src string }{
		{"nothing", ``},
		{"white space", ` `},
		{"two values", `1 2`},
		{"garbage after the value", `{} x`},
		{"byte order mark", "\ufeff{}"},
		{"duplicate names", `{"a":1,"a":2}`},
		{"duplicate names apart", `{"a":1,"b":2,"a":1}`},
		{"duplicate names by escapes", `{"a":1,"\u0061":2}`},
		{"duplicate names inside", `[{"b":{"x":1,"x":1}}]`},
		{"names that differ in case, out of order", `{"a":2,"A":1}`},
		{"names that differ in case, apart", `{"b":0,"amount":2,"Amount":1}`},
		{"names that Go folds", `{"s":1,"\u017f":2,"a":3}`}, // long s
		{"invalid UTF-8", "\"\xff\""},
		{"invalid UTF-8 in a name", "{\"\xc3\x28\":1}"},
		{"surrogate in UTF-8", "\"\xed\xa0\x80\""},
		{"overlong UTF-8", "\"\xc0\xaf\""},
		{"high surrogate alone", `"\ud83d"`},
		{"high surrogate and text", `"\ud83dx"`},
		{"high surrogate and other escape", `"\ud83d\n"`},
		{"low surrogate alone", `"\ude00"`},
		{"two high surrogates", `"\ud83d\ud83d"`},
		{"control character", "\"\n\""},
		{"unknown escape", `"\x"`},
		{"short escape", `"\u12"`},
		{"bad escape", `"\u12g4"`},
		{"open string", `"a`},
		{"open escape", `"\`},
		{"open object", `{"a":1`},
		{"open array", `[1`},
		{"trailing comma", `[1,]`},
		{"trailing comma in object", `{"a":1,}`},
		{"leading comma", `[,1]`},
		{"no value", `{"a":}`},
		{"no colon", `{"a" 1}`},
		{"name is no string", `{1:1}`},
		{"leading zero", `01`},
		{"plus", `+1`},
		{"no digits", `-`},
		{"no fraction", `1.`},
		{"no integer", `.5`},
		{"no exponent", `1e`},
		{"NaN", `NaN`},
		{"literal cut short", `tru`},
		{"literal in capitals", `True`},
		{"literal and more", `nullx`},
		{"comment", `/**/1`},
		{"too deep", strings.Repeat("[", 66) + strings.Repeat("]", 66)},
		{"much too deep", strings.Repeat("[", 1<<20)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dst := []byte("before")
			var c server.Canonicalizer
			got, ok := c.Append(dst, []byte(tt.src))
			if ok || string(got) != "before" {
				t.Errorf("canonical form of %.40q is %q, %t; want none", tt.src, got, ok)
			}
		})
	}
}

// FuzzCanonicalJSON checks the canonical form against encoding/json: it says
// the same as the source, number for number as written, is its own canonical
// form, and does not depend on the order of members.
func FuzzCanonicalJSON(f *testing.F) {
	for _, s := range []string{
		`{"amount":12345678901234567890,"currency":"EUR","lines":[{"b":1,"a":[1.0,-0,1e5]}]}`,
		`{"b":"\ud83d\ude00","a":"\u0000\n\/","":{}}`, `[true,false,null]`, `"\ud83d"`, `{"a":1,"a":2}`,
		"{\"\ufb33\":1,\"😀\":2}", `{"a":1,"A":2}`, `{"B":1,"b":1,"a":0}`, "\"\xff\"", ` 1 `, `{}x`, `-0.0E-0`,
	} {
		f.Add([]byte(s), uint64(1))
	}
	f.Fuzz(func(t *testing.T, src []byte, seed uint64) {
		var c server.Canonicalizer
		got, ok := c.Append(nil, src)
		want, err := decode(src)
		if !ok {
			return
		}
		if err != nil {
			t.Fatalf("%q has a canonical form, but encoding/json says %v", src, err)
		}
		have, err := decode(got)
		if err != nil {
			t.Fatalf("canonical form %q of %q: %v", got, src, err)
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Fatalf("canonical form %q of %q says something else (-want +got):\n%s", got, src, diff)
		}
		again, ok := c.Append(nil, got)
		if !ok || !bytes.Equal(again, got) {
			t.Fatalf("canonical form %q of %q is itself made %q, %t", got, src, again, ok)
		}
		shuffled := encode(rand.New(rand.NewPCG(seed, seed)), nil, want)
		other, ok := c.Append(nil, shuffled)
		if ok && !bytes.Equal(other, got) {
			t.Fatalf("canonical form %q of %q, but %q in another order %q", got, src, other, shuffled)
		}
		if !ok && !foldedDuplicates(want) {
			t.Fatalf("%q has a canonical form, but not in another order %q", src, shuffled)
		}
	})
}

// decode decodes all of src, and keeps numbers as they are written.
func decode(src []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(src))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, io.ErrUnexpectedEOF
	}
	return v, nil
}

// encode writes v with members in random order.
func encode(rnd *rand.Rand, dst []byte, v any) []byte {
	switch v := v.(type) {
	case []any:
		dst = append(dst, '[')
		for i, e := range v {
			if i > 0 {
				dst = append(dst, " ,"...)
			}
			dst = encode(rnd, dst, e)
		}
		return append(dst, ']')
	case map[string]any:
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		dst = append(dst, '{')
		for i, name := range names {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = encode(rnd, dst, name)
			dst = append(dst, '\n', ':')
			dst = encode(rnd, dst, v[name])
		}
		return append(dst, '}')
	default:
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return append(dst, b...)
	}
}

// foldedDuplicates reports whether an object in v has names that differ only
// in case.
func foldedDuplicates(v any) bool {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			if foldedDuplicates(e) {
				return true
			}
		}
	case map[string]any:
		for a, e := range v {
			if foldedDuplicates(e) {
				return true
			}
			for b := range v {
				if a != b && strings.EqualFold(a, b) {
					return true
				}
			}
		}
	}
	return false
}

func BenchmarkCanonicalJSON(b *testing.B) {
	src := []byte(`{"amount":1999,"currency":"EUR","customer":"cus_81723","description":"two tickets","capture":true}`)
	var c server.Canonicalizer
	dst := make([]byte, 0, 4096)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := c.Append(dst, src); !ok {
			b.Fatal("no canonical form")
		}
	}
}
