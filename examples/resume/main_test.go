package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "resume")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	var out strings.Builder
	if err := run(t.Context(), program, &out); err != nil {
		t.Fatal(err)
	}
	const want = `the first process
  gives up after 3 attempts; the server may have acted: true
  has stored the key
  is killed
the second process
  goes on with the stored key
  is answered: charged
requests: 4, charges: 1
`
	if out.String() != want {
		t.Errorf("output\n%s\nwant\n%s", out.String(), want)
	}
}
