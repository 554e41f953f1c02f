package dedup_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

func TestClaimWhoseAnswerWasLost(t *testing.T) {
	t.Parallel()
	s := newFaulty()
	s.failAfter("Claim", times(1, errDown))
	e := &dedup.Engine{Store: s}
	out := mustDo(t, e, request("f"), new(answers).work("one"))
	wantAnswer(t, out, dedup.Won, "one")
	if out.Attempt != 1 {
		t.Errorf("attempt is %d, want 1", out.Attempt)
	}
}

// An operation that never ran must not look like one that crashed.
func TestClaimThatIsNeverAnsweredLeavesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaulty()
		s.failAfter("Claim", always(errDown))
		e := &dedup.Engine{Store: s}
		if _, err := e.Do(t.Context(), request("f"), never(t)); !errors.Is(err, errDown) {
			t.Fatalf("Do: %v, want the store's error", err)
		}
		s.failAfter("Claim", nil)
		wantAnswer(t, mustDo(t, e, request("f"), new(answers).work("one")), dedup.Won, "one")
	})
}

// The same where it is the caller who goes away.
func TestClaimCutByTheCallerLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newFaulty()
	ctx, cancel := context.WithCancel(t.Context())
	s.failAfter("Claim", func() error { cancel(); return ctx.Err() })
	e := &dedup.Engine{Store: s}
	if _, err := e.Do(ctx, request("f"), never(t)); !errors.Is(err, context.Canceled) {
		t.Fatalf("Do: %v, want context.Canceled", err)
	}
	s.failAfter("Claim", nil)
	wantAnswer(t, mustDo(t, e, request("f"), new(answers).work("one")), dedup.Won, "one")
}

// silent is a store that never answers a claim.
type silent struct{ dedup.TxStore }

func (silent) Claim(ctx context.Context, _ dedup.Claim) (dedup.Result, error) {
	<-ctx.Done()
	return dedup.Result{}, ctx.Err()
}

func (silent) Begin(ctx context.Context, _ dedup.Claim) (dedup.Tx, dedup.Result, error) {
	<-ctx.Done()
	return nil, dedup.Result{}, ctx.Err()
}

// Over a network that swallows everything the caller has an answer within a
// lease, not after all the time that the work could have taken.
func TestSilentStoreIsGivenUp(t *testing.T) {
	t.Parallel()
	for _, mode := range []dedup.Mode{dedup.Lease, dedup.Transaction} {
		synctest.Test(t, func(t *testing.T) {
			s, _ := newTx()
			e := &dedup.Engine{Store: silent{s}, Mode: mode, Lease: 30 * time.Second}
			began := time.Now()
			_, err := e.Do(t.Context(), request("f"), never(t))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: Do = %v, want context.DeadlineExceeded", mode, err)
			}
			if took := time.Since(began); took > 31*time.Second {
				t.Errorf("%v: it took %v", mode, took)
			}
		})
	}
}

func TestBusyStoreIsNotAskedAgain(t *testing.T) {
	t.Parallel()
	s := newFaulty()
	s.failBefore("Claim", always(dedup.ErrBusy))
	e := &dedup.Engine{Store: s}
	if _, err := e.Do(t.Context(), request("f"), never(t)); !errors.Is(err, dedup.ErrBusy) {
		t.Fatalf("Do: %v, want ErrBusy", err)
	}
	if n := s.count("Claim"); n != 1 {
		t.Errorf("%d claims, want 1", n)
	}
}

func TestCompletionIsRetried(t *testing.T) {
	t.Parallel()
	for name, inject := range map[string]func(*faultyStore, string, func() error){
		"failed before": (*faultyStore).failBefore,
		"answer lost":   (*faultyStore).failAfter,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newFaulty()
				inject(s, "Complete", times(3, errDown))
				e := &dedup.Engine{Store: s}
				wantAnswer(t, mustDo(t, e, request("f"), new(answers).work("one")), dedup.Won, "one")
				wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Completed, "one")
			})
		})
	}
}

// What is not stored is not given out: a later request would get another
// answer.
func TestUnstoredAnswerIsNotGivenOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaulty()
		s.failBefore("Complete", always(errDown))
		e := &dedup.Engine{Store: s, Lease: 3 * time.Second}
		began := time.Now()
		out, err := e.Do(t.Context(), request("f"), new(answers).work("one"))
		if !errors.Is(err, dedup.ErrNotStored) || !errors.Is(err, errDown) {
			t.Fatalf("Do: %v, want ErrNotStored with the store's error", err)
		}
		if out.State != 0 || out.Response.Body != nil {
			t.Errorf("outcome %+v, want none", out)
		}
		if d := time.Since(began); d > 4*time.Second {
			t.Errorf("gave up after %v on a lease of 3s", d)
		}
		s.failBefore("Complete", nil)
		time.Sleep(3 * time.Second)
		wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
	})
}

func TestWaiterGetsTheAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New()
		here := &dedup.Engine{Store: s, Wait: time.Minute}
		// Hides the store's Watch: this one has to poll.
		elsewhere := &dedup.Engine{Store: struct{ dedup.Store }{s}, Wait: time.Minute}
		results := make(chan dedup.Outcome)
		out := mustDo(t, here, request("f"), func(ctx context.Context) (dedup.Answer, error) {
			for _, e := range []*dedup.Engine{here, here, elsewhere} {
				go func() {
					out, err := e.Do(t.Context(), request("f"), never(t))
					if err != nil {
						t.Errorf("Do: %v", err)
					}
					results <- out
				}()
			}
			time.Sleep(5 * time.Second)
			return answer("one"), nil
		})
		wantAnswer(t, out, dedup.Won, "one")
		for range 3 {
			wantAnswer(t, <-results, dedup.Completed, "one")
		}
	})
}

// A waiter takes over where the run that it waited for left the key free.
func TestWaiterRunsWhatWasNotExecuted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := &dedup.Engine{Store: memstore.New(), Wait: time.Minute}
		result := make(chan dedup.Outcome)
		mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
			go func() { result <- mustDo(t, e, request("f"), new(answers).work("second")) }()
			time.Sleep(time.Second)
			dedup.NotExecuted(ctx)
			return answer("first"), nil
		})
		wantAnswer(t, <-result, dedup.Won, "second")
	})
}

func TestWaitEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := &dedup.Engine{Store: memstore.New(), Wait: 2 * time.Second}
		mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
			began := time.Now()
			out := mustDo(t, e, request("f"), never(t))
			wantState(t, out, dedup.InProgress)
			if d := time.Since(began); d != 2*time.Second {
				t.Errorf("waited %v, want 2s", d)
			}
			if out.RetryAfter <= 0 || out.RetryAfter > time.Second {
				t.Errorf("RetryAfter is %v", out.RetryAfter)
			}
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if _, err := e.Do(ctx, request("f"), never(t)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Do with an ended context: %v", err)
			}
			return answer("one"), nil
		})
	})
}

func TestInvalidUseIsRefused(t *testing.T) {
	t.Parallel()
	s := memstore.New()
	long := string(make([]byte, dedup.MaxKeyLength+1))
	tests := map[string]struct {
		engine  *dedup.Engine
		request dedup.Request
		want    error
	}{
		"no store":         {&dedup.Engine{}, request("f"), dedup.ErrConfig},
		"negative lease":   {&dedup.Engine{Store: s, Lease: -1}, request("f"), dedup.ErrConfig},
		"no transactions":  {&dedup.Engine{Store: s, Mode: dedup.Transaction}, request("f"), dedup.ErrConfig},
		"unknown mode":     {&dedup.Engine{Store: s, Mode: 9}, request("f"), dedup.ErrConfig},
		"unknown policy":   {&dedup.Engine{Store: s, Abandoned: 9}, request("f"), dedup.ErrConfig},
		"no Recover":       {&dedup.Engine{Store: s, Abandoned: dedup.Recover}, request("f"), dedup.ErrConfig},
		"long fingerprint": {&dedup.Engine{Store: s}, request(long), dedup.ErrConfig},
		"empty id":         {&dedup.Engine{Store: s}, dedup.Request{}, dedup.ErrInvalidKey},
		"long id":          {&dedup.Engine{Store: s}, dedup.Request{Key: dedup.Key{ID: long}}, dedup.ErrInvalidKey},
		"long scope":       {&dedup.Engine{Store: s}, dedup.Request{Key: dedup.Key{Scope: long, ID: "k"}}, dedup.ErrInvalidKey},
		"NUL":              {&dedup.Engine{Store: s}, dedup.Request{Key: dedup.Key{ID: "a\x00b"}}, dedup.ErrInvalidKey},
		"not UTF-8":        {&dedup.Engine{Store: s}, dedup.Request{Key: dedup.Key{ID: "\xff"}}, dedup.ErrInvalidKey},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := tt.engine.Do(t.Context(), tt.request, never(t)); !errors.Is(err, tt.want) {
				t.Errorf("Do: %v, want %v", err, tt.want)
			}
		})
	}
}

func TestPurger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFaulty()
		e := &dedup.Engine{Store: s, TTL: time.Hour}
		for i := range 25 {
			r := dedup.Request{Key: dedup.Key{ID: string(rune('a' + i))}}
			mustDo(t, e, r, new(answers).work("x"))
		}
		s.failBefore("Purge", times(1, errDown))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		p := dedup.Purger{Store: s, Batch: 10}
		go func() { done <- p.Run(ctx) }()
		time.Sleep(2 * time.Hour)
		if n, err := s.Store.Purge(ctx, 100); n != 0 || err != nil {
			t.Errorf("%d rows were left, %v", n, err)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
}
