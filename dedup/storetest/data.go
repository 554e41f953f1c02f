package storetest

import (
	"bytes"
	"fmt"
	"math"
	"strings"

	"github.com/effectonce/idempotency/dedup"
)

var dataTests = []test{
	{"KeysApart", keysApart},
	{"ScopesApart", scopesApart},
	{"AnswerBytes", answerBytes},
	{"AnswerIsCopied", answerIsCopied},
}

func allBytes() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// keys are all different, though a database, a separator or a collation may
// think otherwise.
func keys() []dedup.Key {
	long := strings.Repeat("k", dedup.MaxKeyLength-1)
	wide := strings.Repeat("語", dedup.MaxKeyLength/3) // 255 bytes
	ks := []dedup.Key{
		{Scope: "s", ID: "abc"}, {Scope: "s", ID: "ABC"}, {Scope: "s", ID: "Abc"}, {Scope: "S", ID: "abc"},
		{Scope: "s", ID: "abc "}, {Scope: "s", ID: " abc"}, {Scope: "s", ID: "abc\t"}, {Scope: "s ", ID: "abc"}, {Scope: "s", ID: "abc\n"},
		{Scope: "s", ID: "\u00e9"}, {Scope: "s", ID: "e\u0301"}, {Scope: "s", ID: "e"}, {Scope: "s", ID: "E"}, {Scope: "s", ID: "\u00c9"},
		{Scope: "s", ID: "ss"}, {Scope: "s", ID: "ß"}, {Scope: "s", ID: "ﬁ"}, {Scope: "s", ID: "fi"}, {Scope: "s", ID: "ı"}, {Scope: "s", ID: "i"},
		{Scope: "s", ID: "K"}, {Scope: "s", ID: "\u212a"}, {Scope: "s", ID: "a\u200bb"}, {Scope: "s", ID: "ab"}, {Scope: "s", ID: "😀"}, {Scope: "s", ID: "😁"},
		{Scope: "s", ID: "0"}, {Scope: "s", ID: "00"}, {Scope: "s", ID: "0.0"}, {Scope: "s", ID: "1e3"}, {Scope: "s", ID: "1000"}, {Scope: "s", ID: "NULL"}, {Scope: "s", ID: "null"},
		{Scope: "", ID: "abc"}, {Scope: "", ID: "s:abc"}, {Scope: "sabc", ID: "sabc"},
		{Scope: "s", ID: "'"}, {Scope: "s", ID: "''"}, {Scope: "s", ID: `"`}, {Scope: "s", ID: "`"}, {Scope: "s", ID: `\`}, {Scope: "s", ID: `\\`}, {Scope: "s", ID: `\'`},
		{Scope: "s", ID: "'; DROP TABLE idempotency_keys; --"}, {Scope: "s", ID: "%"}, {Scope: "s", ID: "_"}, {Scope: "s", ID: "a%"}, {Scope: "s", ID: "$1"}, {Scope: "s", ID: "?"}, {Scope: "s", ID: ":a"},
		{Scope: "s", ID: "*"}, {Scope: "s", ID: "[a-z]"}, {Scope: "s", ID: "{abc}"}, {Scope: "{s}", ID: "abc"}, {Scope: "s", ID: "{}"}, {Scope: "{", ID: "}"}, {Scope: "}", ID: "{"}, {Scope: "s", ID: "}abc{"}, {Scope: "s}", ID: "abc"},
		{Scope: "s", ID: "\r\n"}, {Scope: "s", ID: "\x01"}, {Scope: "s", ID: "\x7f"}, {Scope: "s", ID: "\u0080"}, {Scope: "s", ID: "\ufeffabc"},
		{Scope: "s", ID: long + "a"}, {Scope: "s", ID: long + "b"}, {Scope: "s", ID: long}, {Scope: long + "a", ID: long + "a"}, {Scope: long + "b", ID: long + "a"},
		{Scope: "s", ID: wide}, {Scope: wide, ID: wide}, {Scope: wide, ID: wide[:len(wide)-3]},
	}
	for _, sep := range []string{":", "/", "|", ",", ".", " ", "-", "\x1f", "\n", "::", `":"`} {
		ks = append(ks, dedup.Key{Scope: "x" + sep + "y", ID: "z"}, dedup.Key{Scope: "x", ID: "y" + sep + "z"})
	}
	for _, shift := range []string{"1", "12", "123", "1234"} { // naive length prefixes
		ks = append(ks, dedup.Key{Scope: shift, ID: "1234:"[len(shift):]})
	}
	return ks
}

func keysApart(e *env) {
	const promise = "two keys are the same only if both parts are equal, byte for byte"
	tokens := map[dedup.Key]dedup.Token{}
	for _, k := range keys() {
		if err := k.Validate(); err != nil {
			e.t.Fatalf("%q: %v", k, err)
		}
		if _, ok := tokens[k]; ok {
			continue
		}
		c := e.claimOf(k, dedup.NewToken())
		if r := e.claim(c); r.State != dedup.Won {
			e.t.Errorf("Claim of %q is %q, want won: %s", k, r.State, promise)
			continue
		}
		tokens[k] = c.Token
	}
	for k, token := range tokens {
		e.complete(k, token, dedup.StatusCompleted, answer(fmt.Sprintf("%q", k)))
	}
	for k := range tokens {
		r := e.claim(e.claimOf(k, dedup.NewToken()))
		if r.State != dedup.Completed {
			e.t.Errorf("Claim of %q is %q, want completed: a key is found again as it was stored", k, r.State)
		}
		e.response(r.Record.Response, answer(fmt.Sprintf("%q", k)), promise)
	}
}

func scopesApart(e *env) {
	const promise = "scopes keep callers apart who must not see each other's answers"
	a := dedup.Key{Scope: "tenant a", ID: e.key.ID}
	b := dedup.Key{Scope: "tenant b", ID: e.key.ID}
	e.completed(a, answer("of a"))
	e.absent(b, promise)
	token := e.won(b)
	e.complete(b, token, dedup.StatusCompleted, answer("of b"))
	e.response(e.get(a).Response, answer("of a"), promise)
	e.response(e.get(b).Response, answer("of b"), promise)
	e.caps.Expire(e.t, e.s, a)
	e.absent(a, "an expired row counts as absent")
	e.response(e.get(b).Response, answer("of b"), promise)
}

func answerBytes(e *env) {
	big := bytes.Repeat(allBytes(), 4096) // 1 MiB
	cases := map[string]dedup.Response{
		"zero":        {},
		"empty":       {Header: []byte{}, Body: []byte{}},
		"only code":   {Code: 204},
		"only header": {Code: 200, Header: []byte("h")},
		"only body":   {Code: 200, Body: []byte("b")},
		"all bytes":   {Code: 200, Header: allBytes(), Body: allBytes()},
		"one NUL":     {Code: 200, Header: []byte{0}, Body: []byte{0}},
		"spaces":      {Code: 200, Header: []byte(" h \r\n"), Body: []byte("  b \n\n")},
		"json":        {Code: 200, Body: []byte(`{"b":1,"a":12345678901234567890,"a":1.0 , "c":"\u00e9"}`)},
		"not UTF-8":   {Code: 200, Header: []byte("\xff\xfe"), Body: []byte("\xc3\x28")},
		"escapes":     {Code: 200, Header: []byte(`\x00\'"`), Body: []byte(`\\x41 \000 %s $1 ?`)},
		"1 MiB":       {Code: 200, Header: []byte("h"), Body: big},
		"max code":    {Code: math.MaxInt32},
		"min code":    {Code: math.MinInt32},
	}
	for name, want := range cases {
		promise := fmt.Sprintf("the store keeps an answer byte for byte (%s)", name)
		k := e.other("-" + name)
		e.completed(k, want)
		r := e.want(k, dedup.Completed, "the row was completed")
		e.response(r.Record.Response, want, promise)
		e.response(e.get(k).Response, want, promise)
		k = e.other("-resolved-" + name)
		e.unknown(k)
		e.ok(e.s.Resolve(e.ctx, k, &want, ttl), "Resolve", promise)
		e.response(e.get(k).Response, want, promise)
	}
}

func answerIsCopied(e *env) {
	given, print := answer("kept"), []byte("print")
	c := e.claimOf(e.key, dedup.NewToken())
	c.Fingerprint = print
	e.wantClaim(c, dedup.Won, "an absent key is won")
	copy(print, "XXXXX")
	e.complete(e.key, c.Token, dedup.StatusCompleted, given)
	copy(given.Body, "XXXX")
	copy(given.Header, "XXXX")
	c.Fingerprint = []byte("print")
	r := e.wantClaim(c, dedup.Completed, "a caller may reuse its slices after the call")
	e.response(r.Record.Response, answer("kept"), "a caller may reuse its slices after the call")
	copy(r.Record.Response.Body, "YYYY")
	copy(r.Record.Response.Header, "YYYY")
	got := e.get(e.key)
	e.response(got.Response, answer("kept"), "a caller may write to what it was given")
	copy(got.Response.Body, "ZZZZ")
	copy(got.Fingerprint, "ZZZZZ")
	e.response(e.get(e.key).Response, answer("kept"), "a caller may write to what it was given")
	e.wantClaim(c, dedup.Completed, "a caller may write to what it was given")
}
