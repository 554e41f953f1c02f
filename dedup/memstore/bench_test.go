package memstore_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

func newKeys(n int) []dedup.Key {
	keys := make([]dedup.Key, n)
	for i := range keys {
		keys[i] = dedup.Key{Scope: "tenant-7 POST /charges", ID: "0190c3a4-" + strconv.Itoa(i)}
	}
	return keys
}

func bench(b *testing.B, s *memstore.Store, claims int, want dedup.State, prepare func(dedup.Claim)) {
	b.Helper()
	ctx := context.Background()
	keys := newKeys(claims)
	c := dedup.Claim{Fingerprint: make([]byte, 33), Token: dedup.Token{1}, Lease: time.Minute, TTL: time.Hour}
	if prepare != nil {
		for _, k := range keys {
			c.Key = k
			prepare(c)
		}
	}
	var next atomic.Int64
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		c := c
		c.Token[0] = 2
		for pb.Next() {
			c.Key = keys[int(next.Add(1)-1)%len(keys)]
			if r, err := s.Claim(ctx, c); err != nil || r.State != want {
				b.Fatalf("Claim = %v, %v, want %v", r.State, err, want)
			}
		}
	})
}

func BenchmarkClaimWon(b *testing.B) {
	bench(b, memstore.New(), b.N, dedup.Won, nil)
}

func BenchmarkClaimInProgress(b *testing.B) {
	s := memstore.New()
	bench(b, s, 10_000, dedup.InProgress, func(c dedup.Claim) { s.Claim(context.Background(), c) })
}

func BenchmarkClaimCompleted(b *testing.B) {
	s := memstore.New()
	ctx := context.Background()
	bench(b, s, 10_000, dedup.Completed, func(c dedup.Claim) {
		s.Claim(ctx, c)
		s.Complete(ctx, c.Key, c.Token, dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 200, Body: make([]byte, 100)}, TTL: time.Hour})
	})
}

// A whole life: claim, complete.
func BenchmarkClaimComplete(b *testing.B) {
	s := memstore.New()
	ctx := context.Background()
	keys := newKeys(b.N)
	completion := dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 200, Body: make([]byte, 100)}, TTL: time.Hour}
	c := dedup.Claim{Fingerprint: make([]byte, 33), Token: dedup.Token{1}, Lease: time.Minute, TTL: time.Hour}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		c.Key = keys[i]
		s.Claim(ctx, c)
		if err := s.Complete(ctx, c.Key, c.Token, completion); err != nil {
			b.Fatal(err)
		}
	}
}

// Purging looks at expired rows only, so a large table costs nothing.
func BenchmarkPurge(b *testing.B) {
	for _, kept := range []int{0, 100_000} {
		b.Run("kept="+strconv.Itoa(kept), func(b *testing.B) {
			s := memstore.New()
			ctx := context.Background()
			keys := newKeys(kept + b.N)
			c := dedup.Claim{Token: dedup.Token{1}, Lease: time.Hour, TTL: time.Hour}
			for _, k := range keys[:kept] {
				c.Key = k
				s.Claim(ctx, c)
			}
			c.Lease, c.TTL = 1, 1
			for _, k := range keys[kept:] {
				c.Key = k
				s.Claim(ctx, c)
			}
			b.ResetTimer()
			if n, err := s.Purge(ctx, b.N); n != b.N || err != nil {
				b.Fatalf("Purge = %d, %v, want %d", n, err, b.N)
			}
		})
	}
}

// A table that does not grow: what a claim costs while its row is in the cache.
func BenchmarkClaimRelease(b *testing.B) {
	s := memstore.New()
	ctx := context.Background()
	c := dedup.Claim{Key: newKeys(1)[0], Fingerprint: make([]byte, 33), Token: dedup.Token{1}, Lease: time.Minute, TTL: time.Hour}
	b.ReportAllocs()
	for b.Loop() {
		s.Claim(ctx, c)
		if err := s.Release(ctx, c.Key, c.Token); err != nil {
			b.Fatal(err)
		}
	}
}
