package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/effectonce/idempotency/consumer"
)

func TestHandleBatchIsPositional(t *testing.T) {
	t.Parallel()
	l := newLease(t)
	wantStatus(t, l.Handle(t.Context(), "old", ok), consumer.Done)
	var ran []int
	ids := []string{"a", "old", "bad", "a", "bad", "b"}
	results := consumer.HandleBatch(t.Context(), l, ids, func(_ context.Context, i int) error {
		ran = append(ran, i)
		if ids[i] == "bad" {
			return errHandler
		}
		return nil
	})
	want := []struct {
		status    consumer.Status
		duplicate bool
	}{
		{consumer.Done, false}, {consumer.Done, true}, {consumer.Failed, false},
		{consumer.Done, true}, {consumer.Failed, false}, {consumer.Done, false},
	}
	if len(results) != len(ids) {
		t.Fatalf("%d results for %d events", len(results), len(ids))
	}
	for i, w := range want {
		if r := results[i]; r.Status != w.status || r.Duplicate != w.duplicate {
			t.Errorf("%d (%s): %+v", i, ids[i], r)
		}
	}
	if len(ran) != 3 || ran[0] != 0 || ran[1] != 2 || ran[2] != 5 {
		t.Errorf("ran %v, want [0 2 5]", ran)
	}
}

// What was not handed out is not acknowledged.
func TestHandleBatchStopsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	results := consumer.HandleBatch(ctx, newLease(t), []string{"a", "b", "c"}, func(_ context.Context, i int) error {
		if i == 1 {
			cancel()
		}
		return nil
	})
	for i, want := range []consumer.Status{consumer.Done, consumer.Done, consumer.Busy} {
		wantStatus(t, results[i], want)
	}
}

func TestDelay(t *testing.T) {
	t.Parallel()
	failed := consumer.Result{Status: consumer.Failed}
	for deliveries, want := range map[int]time.Duration{
		-1: time.Second, 0: time.Second, 1: time.Second, 2: 2 * time.Second,
		6: 32 * time.Second, 7: time.Minute, 1 << 40: time.Minute,
	} {
		if got := failed.Delay(deliveries); got != want {
			t.Errorf("after %d deliveries %v, want %v", deliveries, got, want)
		}
	}
	if got := (consumer.Result{Status: consumer.Busy, RetryAfter: 3}).Delay(5); got != 3 {
		t.Errorf("busy: %v", got)
	}
}
