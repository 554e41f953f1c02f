package dedup_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

func TestRunsOnceAndReplays(t *testing.T) {
	t.Parallel()
	e := &dedup.Engine{Store: memstore.New()}
	var a answers
	first := mustDo(t, e, request("f"), a.work("one"))
	wantAnswer(t, first, dedup.Won, "one")
	if !first.Stored || first.Attempt != 1 {
		t.Errorf("first outcome: %+v, want stored, attempt 1", first)
	}
	for range 3 {
		wantAnswer(t, mustDo(t, e, request("f"), a.work("two")), dedup.Completed, "one")
	}
	if a.count() != 1 {
		t.Errorf("work ran %d times", a.count())
	}
}

func TestConcurrentDuplicatesRunOnce(t *testing.T) {
	t.Parallel()
	for _, wait := range []time.Duration{0, 10 * time.Second} {
		e := &dedup.Engine{Store: memstore.New(), Wait: wait}
		var a answers
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() {
				out, err := e.Do(t.Context(), request("f"), a.work("one"))
				switch {
				case err != nil:
					t.Errorf("Do: %v", err)
				case out.State == dedup.InProgress && wait == 0 && out.RetryAfter > 0:
				case string(out.Response.Body) != "one":
					t.Errorf("outcome %+v", out)
				}
			})
		}
		all.Wait()
		if a.count() != 1 {
			t.Errorf("work ran %d times", a.count())
		}
	}
}

func TestMismatchComesFirst(t *testing.T) {
	t.Parallel()
	e := &dedup.Engine{Store: memstore.New(), Wait: time.Hour}
	mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		// While in progress, although the engine would wait for that.
		wantState(t, mustDo(t, e, request("other"), never(t)), dedup.Mismatch)
		return answer("one"), nil
	})
	wantState(t, mustDo(t, e, request("other"), never(t)), dedup.Mismatch)
}

func TestOlderFingerprintStillMatches(t *testing.T) {
	t.Parallel()
	e := &dedup.Engine{Store: memstore.New()}
	mustDo(t, e, request("v1"), new(answers).work("one"))
	r := request("v2")
	r.Matches = func(stored []byte) bool { return string(stored) == "v1" }
	wantAnswer(t, mustDo(t, e, r, never(t)), dedup.Completed, "one")
	r.Matches = func(stored []byte) bool { return false }
	wantState(t, mustDo(t, e, r, never(t)), dedup.Mismatch)
}

func TestHeartbeatKeepsTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := &dedup.Engine{Store: memstore.New(), Lease: 3 * time.Second, Abandoned: dedup.Reexecute}
		out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
			for range 20 {
				time.Sleep(time.Second)
				wantState(t, mustDo(t, e, request("f"), never(t)), dedup.InProgress)
			}
			return answer("slow"), ctx.Err()
		})
		wantAnswer(t, out, dedup.Won, "slow")
	})
}

func TestLostLeaseEndsTheWork(t *testing.T) {
	t.Parallel()
	faults := map[string]error{
		"told so":                      dedup.ErrLeaseLost,
		"store silent until lease end": errDown,
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newFaulty()
				s.failBefore("Renew", always(fault))
				e := &dedup.Engine{Store: s, Lease: 3 * time.Second}
				began := time.Now()
				out, err := e.Do(t.Context(), request("f"), func(ctx context.Context) (dedup.Answer, error) {
					<-ctx.Done()
					if cause := context.Cause(ctx); !errors.Is(cause, dedup.ErrLeaseLost) {
						t.Errorf("cause is %v, want ErrLeaseLost", cause)
					}
					return answer("too late"), nil
				})
				if !errors.Is(err, dedup.ErrLeaseLost) || out.State != 0 {
					t.Fatalf("Do = %+v, %v; want no outcome and ErrLeaseLost", out, err)
				}
				if d := time.Since(began); d > 3*time.Second {
					t.Errorf("the work went on for %v on a lease of 3s", d)
				}
				if n := s.count("Complete"); n != 0 {
					t.Errorf("the answer was stored %d times", n)
				}
			})
		})
	}
}

func TestPassingRenewErrorIsSurvived(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaulty()
		s.failBefore("Renew", times(2, errDown))
		e := &dedup.Engine{Store: s, Lease: 3 * time.Second}
		out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
			time.Sleep(10 * time.Second)
			return answer("done"), ctx.Err()
		})
		wantAnswer(t, out, dedup.Won, "done")
	})
}

// A process that stood still wakes up after its lease: its answer must neither
// be stored over the other's nor given out.
func TestSleeperIsFenced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaulty()
		slow := &dedup.Engine{Store: s, Lease: 3 * time.Second}
		other := &dedup.Engine{Store: s, Lease: 3 * time.Second, Abandoned: dedup.Reexecute}
		out, err := slow.Do(t.Context(), request("f"), func(ctx context.Context) (dedup.Answer, error) {
			s.failBefore("Renew", always(errDown)) // stands for a pause of the process
			time.Sleep(4 * time.Second)
			s.failBefore("Renew", nil)
			out := mustDo(t, other, request("f"), new(answers).work("other"))
			if out.Attempt != 2 {
				t.Errorf("attempt is %d, want 2", out.Attempt)
			}
			return answer("mine"), nil
		})
		if !errors.Is(err, dedup.ErrLeaseLost) {
			t.Fatalf("Do = %+v, %v; want ErrLeaseLost", out, err)
		}
		wantAnswer(t, mustDo(t, other, request("f"), never(t)), dedup.Completed, "other")
	})
}

// The same without a heartbeat to notice it: the store's token check decides.
func TestCompletionIsFenced(t *testing.T) {
	t.Parallel()
	s := memstore.New()
	e := &dedup.Engine{Store: s}
	out, err := e.Do(t.Context(), request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if err := s.Resolve(ctx, testKey, nil, time.Hour); !errors.Is(err, dedup.ErrNotResolvable) {
			t.Errorf("a live row was resolved: %v", err)
		}
		rec, err := s.Get(ctx, testKey)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Renew(ctx, testKey, rec.Token, 0); err != nil {
			t.Fatal(err)
		}
		other := &dedup.Engine{Store: s, Abandoned: dedup.Reexecute}
		wantAnswer(t, mustDo(t, other, request("f"), new(answers).work("other")), dedup.Won, "other")
		return answer("mine"), nil
	})
	if !errors.Is(err, dedup.ErrLeaseLost) || out.State != 0 {
		t.Fatalf("Do = %+v, %v; want no outcome and ErrLeaseLost", out, err)
	}
}

// abandon leaves a row behind as a process does that dies at its work.
func abandon(t *testing.T, s dedup.Store) {
	t.Helper()
	ctx, c := t.Context(), dedup.Claim{Key: testKey, Fingerprint: []byte("f"), Token: dedup.NewToken(), Lease: time.Minute, TTL: time.Hour}
	if res, err := s.Claim(ctx, c); err != nil || res.State != dedup.Won {
		t.Fatalf("Claim = %+v, %v", res, err)
	}
	if err := s.Renew(ctx, testKey, c.Token, 0); err != nil {
		t.Fatal(err)
	}
}

func TestAbandonedFail(t *testing.T) {
	t.Parallel()
	s := memstore.New()
	abandon(t, s)
	e := &dedup.Engine{Store: s}
	for range 2 {
		wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
	}
	if err := s.Resolve(t.Context(), testKey, &dedup.Response{Code: 200, Body: []byte("found")}, time.Hour); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Completed, "found")
}

func TestAbandonedReexecute(t *testing.T) {
	t.Parallel()
	s := memstore.New()
	abandon(t, s)
	e := &dedup.Engine{Store: s, Abandoned: dedup.Reexecute}
	out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if n := dedup.Attempt(ctx); n != 2 {
			t.Errorf("Attempt is %d, want 2", n)
		}
		return answer("again"), nil
	})
	wantAnswer(t, out, dedup.Won, "again")
}

func TestAbandonedRecover(t *testing.T) {
	t.Parallel()
	s := memstore.New()
	abandon(t, s)
	known := false
	e := &dedup.Engine{
		Store: s, Abandoned: dedup.Recover,
		Recover: func(ctx context.Context, key dedup.Key, rec dedup.Record) (dedup.Response, error) {
			if key != testKey || rec.Attempt < 2 {
				t.Errorf("Recover was given %v, %+v", key, rec)
			}
			if !known {
				return dedup.Response{}, errDown
			}
			return dedup.Response{Code: 200, Body: []byte("recovered")}, nil
		},
	}
	if _, err := e.Do(t.Context(), request("f"), never(t)); !errors.Is(err, errDown) {
		t.Fatalf("Do: %v, want Recover's error", err)
	}
	known = true
	wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Won, "recovered")
	wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Completed, "recovered")
}

func TestWorkErrorIsNotAnAnswer(t *testing.T) {
	t.Parallel()
	e := &dedup.Engine{Store: memstore.New()}
	fail := func(context.Context) (dedup.Answer, error) { return dedup.Answer{}, errDown }
	if _, err := e.Do(t.Context(), request("f"), fail); !errors.Is(err, errDown) {
		t.Fatalf("Do: %v", err)
	}
	// Nobody knows how far it came, and the next request is told so at once.
	wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
}

func TestNotExecutedFreesTheKey(t *testing.T) {
	t.Parallel()
	works := map[string]dedup.Work{
		"by the context": func(ctx context.Context) (dedup.Answer, error) {
			dedup.NotExecuted(ctx)
			return answer("shed"), nil
		},
		"by the answer": func(ctx context.Context) (dedup.Answer, error) {
			ans := answer("shed")
			ans.Free = true
			return ans, nil
		},
	}
	for name, work := range works {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := &dedup.Engine{Store: memstore.New()}
			out := mustDo(t, e, request("f"), work)
			wantAnswer(t, out, dedup.Won, "shed")
			if out.Stored {
				t.Error("the answer counts as stored")
			}
			out = mustDo(t, e, request("f"), new(answers).work("done"))
			wantAnswer(t, out, dedup.Won, "done")
			if out.Attempt != 1 {
				t.Errorf("attempt is %d, want 1: nothing had happened", out.Attempt)
			}
		})
	}
}

func TestRollbackNeedsATransaction(t *testing.T) {
	t.Parallel()
	if err := dedup.Rollback(t.Context()); !errors.Is(err, dedup.ErrNoTransaction) {
		t.Errorf("outside: %v", err)
	}
	e := &dedup.Engine{Store: memstore.New()}
	out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if err := dedup.Rollback(ctx); !errors.Is(err, dedup.ErrNoTransaction) {
			t.Errorf("in lease mode: %v", err)
		}
		return answer("kept"), nil
	})
	if !out.Stored {
		t.Error("an effect that can't be taken back was forgotten")
	}
}

func TestPanicEndsTheLease(t *testing.T) {
	t.Parallel()
	leave := map[string]func(){
		"panic":  func() { panic("boom") },
		"goexit": runtime.Goexit,
	}
	for name, leave := range leave {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := &dedup.Engine{Store: memstore.New()}
			var recovered any
			var wg sync.WaitGroup
			wg.Go(func() {
				defer func() { recovered = recover() }()
				_, _ = e.Do(t.Context(), request("f"), func(context.Context) (dedup.Answer, error) {
					leave()
					return dedup.Answer{}, nil
				})
				t.Error("Do returned")
			})
			wg.Wait()
			if name == "panic" && recovered != "boom" {
				t.Errorf("recovered %v, want the work's panic", recovered)
			}
			wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
		})
	}
}

func TestCallerGoneDoesNotStopTheWork(t *testing.T) {
	t.Parallel()
	e := &dedup.Engine{Store: memstore.New()}
	ctx, cancel := context.WithCancel(t.Context())
	out, err := e.Do(ctx, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		cancel()
		return answer("done"), ctx.Err()
	})
	if err != nil {
		t.Fatalf("Do: %v", err)
	}
	wantAnswer(t, out, dedup.Won, "done")
	wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Completed, "done")
}

func TestLimitEndsTheWorkAndItsLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := &dedup.Engine{Store: memstore.New(), Lease: 3 * time.Second, Limit: 10 * time.Second}
		out, err := e.Do(t.Context(), request("f"), func(ctx context.Context) (dedup.Answer, error) {
			<-ctx.Done()
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				t.Errorf("err is %v, want the deadline's", ctx.Err())
			}
			wantState(t, mustDo(t, e, request("f"), never(t)), dedup.InProgress)
			time.Sleep(4 * time.Second) // work that does not heed its context
			wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
			return answer("too late"), nil
		})
		if !errors.Is(err, dedup.ErrLeaseLost) {
			t.Fatalf("Do = %+v, %v; want ErrLeaseLost", out, err)
		}
	})
}
