package consumer_test

import (
	"context"
	"errors"
	"testing"

	"github.com/effectonce/idempotency/consumer"
)

func TestDeliver(t *testing.T) {
	t.Parallel()
	id := func(s string, err error) func() (string, error) { return func() (string, error) { return s, err } }
	take := func(context.Context, consumer.Result) error { return nil }
	noLetter := func(context.Context, consumer.Result) error {
		t.Error("a dead letter was written")
		return nil
	}
	tests := []struct {
		name    string
		d       consumer.Delivery
		want    consumer.Status
		wantErr error
	}{
		{"done", consumer.Delivery{ID: id("e1", nil), Handle: ok, DeadLetter: noLetter}, consumer.Done, nil},
		{"failed", consumer.Delivery{ID: id("e2", nil), Handle: fail, DeadLetter: noLetter}, consumer.Failed, errHandler},
		{"no id", consumer.Delivery{ID: id("", nil), Handle: never(t), DeadLetter: take}, consumer.Poison, consumer.ErrNoID},
		{"id error", consumer.Delivery{ID: id("", errDown), Handle: never(t), DeadLetter: take}, consumer.Poison, errDown},
		{"too many", consumer.Delivery{ID: id("e3", nil), Handle: never(t), Deliveries: 4, MaxDeliveries: 3, DeadLetter: take}, consumer.Poison, consumer.ErrPoison},
		{"nobody takes it", consumer.Delivery{ID: id("", nil), Handle: never(t)}, consumer.Failed, consumer.ErrPoison},
		{"letter is lost", consumer.Delivery{ID: id("", nil), Handle: never(t), DeadLetter: func(context.Context, consumer.Result) error { return errDown }}, consumer.Failed, errDown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := consumer.Deliver(t.Context(), newLease(t), tt.d)
			wantStatus(t, r, tt.want)
			if !errors.Is(r.Err, tt.wantErr) {
				t.Errorf("err %v, want %v", r.Err, tt.wantErr)
			}
		})
	}
}
