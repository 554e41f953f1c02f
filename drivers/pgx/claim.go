package pgxstore

import (
	"context"
	"fmt"

	"github.com/effectonce/idempotency/dedup"
)

// maxTries bounds how often a claim looks again because the row was changing.
// Each time somebody else got on, so more than a few are a sign of a fault.
const maxTries = 20

// Claim implements [dedup.Store].
func (s *Store) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	if err := checkClaim(&c); err != nil {
		return dedup.Result{}, err
	}
	args := s.claimArgs(c)
	for range maxTries {
		var r row
		call := call{key: c.Key, size: rowSize, sql: s.sql.claim, args: args, row: &r}
		if err := s.lanes.do(ctx, &call); lostRace(err) {
			continue // nothing was written
		} else if err != nil {
			return dedup.Result{}, wrap("claim", err)
		}
		if call.n == 0 {
			continue // somebody inserted the row meanwhile
		}
		state, step := r.judge(c)
		if step == stepNone {
			return result(state, &r), nil
		}
		sql := s.sql.takeOver
		if step == stepReclaim {
			sql = s.sql.reclaim
		}
		var free, changed bool
		err := s.pool.QueryRow(ctx, sql, append(args, r.token)...).Scan(&free, &changed)
		switch {
		case lostRace(err):
		case err != nil:
			return dedup.Result{}, wrap("claim", err)
		case !free:
			return dedup.Result{State: dedup.InProgress}, nil
		case changed:
			return taken(c, step, &r), nil
		}
	}
	return dedup.Result{}, errContended()
}

func errContended() error {
	return fmt.Errorf("pgxstore: %w: the key changed hands %d times meanwhile", dedup.ErrBusy, maxTries)
}

// checkClaim also makes the fingerprint one that can be stored.
func checkClaim(c *dedup.Claim) error {
	if err := c.Key.Validate(); err != nil {
		return err
	}
	switch {
	case len(c.Fingerprint) > dedup.MaxFingerprintLength:
		return fmt.Errorf("pgxstore: the fingerprint has %d bytes, the most is %d", len(c.Fingerprint), dedup.MaxFingerprintLength)
	case c.Lease <= 0 || c.TTL <= 0:
		return fmt.Errorf("pgxstore: lease and TTL must be positive, and are %v and %v", c.Lease, c.TTL)
	}
	if c.Fingerprint == nil {
		c.Fingerprint = []byte{}
	}
	return nil
}

func (s *Store) claimArgs(c dedup.Claim) []any {
	return []any{c.Key.Scope, c.Key.ID, c.Token[:], c.Fingerprint, interval(c.Lease), interval(c.TTL), s.lockOf(c.Key)}
}

// result is the answer to a claim that found r, or inserted it.
func result(state dedup.State, r *row) dedup.Result {
	if r.kind == kindTaken {
		return dedup.Result{State: state} // the row is not to be seen yet
	}
	return dedup.Result{State: state, Record: r.record()}
}

// taken is the answer to a claim that has changed r by step.
func taken(c dedup.Claim, step step, r *row) dedup.Result {
	if step == stepReclaim {
		return dedup.Result{State: dedup.Won, Record: dedup.Record{
			Fingerprint: c.Fingerprint,
			Status:      dedup.StatusInProgress,
			Attempt:     1,
			Token:       c.Token,
			LeaseLeft:   c.Lease,
			CreatedAt:   r.now,
			ExpiresAt:   r.now.Add(c.TTL),
		}}
	}
	rec := r.record()
	if !r.holds(c.Token) {
		rec.Attempt++
	}
	rec.Token, rec.LeaseLeft, rec.ExpiresAt = c.Token, c.Lease, r.now.Add(c.TTL)
	state := dedup.Abandoned
	if rec.Attempt == 1 {
		state = dedup.Won
	}
	return dedup.Result{State: state, Record: rec}
}
