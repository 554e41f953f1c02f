package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	got = got[1:]
	derived := strings.Fields(got[2])[6] // after "PUT to a derived id 200"
	derived = strings.TrimSpace(derived)
	d := derived + " d@example.com v1"
	want := []string{
		"PUT to a chosen id 200 alice a@example.com v1",
		"PUT to a chosen id 200 alice a@example.com v1",
		"PUT to a derived id 200 " + d + ", alice a@example.com v1",
		"PUT to a derived id 200 " + d + ", alice a@example.com v1",
		"PUT sets, adds nothing 200 " + d + ", alice b@example.com v2",
		"PUT sets, adds nothing 200 " + d + ", alice b@example.com v2",
		"PUT if version 2 200 " + d + ", alice c@example.com v3",
		"PUT if version 2 412 " + d + ", alice c@example.com v3",
		"PUT by who saw version 1 412 " + d + ", alice c@example.com v3",
		"PUT by who saw version 1 412 " + d + ", alice c@example.com v3",
		"DELETE 204 " + d,
		"DELETE 204 " + d,
	}
	for i := range want {
		if i >= len(got) || got[i] != want[i] {
			t.Errorf("line %d: %q, want %q", i, got[min(i, len(got)-1)], want[i])
		}
	}
}
