package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/dedup/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, func(*testing.T) dedup.Store { return memstore.New() }, storetest.Caps{
		Lapse:  func(_ *testing.T, s dedup.Store, k dedup.Key) { s.(*memstore.Store).Lapse(k) },
		Expire: func(_ *testing.T, s dedup.Store, k dedup.Key) { s.(*memstore.Store).Expire(k) },
	})
}

func claim(id string) dedup.Claim {
	return dedup.Claim{Key: dedup.Key{ID: id}, Token: dedup.NewToken(), Lease: time.Minute, TTL: time.Hour}
}

func mustClaim(t *testing.T, s *memstore.Store, c dedup.Claim, want dedup.State) {
	t.Helper()
	r, err := s.Claim(context.Background(), c)
	if err != nil || r.State != want {
		t.Fatalf("Claim = %v, %v, want %v", r.State, err, want)
	}
}

// The other tests move stored times; here the clock itself goes on.
func TestTimePasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		s := memstore.New()
		c := claim("a")
		mustClaim(t, s, c, dedup.Won)
		time.Sleep(c.Lease - 1)
		mustClaim(t, s, claim("a"), dedup.InProgress)
		time.Sleep(time.Nanosecond)
		c = claim("a")
		mustClaim(t, s, c, dedup.Abandoned)
		if err := s.Complete(ctx, c.Key, c.Token, dedup.Completion{Status: dedup.StatusCompleted, TTL: 3 * time.Hour}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3*time.Hour - 1)
		mustClaim(t, s, claim("a"), dedup.Completed)
		time.Sleep(time.Nanosecond)
		mustClaim(t, s, claim("a"), dedup.Won)

		// A lease longer than the TTL keeps the row to the lease's end.
		c = claim("b")
		c.Lease = 2 * c.TTL
		mustClaim(t, s, c, dedup.Won)
		time.Sleep(c.Lease - 1)
		mustClaim(t, s, claim("b"), dedup.InProgress)
		time.Sleep(time.Nanosecond)
		mustClaim(t, s, claim("b"), dedup.Won)
	})
}

func TestNow(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	s := &memstore.Store{Now: func() time.Time { return now }}
	c := claim("a")
	mustClaim(t, s, c, dedup.Won)
	r, err := s.Get(context.Background(), c.Key)
	if err != nil || !r.CreatedAt.Equal(now) || !r.ExpiresAt.Equal(now.Add(c.TTL)) || r.LeaseLeft != c.Lease {
		t.Errorf("Get = %+v, %v, want times by Now", r, err)
	}
	now = now.Add(c.Lease)
	mustClaim(t, s, claim("a"), dedup.Abandoned)
}

func TestInvalid(t *testing.T) {
	ctx := context.Background()
	var s memstore.Store
	for _, id := range []string{"", strings.Repeat("x", dedup.MaxKeyLength+1), "\xff", "\x00"} {
		if _, err := s.Claim(ctx, claim(id)); !errors.Is(err, dedup.ErrInvalidKey) {
			t.Errorf("Claim of key %q: %v, want ErrInvalidKey", id, err)
		}
	}
	c := claim("a")
	mustClaim(t, &s, c, dedup.Won)
	if err := s.Complete(ctx, c.Key, c.Token, dedup.Completion{Status: dedup.StatusInProgress}); err == nil {
		t.Error("Complete took the status in_progress")
	}
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	if _, err := s.Claim(ctx, c); !errors.Is(err, cause) {
		t.Errorf("Claim = %v, want the context's cause", err)
	}
}

// Rows leave nothing behind, whichever way they went.
func TestNothingIsLeft(t *testing.T) {
	ctx := context.Background()
	s := memstore.New()
	var claims []dedup.Claim
	for i := range 1000 {
		c := claim(fmt.Sprint(i))
		mustClaim(t, s, c, dedup.Won)
		claims = append(claims, c)
	}
	for i, c := range claims {
		completion := dedup.Completion{Status: dedup.StatusCompleted, TTL: time.Duration(i) * time.Second}
		if i%4 == 2 {
			completion.Status = dedup.StatusUnknown
		}
		var err error
		if i%4 == 0 {
			err = s.Release(ctx, c.Key, c.Token)
		} else {
			err = s.Complete(ctx, c.Key, c.Token, completion)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if rows, canExpire := s.Len(); rows != 750 || canExpire != 500 {
		t.Fatalf("%d rows, %d that can expire, want 750 and 500", rows, canExpire)
	}
	for i, c := range claims {
		var err error
		switch i % 4 {
		case 2:
			err = s.Resolve(ctx, c.Key, nil, 0)
		case 1, 3:
			s.Expire(c.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.Purge(ctx, 300); n != 300 || err != nil {
		t.Errorf("Purge(300) = %d, %v, want 300, nil", n, err)
	}
	if n, err := s.Purge(ctx, 300); n != 200 || err != nil {
		t.Errorf("Purge(300) = %d, %v, want the other 200, nil", n, err)
	}
	if rows, canExpire := s.Len(); rows != 0 || canExpire != 0 {
		t.Errorf("%d rows, %d that can expire, want none", rows, canExpire)
	}
}

func ExampleStore() {
	ctx := context.Background()
	store := memstore.New()
	c := dedup.Claim{
		Key:   dedup.Key{Scope: "tenant-7", ID: "order-1"},
		Token: dedup.NewToken(),
		Lease: 30 * time.Second,
		TTL:   24 * time.Hour,
	}
	first, _ := store.Claim(ctx, c)
	store.Complete(ctx, c.Key, c.Token, dedup.Completion{
		Status:   dedup.StatusCompleted,
		Response: dedup.Response{Code: 201, Body: []byte("charged")},
		TTL:      24 * time.Hour,
	})
	c.Token = dedup.NewToken() // another run of the same operation
	second, _ := store.Claim(ctx, c)
	fmt.Println(first.State)
	fmt.Println(second.State, second.Record.Response.Code, string(second.Record.Response.Body))
	// Output:
	// won
	// completed 201 charged
}
