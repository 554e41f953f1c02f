package consumer_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/effectonce/idempotency/consumer"
)

// childVariable names what a child process is to handle.
const childVariable = "CONSUMER_TEST_CHILD"

// TestChild is the other process of the tests of crashes: it handles an event,
// says so in the middle of it, and waits to be killed.
func TestChild(t *testing.T) {
	spec := os.Getenv(childVariable)
	if spec == "" {
		t.Skip("runs as a child of TestKilled")
	}
	var p place
	must(t, json.Unmarshal([]byte(spec), &p))
	f := openFixture(t, p, false)
	last := cmp.Or(os.Getenv(stepVariable), "written")
	step := func(name string) {
		if name == last {
			os.Stdout.WriteString("handling\n")
			select {} // until the end
		}
	}
	step("received")
	r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
		step("marked")
		must(t, f.write(ctx, "e1"))
		step("written")
		return nil
	})
	step("committed")
	os.Stdout.WriteString("result " + r.Status.String() + "\n")
}

// stepVariable names the step that the child waits at.
const stepVariable = "CONSUMER_TEST_STEP"

// killed handles the event in another process, and kills that in the middle of
// the handler. It returns false if the handler did not run.
func killed(t *testing.T, f *fixture) bool {
	t.Helper()
	return killedAt(t, f, "written")
}

func killedAt(t *testing.T, f *fixture, step string) bool {
	t.Helper()
	spec, err := json.Marshal(f.place)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec), stepVariable+"="+step)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer cmd.Wait()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		switch line := lines.Text(); line {
		case "handling":
			must(t, cmd.Process.Signal(syscall.SIGKILL))
			return true
		case "result busy", "result poison":
			return false
		}
	}
	t.Fatalf("the child said nothing: %v", lines.Err())
	return false
}

// eventually handles the event until it is not busy any more: locks and leases
// of the dead take a while to end.
func eventually(t *testing.T, f *fixture, fn consumer.Handler) consumer.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		r := f.consumer("g").Handle(t.Context(), "e1", fn)
		if r.Status != consumer.Busy {
			return r
		}
		select {
		case <-ctx.Done():
			t.Fatalf("still busy: %v", r.Err)
		case <-time.After(r.RetryAfter / 4):
		}
	}
}

// A process that is killed between the handler's write and the mark's commit
// leaves neither: the redelivery has the one effect.
func TestKilledInTransaction(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		for range 2 {
			if !killed(t, f) {
				t.Fatal("the handler did not run")
			}
			f.wantEffects(t, nil)
			// Until the database has noticed.
			wantStatus(t, eventually(t, f, func(context.Context) error { return errHandler }), consumer.Failed)
		}
		wantStatus(t, eventually(t, f, func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}

// Killed at each step of consuming an event: its redelivery finds it done, or
// does it, and there is one effect.
func TestKilledAtEveryStep(t *testing.T) {
	for _, step := range []string{"received", "marked", "written", "committed"} {
		t.Run(step, func(t *testing.T) {
			over(t, inboxKinds, func(t *testing.T, f *fixture) {
				if !killedAt(t, f, step) {
					t.Fatal("the child did not come that far")
				}
				r := eventually(t, f, func(ctx context.Context) error { return f.write(ctx, "e1") })
				wantStatus(t, r, consumer.Done)
				if r.Duplicate != (step == "committed") {
					t.Errorf("duplicate: %t", r.Duplicate)
				}
				f.wantEffects(t, map[string]int{"e1": 1})
			})
		})
	}
}

// Starts are counted before the handler runs: an event that takes its process
// down every time becomes poison.
func TestCrashLoopStopsAtTheLimit(t *testing.T) {
	over(t, []string{"lease/postgres", "lease/pgx", "lease/mysql", "lease/sqlite", "lease/redis"}, func(t *testing.T, f *fixture) {
		starts := 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for starts < 3 && ctx.Err() == nil { // the lease of the dead lasts a while
			if killed(t, f) {
				starts++
			}
		}
		if starts != 3 {
			t.Fatalf("%d starts", starts)
		}
		r := eventually(t, f, func(context.Context) error {
			t.Error("started once more than the limit")
			return nil
		})
		wantStatus(t, r, consumer.Poison)
		if r.Attempt != 3 {
			t.Errorf("attempt %d, want 3", r.Attempt)
		}
		// The dead letter is sent again once its cause is mended.
		must(t, f.consumer("g").(*consumer.Lease).Reset(t.Context(), "e1"))
		wantStatus(t, f.consumer("g").Handle(t.Context(), "e1", nothing), consumer.Done)
	})
}

// In window mode the lease of the dead ends, and the redelivery is handled.
func TestKilledInWindow(t *testing.T) {
	over(t, []string{"window/redis"}, func(t *testing.T, f *fixture) {
		if !killed(t, f) {
			t.Fatal("the handler did not run")
		}
		wantStatus(t, eventually(t, f, func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}
