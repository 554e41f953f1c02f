package consumer_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/internal/operation"
)

var errHandler = errors.New("the handler failed")

func newLease(t *testing.T) *consumer.Lease {
	t.Helper()
	return &consumer.Lease{Store: memstore.New(), Group: "billing", MaxAttempts: 3}
}

func ok(context.Context) error   { return nil }
func fail(context.Context) error { return errHandler }

func never(t *testing.T) consumer.Handler {
	return func(context.Context) error {
		t.Error("the handler ran, and must not have")
		return nil
	}
}

func wantStatus(t *testing.T, r consumer.Result, want consumer.Status) {
	t.Helper()
	if r.Status != want {
		t.Fatalf("status is %v (%v), want %v", r.Status, r.Err, want)
	}
	if (r.Err == nil) != (want == consumer.Done) {
		t.Fatalf("status %v with error %v", r.Status, r.Err)
	}
}

func TestLeaseRunsOnce(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	r := l.Handle(t.Context(), "e1", ok)
	wantStatus(t, r, consumer.Done)
	if r.Duplicate || r.Attempt != 1 {
		t.Errorf("first delivery: %+v", r)
	}
	r = l.Handle(t.Context(), "e1", never(t))
	wantStatus(t, r, consumer.Done)
	if !r.Duplicate {
		t.Errorf("second delivery is not called a duplicate: %+v", r)
	}
}

func TestLeaseGroupsAreApart(t *testing.T) {
	t.Parallel()
	store := memstore.New()
	var operations []string
	for _, group := range []string{"billing", "shipping"} {
		l := &consumer.Lease{Store: store, Group: group}
		r := l.Handle(t.Context(), "e1", func(ctx context.Context) error {
			operations = append(operations, operation.From(ctx))
			return nil
		})
		wantStatus(t, r, consumer.Done)
	}
	if len(operations) != 2 || operations[0] == operations[1] || operations[0] == "" {
		t.Errorf("operations of two groups: %q", operations)
	}
}

// A handler that runs again belongs to the same operation, so that its calls
// carry the same derived keys.
func TestLeaseOperationStaysTheSame(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	var operations []string
	var attempts []int
	h := func(err error) consumer.Handler {
		return func(ctx context.Context) error {
			operations = append(operations, operation.From(ctx))
			attempts = append(attempts, dedup.Attempt(ctx))
			return err
		}
	}
	wantStatus(t, l.Handle(t.Context(), "e1", h(errHandler)), consumer.Failed)
	wantStatus(t, l.Handle(t.Context(), "e1", h(nil)), consumer.Done)
	if len(operations) != 2 || operations[0] == "" || operations[0] != operations[1] {
		t.Errorf("operations: %q", operations)
	}
	if attempts[0] != 1 || attempts[1] != 2 {
		t.Errorf("attempts: %v", attempts)
	}
}

func TestLeaseBusyWhileRunning(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	r := l.Handle(t.Context(), "e1", func(ctx context.Context) error {
		dup := l.Handle(ctx, "e1", never(t))
		wantStatus(t, dup, consumer.Busy)
		if !errors.Is(dup.Err, consumer.ErrBusy) || dup.RetryAfter <= 0 {
			t.Errorf("busy: %+v", dup)
		}
		return nil
	})
	wantStatus(t, r, consumer.Done)
}

func TestLeaseFailuresReachTheLimit(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	for i, want := range []consumer.Status{consumer.Failed, consumer.Failed, consumer.Poison} {
		r := l.Handle(t.Context(), "e1", fail)
		wantStatus(t, r, want)
		if !errors.Is(r.Err, errHandler) || r.Attempt != i+1 {
			t.Errorf("try %d: %+v", i+1, r)
		}
		if errors.Is(r.Err, consumer.ErrPoison) != (want == consumer.Poison) {
			t.Errorf("try %d: %v", i+1, r.Err)
		}
	}
	wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Poison)

	// An operator sends the dead letter again.
	if err := l.Reset(t.Context(), "e1"); err != nil {
		t.Fatal(err)
	}
	wantStatus(t, l.Handle(t.Context(), "e1", ok), consumer.Done)
	if err := l.Reset(t.Context(), "e1"); !errors.Is(err, dedup.ErrNotResolvable) {
		t.Errorf("Reset of a processed event: %v", err)
	}
	if err := l.Reset(t.Context(), "e2"); !errors.Is(err, dedup.ErrNotFound) {
		t.Errorf("Reset of an unknown event: %v", err)
	}
}

// Each start is counted before the handler runs, so an event that takes its
// process down stops too.
func TestLeaseCrashLoopStops(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	starts := 0
	for range 6 {
		func() {
			defer func() { _ = recover() }()
			l.Handle(t.Context(), "e1", func(context.Context) error {
				starts++
				panic("down")
			})
		}()
	}
	if starts != 3 {
		t.Errorf("the handler started %d times, want 3", starts)
	}
	wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Poison)
}

// crash claims like a process that dies while the handler runs.
func crash(t *testing.T, store dedup.Store, lease time.Duration) {
	t.Helper()
	_, err := store.Claim(t.Context(), dedup.Claim{
		Key: dedup.Key{Scope: "billing", ID: "e1"}, Fingerprint: []byte{},
		Token: dedup.NewToken(), Lease: lease, TTL: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestLeaseTakesOverAfterCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLease(t)
		for range 3 {
			crash(t, l.Store, time.Minute)
			wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Busy)
			time.Sleep(time.Minute + time.Second)
		}
		wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Poison)
		unlimited := &consumer.Lease{Store: l.Store, Group: l.Group}
		r := unlimited.Handle(t.Context(), "e1", ok)
		wantStatus(t, r, consumer.Done)
		if r.Attempt != 5 {
			t.Errorf("attempt %d, want 5", r.Attempt)
		}
	})
}

func TestLeaseLongHandlerKeepsItsClaim(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLease(t)
		r := l.Handle(t.Context(), "e1", func(context.Context) error {
			time.Sleep(2 * time.Minute) // four leases
			wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Busy)
			return nil
		})
		wantStatus(t, r, consumer.Done)
	})
}

func TestLeaseForgetsAfterRetention(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLease(t)
		wantStatus(t, l.Handle(t.Context(), "e1", ok), consumer.Done)
		time.Sleep(consumer.DefaultRetention - time.Second)
		if n, err := l.Purge(t.Context(), 10); n != 0 || err != nil {
			t.Errorf("purged %d, %v before the retention", n, err)
		}
		wantStatus(t, l.Handle(t.Context(), "e1", never(t)), consumer.Done)
		time.Sleep(2 * time.Second)
		if n, err := l.Purge(t.Context(), 10); n != 1 || err != nil {
			t.Errorf("purged %d, %v after the retention", n, err)
		}
	})
}

func TestLeaseNotExecutedSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	for range 5 {
		r := l.Handle(t.Context(), "e1", func(ctx context.Context) error {
			dedup.NotExecuted(ctx)
			return errHandler
		})
		wantStatus(t, r, consumer.Failed)
	}
	r := l.Handle(t.Context(), "e1", func(ctx context.Context) error {
		dedup.NotExecuted(ctx)
		return nil
	})
	wantStatus(t, r, consumer.Failed)
	if !errors.Is(r.Err, consumer.ErrNotExecuted) {
		t.Errorf("err %v", r.Err)
	}
	wantStatus(t, l.Handle(t.Context(), "e1", ok), consumer.Done)
}

func TestLeaseHandlerSaysPoison(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	wantStatus(t, l.Handle(t.Context(), "e1", func(context.Context) error {
		return errors.Join(errHandler, consumer.ErrPoison)
	}), consumer.Poison)
}

// downStore can't be asked.
type downStore struct{ dedup.Store }

var errDown = errors.New("down")

func (downStore) Claim(context.Context, dedup.Claim) (dedup.Result, error) {
	return dedup.Result{}, errDown
}
func (downStore) Release(context.Context, dedup.Key, dedup.Token) error { return errDown }

func TestLeaseStoreDownIsBusy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &consumer.Lease{Store: downStore{memstore.New()}}
		r := l.Handle(t.Context(), "e1", never(t))
		wantStatus(t, r, consumer.Busy)
		if !errors.Is(r.Err, errDown) || r.RetryAfter <= 0 {
			t.Errorf("%+v", r)
		}
	})
}

// forgetful takes claims and loses what is completed.
type forgetful struct{ dedup.Store }

func (forgetful) Complete(context.Context, dedup.Key, dedup.Token, dedup.Completion) error {
	return errDown
}

func TestLeaseNotStoredIsFailed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &consumer.Lease{Store: forgetful{memstore.New()}, MaxAttempts: 1}
		r := l.Handle(t.Context(), "e1", ok)
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, dedup.ErrNotStored) {
			t.Errorf("%v", r.Err)
		}
	})
}

func TestLeaseConfig(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		l    *consumer.Lease
		id   string
		want error
	}{
		{"no store", &consumer.Lease{}, "e1", consumer.ErrConfig},
		{"negative lease", &consumer.Lease{Store: memstore.New(), Lease: -1}, "e1", consumer.ErrConfig},
		{"long group", &consumer.Lease{Store: memstore.New(), Group: strings.Repeat("g", 256)}, "e1", consumer.ErrConfig},
		{"no id", newLease(t), "", consumer.ErrNoID},
	}
	for _, tt := range tests {
		r := tt.l.Handle(t.Context(), tt.id, never(t))
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, r.Err, tt.want)
		}
	}
}

func TestLeaseLongIDs(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	long := strings.Repeat("x", 4000)
	wantStatus(t, l.Handle(t.Context(), long+"1", ok), consumer.Done)
	wantStatus(t, l.Handle(t.Context(), long+"1", never(t)), consumer.Done)
	if r := l.Handle(t.Context(), long+"2", ok); r.Duplicate {
		t.Error("two long ids are taken for one")
	}
}

func TestLimit(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	wantStatus(t, l.Handle(t.Context(), "e1", consumer.Limit(never(t), 4, 3)), consumer.Poison)
	wantStatus(t, l.Handle(t.Context(), "e2", consumer.Limit(ok, 3, 3)), consumer.Done)
	wantStatus(t, l.Handle(t.Context(), "e2", consumer.Limit(never(t), 99, 3)), consumer.Done)
	wantStatus(t, l.Handle(t.Context(), "e3", consumer.Limit(ok, 99, 0)), consumer.Done)
}
