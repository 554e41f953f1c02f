package main

import (
	"bytes"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"testing"
)

func TestRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), "", &out); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	for _, want := range []string{
		`(?m)^0 +204 204 204 204 204 +1$`,
		`(?m)^1 +(204|503)( (204|503)){4} +1$`, // those that came while the first was under way are sent again later
		`(?m)^2 +500 204 204 204 204 +1$`,
		`(?m)^forged +403 +0$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no line like %s", want)
		}
	}
}

// What was refused is not marked: the true event is still processed.
func TestForgeryMarksNothing(t *testing.T) {
	t.Parallel()
	b, err := open(t.Context(), filepath.Join(t.TempDir(), "test.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer b.db.Close()
	srv := httptest.NewServer(b.endpoint())
	defer srv.Close()
	for _, d := range []struct {
		key  string
		want int
	}{{"whsec_bm90IHRoZSBzZWNyZXQgYXQgYWxs", 403}, {secret, 204}, {secret, 204}} {
		code, err := deliver(t.Context(), srv.URL, "msg_1", "in_1", d.key)
		if err != nil || code != d.want {
			t.Errorf("answer %d, %v; want %d", code, err, d.want)
		}
	}
	paid, err := b.payments(t.Context())
	if err != nil || paid["in_1"] != 1 {
		t.Errorf("paid %v, %v", paid, err)
	}
}
