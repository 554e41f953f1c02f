package etag_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/effectonce/idempotency/etag"
)

func parse(t *testing.T, s string) etag.Tag {
	t.Helper()
	tag, err := etag.Parse(s)
	if err != nil {
		t.Fatalf("Parse(%q): %v", s, err)
	}
	return tag
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		in, opaque string
		weak, bad  bool
	}{
		{in: `"xyzzy"`, opaque: "xyzzy"},
		{in: `W/"xyzzy"`, opaque: "xyzzy", weak: true},
		{in: `""`, opaque: ""},
		{in: `W/""`, weak: true},
		{in: " \t\"a\" ", opaque: "a"},
		{in: `"a,b"`, opaque: "a,b"},
		{in: `"a\"`, opaque: `a\`}, // a backslash escapes nothing
		{in: `"W/"`, opaque: "W/"},
		{in: "\"caf\xe9\"", opaque: "caf\xe9"}, // obs-text, not valid UTF-8
		{in: `"é"`, opaque: "é"},
		{in: `*`, bad: true},
		{in: ``, bad: true},
		{in: `abc`, bad: true},
		{in: `"`, bad: true},
		{in: `W/`, bad: true},
		{in: `w/"a"`, bad: true},
		{in: `W /"a"`, bad: true},
		{in: `"a b"`, bad: true},
		{in: "\"a\x7fb\"", bad: true},
		{in: "\"a\x00\"", bad: true},
		{in: `"a"b"`, bad: true},
		{in: `"a", "b"`, bad: true},
	} {
		tag, err := etag.Parse(tc.in)
		if tc.bad {
			if !errors.Is(err, etag.ErrInvalid) || !tag.IsZero() {
				t.Errorf("Parse(%q) = %v, %v; want ErrInvalid", tc.in, tag, err)
			}
			continue
		}
		if err != nil || tag.Opaque() != tc.opaque || tag.IsWeak() != tc.weak || tag.IsZero() ||
			tag.String() != strings.Trim(tc.in, " \t") {
			t.Errorf("Parse(%q) = %v (opaque %q, weak %v), %v", tc.in, tag, tag.Opaque(), tag.IsWeak(), err)
		}
	}
}

func TestNewRefusesWhatATagCannotHold(t *testing.T) {
	t.Parallel()
	if tag, err := etag.New(`a,b\`); err != nil || tag.String() != `"a,b\"` {
		t.Errorf("New = %v, %v", tag, err)
	}
	for _, s := range []string{`a"b`, "a b", "a\n"} {
		if _, err := etag.New(s); !errors.Is(err, etag.ErrInvalid) {
			t.Errorf("New(%q): %v; want ErrInvalid", s, err)
		}
	}
}

// The table of RFC 9110, section 8.8.3.2, and none.
func TestComparison(t *testing.T) {
	t.Parallel()
	var none etag.Tag
	one, two := etag.FromVersion(1), etag.FromVersion(2)
	for _, tc := range []struct {
		a, b         etag.Tag
		strong, weak bool
	}{
		{one.Weaken(), one.Weaken(), false, true},
		{one.Weaken(), two.Weaken(), false, false},
		{one.Weaken(), one, false, true},
		{one, one, true, true},
		{one, two, false, false},
		{none, none, false, false},
		{none, parse(t, `""`), false, false},
		{none.Weaken(), none, false, false},
	} {
		for range 2 {
			if got := etag.StrongMatch(tc.a, tc.b); got != tc.strong {
				t.Errorf("StrongMatch(%v, %v) = %v", tc.a, tc.b, got)
			}
			if got := etag.WeakMatch(tc.a, tc.b); got != tc.weak {
				t.Errorf("WeakMatch(%v, %v) = %v", tc.a, tc.b, got)
			}
			tc.a, tc.b = tc.b, tc.a
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	for _, v := range []int64{0, 1, -1, math.MaxInt64, math.MinInt64} {
		if got, ok := etag.FromVersion(v).Version(); !ok || got != v {
			t.Errorf("FromVersion(%d).Version() = %d, %v", v, got, ok)
		}
	}
	for _, s := range []string{`W/"1"`, `"01"`, `"+1"`, `"1a"`, `""`, `"9223372036854775808"`} {
		if v, ok := parse(t, s).Version(); ok {
			t.Errorf("%s has version %d", s, v)
		}
	}
	if v, ok := (etag.Tag{}).Version(); ok {
		t.Errorf("no tag has version %d", v)
	}
}

func TestFromContent(t *testing.T) {
	t.Parallel()
	a, b := etag.FromContent([]byte("a")), etag.FromContent([]byte("b"))
	if a == b || a != etag.FromContent([]byte("a")) || parse(t, a.String()) != a {
		t.Errorf("tags of a and b: %v, %v", a, b)
	}
}

func TestParseList(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		lines []string
		want  string
		n     int
		bad   bool
	}{
		{lines: nil, want: ""},
		{lines: []string{`*`}, want: "*"},
		{lines: []string{` * `}, want: "*"},
		{lines: []string{`"a"`}, want: `"a"`, n: 1},
		{lines: []string{`"a", W/"b" ,"c"`}, want: `"a", W/"b", "c"`, n: 3},
		{lines: []string{`"a"`, `"b"`}, want: `"a", "b"`, n: 2},
		{lines: []string{`"a,b", "c"`}, want: `"a,b", "c"`, n: 2},
		{lines: []string{`, "a",, ,"b",`}, want: `"a", "b"`, n: 2},
		{lines: []string{"", `"a"`}, want: `"a"`, n: 1},
		{lines: []string{"\"\xff\""}, want: "\"\xff\"", n: 1},
		{lines: []string{`"*"`}, want: `"*"`, n: 1},
		{lines: []string{""}, bad: true},
		{lines: []string{" , "}, bad: true},
		{lines: []string{`*, "a"`}, bad: true},
		{lines: []string{`"a"`, `*`}, bad: true},
		{lines: []string{`*, *`}, bad: true},
		{lines: []string{`**`}, bad: true},
		{lines: []string{`"a" "b"`}, bad: true},
		{lines: []string{`"a""b"`}, bad: true},
		{lines: []string{`"a";"b"`}, bad: true},
		{lines: []string{`"a", b`}, bad: true},
		{lines: []string{`"a`, `b"`}, bad: true}, // a tag ends in its line
	} {
		l, err := etag.ParseList(tc.lines)
		if tc.bad {
			if !errors.Is(err, etag.ErrInvalid) || !l.IsZero() {
				t.Errorf("ParseList(%q) = %v, %v; want ErrInvalid", tc.lines, l, err)
			}
			continue
		}
		if err != nil || l.String() != tc.want || len(l.Tags) != tc.n || l.Any != (tc.want == "*") {
			t.Errorf("ParseList(%q) = %v, %v", tc.lines, l, err)
		}
	}
}

// What is accepted comes out the same when it is written and read again, and
// has no tag that Parse would not take.
func FuzzParseList(f *testing.F) {
	for _, s := range []string{`*`, `"a", W/"b"`, `"a,b"`, "\"\xe9\"", `,,"a" ,`, `"a`, `w/"a"`, `"a" "b"`, `*, "a"`, "\"a\"\n\"b\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		lines := strings.Split(s, "\n")
		l, err := etag.ParseList(lines)
		if err != nil {
			if !errors.Is(err, etag.ErrInvalid) || !l.IsZero() {
				t.Fatalf("ParseList(%q) = %v, %v", lines, l, err)
			}
			return
		}
		if l.IsZero() || l.Any && len(l.Tags) > 0 {
			t.Fatalf("ParseList(%q) = %+v", lines, l)
		}
		again, err := etag.ParseList([]string{l.String()})
		if err != nil || again.Any != l.Any || !slices.Equal(again.Tags, l.Tags) {
			t.Fatalf("ParseList(%q) = %v, and again %v, %v", lines, l, again, err)
		}
		for _, tag := range l.Tags {
			if got, err := etag.Parse(tag.String()); err != nil || got != tag {
				t.Fatalf("Parse(%q) = %v, %v", tag.String(), got, err)
			}
			if !strings.Contains(s, tag.String()) {
				t.Fatalf("%v is not in %q", tag, s)
			}
		}
	})
}
