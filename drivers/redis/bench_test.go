package redisstore_test

import (
	"strconv"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

// The floor: one round trip that does next to nothing.
func BenchmarkPing(b *testing.B) {
	c := shared(b)
	for b.Loop() {
		if err := c.Ping(b.Context()).Err(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkClaimComplete(b *testing.B) {
	s := newStore(b, shared(b), redisstore.Options{})
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		row := claim(strconv.Itoa(i))
		mustClaim(b, s, row, dedup.Won)
		if err := s.Complete(b.Context(), row.Key, row.Token, completion("a response of some forty bytes, no more")); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkClaimCompleted(b *testing.B) {
	s := newStore(b, shared(b), redisstore.Options{})
	row := claim("a")
	mustClaim(b, s, row, dedup.Won)
	if err := s.Complete(b.Context(), row.Key, row.Token, completion("a response of some forty bytes, no more")); err != nil {
		b.Fatal(err)
	}
	again := claim("a")
	b.ReportAllocs()
	for b.Loop() {
		mustClaim(b, s, again, dedup.Completed)
	}
}
