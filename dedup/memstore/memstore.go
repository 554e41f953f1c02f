// Package memstore keeps the dedup table in the memory of one process: for
// tests, for tools, and for services of a single instance that may forget their
// keys when they restart. What was completed before a restart runs again after
// it, so it guards no money.
//
// It is no [dedup.TxStore]: memory has no transaction that the work's writes
// could share, so it serves lease mode only.
//
// Rows stay until they are purged, see [dedup.Purger]; until then an expired row
// counts as absent but takes its memory.
package memstore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Store is a [dedup.Store] in memory. The zero value is an empty store that is
// ready to use. It must not be copied after its first use.
type Store struct {
	// Now is the store's clock, for tests that move it; nil is [time.Now]. It
	// must be set before the first use and be safe for concurrent use.
	Now func() time.Time

	once   sync.Once
	seed   maphash.Seed // keys come from clients, who must not choose their shard
	shards [shardCount]shard
}

var _ dedup.Store = (*Store)(nil)

// New returns an empty store.
func New() *Store { return new(Store) }

func (s *Store) now() time.Time {
	if s.Now != nil {
		return s.Now()
	}
	return time.Now()
}

func (s *Store) shard(k dedup.Key) *shard {
	s.once.Do(func() { s.seed = maphash.MakeSeed() })
	return &s.shards[maphash.String(s.seed, k.ID)%shardCount]
}

func ended(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("memstore: %w", context.Cause(ctx))
}

// Claim implements [dedup.Store]. Its error wraps [dedup.ErrInvalidKey] or the
// context's cause.
func (s *Store) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	if err := ended(ctx); err != nil {
		return dedup.Result{}, err
	}
	if err := c.Key.Validate(); err != nil {
		return dedup.Result{}, err
	}
	sh := s.shard(c.Key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.now() // under the lock, so that rows see time in order
	r := sh.find(c.Key, now)
	if r == nil {
		sh.add(&row{
			key:         c.Key,
			fingerprint: string(c.Fingerprint),
			status:      dedup.StatusInProgress,
			attempt:     1,
			token:       c.Token,
			leaseEnd:    now.Add(c.Lease),
			createdAt:   now,
			expiresAt:   now.Add(c.TTL),
		})
		return dedup.Result{State: dedup.Won, Record: dedup.Record{Attempt: 1}}, nil
	}
	switch {
	case r.fingerprint != string(c.Fingerprint):
		return dedup.Result{State: dedup.Mismatch, Record: dedup.Record{Fingerprint: []byte(r.fingerprint)}}, nil
	case r.status == dedup.StatusCompleted:
		return dedup.Result{State: dedup.Completed, Record: dedup.Record{Response: r.answer()}}, nil
	case r.status == dedup.StatusUnknown:
		return dedup.Result{State: dedup.Unknown}, nil
	case r.token == c.Token: // the first call's answer was lost
	case r.live(now):
		return dedup.Result{State: dedup.InProgress, Record: dedup.Record{LeaseLeft: r.leaseEnd.Sub(now)}}, nil
	default:
		r.token = c.Token
		r.attempt++
	}
	r.leaseEnd, r.expiresAt = now.Add(c.Lease), now.Add(c.TTL)
	sh.moved(r)
	res := dedup.Result{State: dedup.Won, Record: dedup.Record{Attempt: r.attempt}}
	if r.attempt > 1 {
		res.State = dedup.Abandoned
	}
	return res, nil
}

// Renew implements [dedup.Store].
func (s *Store) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	return s.held(ctx, key, token, func(sh *shard, r *row, now time.Time) error {
		if r.status != dedup.StatusInProgress {
			return dedup.ErrLeaseLost
		}
		r.leaseEnd = now.Add(max(lease, 0))
		sh.moved(r)
		return nil
	})
}

// Complete implements [dedup.Store].
func (s *Store) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	if c.Status != dedup.StatusCompleted && c.Status != dedup.StatusUnknown {
		return errors.New("memstore: a completion is completed or unknown, not " + c.Status.String())
	}
	return s.held(ctx, key, token, func(sh *shard, r *row, now time.Time) error {
		if r.status == dedup.StatusInProgress {
			r.status = c.Status
			r.store(c.Response)
		}
		r.expiresAt = now.Add(c.TTL)
		sh.moved(r)
		return nil
	})
}

// Release implements [dedup.Store].
func (s *Store) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	return s.held(ctx, key, token, func(sh *shard, r *row, _ time.Time) error {
		if r.status != dedup.StatusInProgress {
			return dedup.ErrLeaseLost
		}
		sh.remove(r)
		return nil
	})
}

// held calls do under the lock with the row of key if token is its current one.
func (s *Store) held(ctx context.Context, key dedup.Key, token dedup.Token, do func(*shard, *row, time.Time) error) error {
	if err := ended(ctx); err != nil {
		return err
	}
	sh := s.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.now()
	r := sh.find(key, now)
	if r == nil || r.resolved || r.token != token {
		return dedup.ErrLeaseLost
	}
	return do(sh, r, now)
}

// Get implements [dedup.Store].
func (s *Store) Get(ctx context.Context, key dedup.Key) (dedup.Record, error) {
	if err := ended(ctx); err != nil {
		return dedup.Record{}, err
	}
	sh := s.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.now()
	r := sh.find(key, now)
	if r == nil {
		return dedup.Record{}, dedup.ErrNotFound
	}
	rec := dedup.Record{
		Fingerprint: []byte(r.fingerprint),
		Status:      r.status,
		Response:    r.answer(),
		Attempt:     r.attempt,
		Token:       r.token,
		CreatedAt:   r.createdAt,
		ExpiresAt:   r.expiresAt,
	}
	if r.live(now) {
		rec.LeaseLeft = r.leaseEnd.Sub(now)
	}
	return rec, nil
}

// Resolve implements [dedup.Store].
func (s *Store) Resolve(ctx context.Context, key dedup.Key, response *dedup.Response, ttl time.Duration) error {
	if err := ended(ctx); err != nil {
		return err
	}
	sh := s.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.now()
	r := sh.find(key, now)
	switch {
	case r == nil:
		return dedup.ErrNotFound
	case r.status == dedup.StatusCompleted || r.live(now):
		return dedup.ErrNotResolvable
	case response == nil:
		sh.remove(r)
		return nil
	}
	r.status, r.resolved = dedup.StatusCompleted, true
	r.store(*response)
	r.expiresAt = now.Add(ttl)
	sh.moved(r)
	return nil
}

// Purge implements [dedup.Store]. It holds no lock for longer than it takes to
// remove a few dozen rows, and looks only at expired ones.
func (s *Store) Purge(ctx context.Context, limit int) (int, error) {
	removed := 0
	for i := range s.shards {
		sh := &s.shards[i]
		for removed < limit {
			if err := ended(ctx); err != nil {
				return removed, err
			}
			want := min(limit-removed, purgeBatch)
			n := sh.purge(s.now, want)
			removed += n
			if n < want {
				break
			}
		}
	}
	return removed, ended(ctx)
}
