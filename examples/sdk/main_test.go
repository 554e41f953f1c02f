package main

import (
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	const want = "charged 500 as ch_1\ncharged 700 as ch_2\nrequests: 6, charges: 2\n"
	if out.String() != want {
		t.Errorf("output %q, want %q", out.String(), want)
	}
}
