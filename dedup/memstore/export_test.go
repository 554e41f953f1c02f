package memstore

import (
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Lapse ends the lease of k.
func (s *Store) Lapse(k dedup.Key) { s.edit(k, func(r *row, now time.Time) { r.leaseEnd = now }) }

// Expire ends the lease and the TTL of k.
func (s *Store) Expire(k dedup.Key) {
	s.edit(k, func(r *row, now time.Time) { r.leaseEnd, r.expiresAt = now, now })
}

func (s *Store) edit(k dedup.Key, f func(*row, time.Time)) {
	sh := s.shard(k)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	r := sh.rows[k]
	f(r, s.now())
	sh.moved(r)
}

// Len is how many rows s holds, the expired ones too.
func (s *Store) Len() (rows, canExpire int) {
	for i := range s.shards {
		s.shards[i].mu.Lock()
		rows += len(s.shards[i].rows)
		canExpire += len(s.shards[i].byEnd)
		s.shards[i].mu.Unlock()
	}
	return rows, canExpire
}
