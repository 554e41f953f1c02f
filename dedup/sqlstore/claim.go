package sqlstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/effectonce/idempotency/dedup"
)

var (
	errAgain = errors.New("sqlstore: the row was changing")
	errTaken = errors.New("sqlstore: another transaction has claimed the key")
)

// claim is a [dedup.Claim] with the arguments that the queries take.
type claim struct {
	dedup.Claim
	scope, id any
	args      []any // scope, id, token, fingerprint, lease, ttl
	row       row   // that was last judged
}

func (s *Store) newClaim(dc dedup.Claim) (*claim, error) {
	if err := dc.Key.Validate(); err != nil {
		return nil, err
	}
	switch {
	case len(dc.Fingerprint) > dedup.MaxFingerprintLength:
		return nil, fmt.Errorf("sqlstore: the fingerprint has %d bytes, the most is %d", len(dc.Fingerprint), dedup.MaxFingerprintLength)
	case dc.Lease <= 0 || dc.TTL <= 0:
		return nil, fmt.Errorf("sqlstore: lease and TTL must be positive, and are %v and %v", dc.Lease, dc.TTL)
	}
	c := &claim{Claim: dc}
	c.scope, c.id = s.dialect.key(dc.Key)
	if c.Fingerprint == nil {
		c.Fingerprint = []byte{}
	}
	c.args = []any{c.scope, c.id, c.Token[:], c.Fingerprint, duration(dc.Lease), duration(dc.TTL)}
	return c, nil
}

// with returns the claim's arguments and one more.
func (c *claim) with(arg any) []any { return append(c.args[:len(c.args):len(c.args)], arg) }

// settle asks for the row until what it is can be told. In a transaction,
// errAgain means that only a new one will see what the row has become.
func (c *claim) settle(ctx context.Context, q querier) (dedup.Result, error) {
	took := false
	for range maxTries {
		r, err := q.s.dialect.ask(ctx, q, c)
		switch {
		case errors.Is(err, errTaken):
			return dedup.Result{State: dedup.InProgress}, nil
		case errors.Is(err, errAgain) && q.tx == nil:
			continue
		case err != nil:
			return dedup.Result{}, err
		}
		r.fresh = r.fresh || took && r.holds(c.Token)
		c.row = r
		res, st := c.judge(&r, q.s)
		if st == nil {
			return res, nil
		}
		if !r.free {
			return dedup.Result{State: dedup.InProgress}, nil
		}
		// The old token is compared in the statement, so of several that see
		// the same row only one changes it; who that was is read back.
		args := c.with(r.token)
		if st == q.s.q.renew {
			args = []any{c.scope, c.id, c.Token[:], duration(c.Lease)}
		}
		if n, err := q.exec(ctx, st, args...); err != nil {
			return dedup.Result{}, err
		} else if n > 0 {
			took = true
		}
	}
	return dedup.Result{}, fmt.Errorf("%w: the key changed hands %d times meanwhile", dedup.ErrBusy, maxTries)
}

// durable returns once an outcome that the claim is told outlasts a crash.
func (c *claim) durable(ctx context.Context, s *Store, res dedup.Result) error {
	if res.State != dedup.Completed && res.State != dedup.Unknown {
		return nil
	}
	return s.dialect.durable(ctx, s, c.Key, c.row)
}

// judge says what r means to the claim, or which statement must change it
// first.
func (c *claim) judge(r *row, s *Store) (dedup.Result, *statement) {
	if r.expired() && !r.fresh {
		return dedup.Result{}, s.q.reclaim
	}
	res := dedup.Result{Record: r.record()}
	switch {
	case string(r.fingerprint) != string(c.Fingerprint):
		res.State = dedup.Mismatch
	case r.is(dedup.StatusCompleted):
		res.State = dedup.Completed
	case r.is(dedup.StatusUnknown):
		res.State = dedup.Unknown
	case r.holds(c.Token):
		if !r.live() && !r.fresh {
			return res, s.q.renew // ours already, but about to be lost
		}
		res.State = dedup.Won
		if r.attempt.Int32 > 1 {
			res.State = dedup.Abandoned
		}
	case r.live():
		res.State = dedup.InProgress
	default:
		return res, s.q.takeover
	}
	return res, nil
}

// wonRow is the row that c has just inserted, where the insert does not return
// it.
func (c *claim) wonRow() row {
	r := row{token: c.Token[:], fingerprint: c.Fingerprint, fresh: true, free: true}
	r.status.Int32, r.attempt.Int32 = int32(dedup.StatusInProgress), 1
	return r
}
