package pgxstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

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
	if !s.guess.there() {
		token := make([]byte, 0, len(c.Token))
		insert := call{key: c.Key, size: rowSize, sql: s.sql.insert, args: args, token: &token}
		if err := s.lanes.do(ctx, &insert); err != nil && !lostRace(err) { // which wrote nothing
			return dedup.Result{}, wrap("claim", err)
		}
		if bytes.Equal(token, c.Token[:]) {
			s.guess.was(false)
			return fresh(c), nil
		}
	}
	var r row
	n, err := scanRow(s.pool.QueryRow(ctx, s.sql.get, c.Key.Scope, c.Key.ID), &r)
	if err != nil {
		return dedup.Result{}, wrap("claim", err)
	}
	s.guess.was(n > 0)
	res, _, err := s.settle(ctx, s.pool, &s.sql.lease, c, args, n, &r)
	return res, wrap("claim", err)
}

// guess tells from the last claims whether the next one's row is there already.
// It decides only what is tried first, the INSERT or the SELECT, either of which
// is half the price of a statement that does both; guessing wrong costs a round
// trip. Retries come in storms, and else hardly ever.
type guess struct{ score atomic.Int32 }

const maxScore = 8

func (g *guess) there() bool { return g.score.Load() > 0 }

// was tells how it was. Racing calls may lose a step, which does no harm.
func (g *guess) was(there bool) {
	switch score := g.score.Load(); {
	case there && score < maxScore:
		g.score.Store(score + 1)
	case !there && score > -maxScore:
		g.score.Store(score - 1)
	}
}

// querier is the pool, or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// settle asks for the row until what it is can be told, beginning with what has
// been seen of it: n rows, 0 or 1. It reports whether the row is now c's.
func (s *Store) settle(ctx context.Context, q querier, sql *claiming, c dedup.Claim, args []any, n int, r *row) (dedup.Result, bool, error) {
	var err error
	for range maxTries {
		if n == 0 {
			*r = row{}
			n, err = scanRow(q.QueryRow(ctx, sql.claim, args...), r)
			switch {
			case err != nil && (sql.inTx || !lostRace(err)):
				return dedup.Result{}, false, err
			case err != nil, n == 0: // somebody inserted the row meanwhile
				n = 0
				continue
			}
		}
		state, step := r.judge(c)
		if sql.inTx && r.kind == kindThere && step == stepNone && (state == dedup.Won || state == dedup.Abandoned) {
			step = stepTakeOver // ours, but not held by this transaction yet
		}
		if step == stepNone {
			return result(state, r), state == dedup.Won || state == dedup.Abandoned, nil
		}
		change := sql.takeOver
		if step == stepReclaim {
			change = sql.reclaim
		}
		var free, changed bool
		err = q.QueryRow(ctx, change, append(args, r.token)...).Scan(&free, &changed)
		switch {
		case err != nil && (sql.inTx || !lostRace(err)):
			return dedup.Result{}, false, err
		case err == nil && !free:
			return dedup.Result{State: dedup.InProgress}, false, nil
		case err == nil && changed:
			return taken(c, step, r), true, nil
		}
		n = 0 // look again
	}
	return dedup.Result{}, false, errContended()
}

// scanRow returns how many rows there were, 0 or 1.
func scanRow(res pgx.Row, r *row) (int, error) {
	err := res.Scan(r.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return 1, err
}

func errContended() error {
	return fmt.Errorf("%w: the key changed hands %d times meanwhile", dedup.ErrBusy, maxTries)
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

// fresh is the answer to a claim that made the row.
func fresh(c dedup.Claim) dedup.Result {
	return dedup.Result{State: dedup.Won, Record: dedup.Record{
		Fingerprint: c.Fingerprint,
		Status:      dedup.StatusInProgress,
		Attempt:     1,
		Token:       c.Token,
		LeaseLeft:   c.Lease,
	}}
}

// taken is the answer to a claim that has changed r by step.
func taken(c dedup.Claim, step step, r *row) dedup.Result {
	if step == stepReclaim {
		return fresh(c)
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
