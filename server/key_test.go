package server_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/effectonce/idempotency/server"
)

func TestKeyHeader(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for _, tt := range []struct {
		name    string
		lines   []string
		want    string
		wantErr bool
	}{
		{name: "absent"},
		{name: "bare", lines: []string{"abc"}, want: "abc"},
		{name: "string item", lines: []string{`"abc"`}, want: "abc"},
		{name: "string item with escapes", lines: []string{`"a\"b\\c"`}, want: `a"b\c`},
		{name: "string item with parameters", lines: []string{`"abc";v=1`}, want: "abc"},
		{name: "white space around", lines: []string{" \tabc\t "}, want: "abc"},
		{name: "white space inside", lines: []string{"a b"}, want: "a b"},
		{name: "bare with comma and colon", lines: []string{"order:1,2"}, want: "order:1,2"},
		{name: "bare that looks like a byte sequence", lines: []string{":YWJj:"}, want: ":YWJj:"},
		{name: "bare with a quote inside", lines: []string{`a"b`}, want: `a"b`},
		{name: "bare UTF-8", lines: []string{"schlüssel"}, want: "schlüssel"},
		{name: "equal lines", lines: []string{"abc", "abc"}, want: "abc"},
		{name: "equal lines, spelt differently", lines: []string{`"abc"`, "abc"}, want: "abc"},
		{name: "longest", lines: []string{long}, want: long},
		{name: "longest string item", lines: []string{`"` + long + `"`}, want: long},

		{name: "empty", lines: []string{""}, wantErr: true},
		{name: "white space only", lines: []string{" \t "}, wantErr: true},
		{name: "empty string item", lines: []string{`""`}, wantErr: true},
		{name: "too long", lines: []string{long + "k"}, wantErr: true},
		{name: "too long in bytes", lines: []string{strings.Repeat("ü", 128)}, wantErr: true},
		{name: "control character", lines: []string{"a\x01b"}, wantErr: true},
		{name: "NUL", lines: []string{"a\x00"}, wantErr: true},
		{name: "DEL", lines: []string{"a\x7f"}, wantErr: true},
		{name: "tab inside", lines: []string{"a\tb"}, wantErr: true},
		{name: "C1 control character", lines: []string{"a\u0085b"}, wantErr: true},
		{name: "invalid UTF-8", lines: []string{"a\xff"}, wantErr: true},
		{name: "open string item", lines: []string{`"abc`}, wantErr: true},
		{name: "garbage after string item", lines: []string{`"abc"x`}, wantErr: true},
		{name: "list of string items", lines: []string{`"a", "b"`}, wantErr: true},
		{name: "differing lines", lines: []string{"a", "b"}, wantErr: true},
		{name: "lines that differ in case", lines: []string{"a", "A"}, wantErr: true},
		{name: "one empty line", lines: []string{"a", ""}, wantErr: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := server.KeyOf(http.Header{"Idempotency-Key": tt.lines}, "Idempotency-Key")
			if got != tt.want || (err != nil) != tt.wantErr {
				t.Errorf("keyOf(%q) = %q, %v; want %q, error %t", tt.lines, got, err, tt.want, tt.wantErr)
			}
			if err != nil && !errors.Is(err, server.ErrKey) {
				t.Errorf("error %v is not of the key", err)
			}
		})
	}
}

func TestKeyErrorDoesNotShowKey(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"secret\x01", `"secret`, strings.Repeat("secret", 99)} {
		_, err := server.KeyOf(http.Header{"Idempotency-Key": {line}}, "Idempotency-Key")
		if err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("error for %q: %v", line, err)
		}
	}
}

func FuzzKeyHeader(f *testing.F) {
	for _, s := range []string{"abc", `"abc"`, `"a\"b"`, `"a";p=?1`, "", `"`, "a\x00", "\xff", " x "} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		key, err := server.KeyOf(http.Header{"Idempotency-Key": {line}}, "Idempotency-Key")
		if err != nil {
			return
		}
		if key == "" || len(key) > 255 || !utf8.ValidString(key) || strings.IndexFunc(key, unicode.IsControl) >= 0 {
			t.Fatalf("accepted %q as %q", line, key)
		}
		// Its quoted spelling, where there is one, is the same key.
		for _, r := range key {
			if r > '~' {
				return
			}
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		again, err := server.KeyOf(http.Header{"Idempotency-Key": {quoted}}, "Idempotency-Key")
		if err != nil || again != key {
			t.Fatalf("%s is %q (%v), but %s is %q", line, key, err, quoted, again)
		}
	})
}
