package rediswindow_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	rediswindow "github.com/effectonce/idempotency/drivers/redis/window"
)

// newStore makes a store on a prefix of its own, which is emptied at the end.
func newStore(t *testing.T) *rediswindow.Store {
	t.Helper()
	addr := os.Getenv("IDEMPOTENCY_REDIS_ADDR")
	if addr == "" {
		addr = "127.0.0.1:6379"
	}
	client := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { client.Close() })
	if err := client.Ping(t.Context()).Err(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("Redis (IDEMPOTENCY_REDIS_ADDR): %v", err)
		}
		t.Skipf("no Redis (IDEMPOTENCY_REDIS_ADDR): %v", err)
	}
	s := &rediswindow.Store{Client: client, Prefix: "windowtest:" + dedup.NewToken().String() + ":"}
	t.Cleanup(func() {
		for _, k := range keys(t, s) {
			client.Del(context.Background(), k)
		}
	})
	return s
}

func keys(t *testing.T, s *rediswindow.Store) []string {
	t.Helper()
	var all []string
	it := s.Client.Scan(context.Background(), 0, s.Prefix+"*", 1000).Iterator()
	for it.Next(context.Background()) {
		all = append(all, it.Val())
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

var key = dedup.Key{Scope: "billing", ID: "e1"}

func wantState(t *testing.T, s *rediswindow.Store, token dedup.Token, want dedup.State) dedup.Result {
	t.Helper()
	res, err := s.Acquire(t.Context(), key, token, time.Minute)
	if err != nil || res.State != want {
		t.Fatalf("Acquire: %v, %v; want %v", res.State, err, want)
	}
	return res
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// wantTTL: no key may stay for ever, whatever step was the last.
func wantTTL(t *testing.T, s *rediswindow.Store, most time.Duration) {
	t.Helper()
	all := keys(t, s)
	if len(all) != 1 {
		t.Fatalf("keys %q, want one", all)
	}
	if ttl := s.Client.PTTL(t.Context(), all[0]).Val(); ttl <= 0 || ttl > most {
		t.Fatalf("the key stays for %v, want at most %v", ttl, most)
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	mine, other := dedup.NewToken(), dedup.NewToken()

	wantState(t, s, mine, dedup.Won)
	wantTTL(t, s, time.Minute)
	wantState(t, s, mine, dedup.Won) // the answer was lost
	if res := wantState(t, s, other, dedup.InProgress); res.Record.LeaseLeft <= 0 || res.Record.LeaseLeft > time.Minute {
		t.Errorf("lease left %v", res.Record.LeaseLeft)
	}
	wantErr(t, s.Finish(t.Context(), key, other, time.Hour), dedup.ErrLeaseLost)
	wantErr(t, s.Release(t.Context(), key, other), dedup.ErrLeaseLost)

	wantErr(t, s.Release(t.Context(), key, mine), nil)
	wantErr(t, s.Release(t.Context(), key, mine), dedup.ErrLeaseLost)
	wantState(t, s, other, dedup.Won)

	wantErr(t, s.Finish(t.Context(), key, other, time.Hour), nil)
	wantErr(t, s.Finish(t.Context(), key, other, time.Hour), nil) // the answer was lost
	wantTTL(t, s, time.Hour)
	wantState(t, s, mine, dedup.Completed)
	wantState(t, s, other, dedup.Completed)
	wantErr(t, s.Finish(t.Context(), key, mine, time.Hour), dedup.ErrLeaseLost)
	wantErr(t, s.Release(t.Context(), key, other), dedup.ErrLeaseLost)
}

// The work of one whose lease ran out is done all the same, unless somebody
// else has begun.
func TestFinishAfterLease(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	mine, other := dedup.NewToken(), dedup.NewToken()
	wantState(t, s, mine, dedup.Won)
	expire := func() {
		if err := s.Client.Del(t.Context(), keys(t, s)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	expire()
	wantState(t, s, other, dedup.Won)
	wantErr(t, s.Finish(t.Context(), key, mine, time.Hour), dedup.ErrLeaseLost)
	expire()
	wantErr(t, s.Finish(t.Context(), key, mine, time.Hour), nil)
	wantState(t, s, other, dedup.Completed)
}

func TestKeysAreApart(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	for _, k := range []dedup.Key{{Scope: "a", ID: "bc"}, {Scope: "ab", ID: "c"}, {Scope: "", ID: "abc"}, {Scope: "1:a", ID: "b"}} {
		res, err := s.Acquire(t.Context(), k, dedup.NewToken(), time.Minute)
		if err != nil || res.State != dedup.Won {
			t.Errorf("%+v: %v, %v", k, res.State, err)
		}
	}
}

func TestForeignKey(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	wantState(t, s, dedup.NewToken(), dedup.Won)
	if err := s.Client.Set(t.Context(), keys(t, s)[0], "something else", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), key, dedup.NewToken(), time.Minute); err == nil {
		t.Error("a foreign value was taken for ours")
	}
}

func TestNoClient(t *testing.T) {
	t.Parallel()
	_, err := (&rediswindow.Store{}).Acquire(t.Context(), key, dedup.NewToken(), time.Minute)
	wantErr(t, err, consumer.ErrConfig)
}

func TestUnreachableIsBusy(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	defer client.Close()
	w := &consumer.Window{Store: &rediswindow.Store{Client: client}, Window: time.Hour}
	r := w.Handle(t.Context(), "e1", func(context.Context) error {
		t.Error("the handler ran without a mark")
		return nil
	})
	if r.Status != consumer.Busy || r.Err == nil {
		t.Errorf("%+v", r)
	}
}
