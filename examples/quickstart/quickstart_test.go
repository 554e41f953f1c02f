package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func quickConfig(t *testing.T, args ...string) config {
	t.Helper()
	cfg, err := parse(append([]string{"-n", "60", "-max-delay", "3ms"}, args...), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestNoDoubleAndNoLostCharges(t *testing.T) {
	for _, seed := range []string{"1", "2", "3"} {
		var out strings.Builder
		// run itself fails if a charge was lost or doubled with keys.
		if err := run(t.Context(), quickConfig(t, "-seed", seed), &out); err != nil {
			t.Fatalf("seed %s: %v\n%s", seed, err, out.String())
		}
		for line := range strings.Lines(out.String()) {
			f := strings.Fields(line)
			if len(f) == 4 && f[0] == "double" && (f[2] != "0" || f[3] == "0") {
				t.Errorf("seed %s: double charges %s with keys and %s without; want none, and some", seed, f[2], f[3])
			}
		}
		if !strings.Contains(out.String(), "double charges") {
			t.Errorf("no table in:\n%s", out.String())
		}
	}
}

// A process that is killed half way, and a second one on the same file.
func TestGoesOnAfterSIGKILL(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ledger.db")
	cfg := quickConfig(t, "-db", file, "-contrast=false", "-n", "200")
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), childEnv+"="+file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	waitForCharges(ctx, t, file, 20)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	var out strings.Builder
	if err := run(t.Context(), cfg, &out); err != nil {
		t.Fatalf("second run: %v\n%s", err, out.String())
	}
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); strings.HasPrefix(line, "charged by an earlier run") && f[len(f)-1] == "0" {
			t.Error("the second run found nothing of the first")
		}
	}
}

const childEnv = "QUICKSTART_TEST_FILE"

// TestChild is the process that TestGoesOnAfterSIGKILL kills.
func TestChild(t *testing.T) {
	file := os.Getenv(childEnv)
	if file == "" {
		return
	}
	_ = run(t.Context(), quickConfig(t, "-db", file, "-contrast=false", "-n", "200", "-max-delay", "50ms"), io.Discard)
}

func waitForCharges(ctx context.Context, t *testing.T, file string, want int) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(file); err == nil {
			if b, _, err := openBank(ctx, file); err == nil {
				n, err := b.effects(ctx, "order-")
				b.db.Close()
				if err == nil && len(n) >= want {
					return
				}
			}
		}
		select {
		case <-ctx.Done():
			t.Fatal("the first run charged nothing")
		case <-tick.C:
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	file := filepath.Join(t.TempDir(), "ledger.db")
	err := run(ctx, quickConfig(t, "-db", file), io.Discard)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("run: %v, want context.Canceled", err)
	}
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"-n", "0"}, {"-c", "0"}, {"-cut-body", "1.5"}, {"-drop-answer", "NaN"}, {"-max-delay", "-1s"}, {"extra"}, {"-nonsense"}} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("%v was accepted", args)
		}
	}
}
