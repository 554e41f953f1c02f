package main

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

const childEnv = "CHAIN_TEST_SERVICE"

func TestOneOrderStaysOne(t *testing.T) {
	self := func(args ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^TestService$")
		cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(args, "\n"))
		return cmd
	}
	var out strings.Builder
	// run fails by itself where an order is not written exactly once by each.
	if err := run(t.Context(), &out, self); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if got := strings.Count(out.String(), "\n"); got != len(steps)+1 {
		t.Errorf("%d lines, want one a step:\n%s", got, out.String())
	}
}

// TestService is a service in a process of its own.
func TestService(t *testing.T) {
	args := strings.Split(os.Getenv(childEnv), "\n")
	if len(args) < 10 {
		return
	}
	crash, err := strconv.Atoi(args[9])
	if err != nil {
		t.Fatal(err)
	}
	s := &service{name: args[1], next: args[7], step: "next", crash: crash}
	t.Fatal(s.serve(context.Background(), args[3], args[5]))
}
