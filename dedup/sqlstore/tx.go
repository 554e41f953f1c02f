package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

type txKey struct{}

// Tx returns the transaction that the work runs in, or nil outside of
// transaction mode. It must be neither committed nor rolled back, since the
// answer is stored in it; [dedup.Rollback] is how the work undoes its writes.
func Tx(ctx context.Context) *sql.Tx {
	tx, _ := LookupTx(ctx)
	return tx
}

// LookupTx is [Tx] for code that runs in both modes: ok says whether there is a
// transaction.
func LookupTx(ctx context.Context) (tx *sql.Tx, ok bool) {
	tx, ok = ctx.Value(txKey{}).(*sql.Tx)
	return tx, ok
}

// Begin implements [dedup.TxStore]. The end of ctx cuts off Begin, and not the
// transaction that it returned.
func (s *Store) Begin(ctx context.Context, dc dedup.Claim) (dedup.Tx, dedup.Result, error) {
	c, err := s.newClaim(dc)
	if err != nil {
		return nil, dedup.Result{}, err
	}
	if err := s.prepare(ctx); err != nil {
		return nil, dedup.Result{}, s.wrap("begin", err)
	}
	if d, ok := s.dialect.(peeker); ok {
		if res, ok, err := d.peek(ctx, s, c); ok || err != nil {
			return nil, res, s.wrap("begin", err)
		}
	}
	for range maxTries {
		var t *tx
		var res dedup.Result
		if t, res, err = s.begin(ctx, c); err == nil {
			if t == nil {
				return nil, res, nil
			}
			return t, res, nil
		}
		if ctx.Err() != nil || !errors.Is(err, errAgain) && s.classify(err) != Serialization {
			break
		}
	}
	if errors.Is(err, errAgain) {
		err = fmt.Errorf("%w: %w", dedup.ErrBusy, err)
	}
	return nil, dedup.Result{}, s.wrap("begin", err)
}

// peeker is a dialect for which it pays to look for the row before a
// transaction is begun. ok says that the result stands.
type peeker interface {
	peek(ctx context.Context, s *Store, c *claim) (res dedup.Result, ok bool, err error)
}

func (s *Store) begin(ctx context.Context, c *claim) (*tx, dedup.Result, error) {
	h, err := s.dialect.enter(ctx, s, c.Key)
	if errors.Is(err, errTaken) {
		return nil, dedup.Result{State: dedup.InProgress}, nil
	}
	if err != nil {
		return nil, dedup.Result{}, err
	}
	t := &tx{s: s, c: c, hold: h}
	// The transaction must not end with ctx but by Commit or Rollback alone, or
	// it could not be told from one that the work has ended.
	var life context.Context
	life, t.kill = context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, t.kill)
	t.tx, err = h.BeginTx(life, &sql.TxOptions{Isolation: s.isolation})
	if err != nil {
		stop()
		t.end(false)
		return nil, dedup.Result{}, orContext(ctx, err)
	}
	res, err := c.settle(ctx, querier{s: s, tx: t.tx})
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil && (res.State == dedup.Won || res.State == dedup.Abandoned) {
		return t, res, nil
	}
	t.end(t.tx.Rollback() == nil)
	if err == nil {
		err = c.durable(ctx, s, res)
	}
	if err != nil {
		return nil, dedup.Result{}, orContext(ctx, err)
	}
	return nil, res, nil
}

// orContext prefers the context's error to what the driver made of it.
func orContext(ctx context.Context, err error) error {
	if cerr := ctx.Err(); cerr != nil && !isContext(err) {
		return fmt.Errorf("%w: %w", cerr, err)
	}
	return err
}

// tx is a [dedup.Tx].
type tx struct {
	s    *Store
	c    *claim
	tx   *sql.Tx
	kill context.CancelFunc // ends the transaction, at the latest
	hold hold
}

// Context implements [dedup.Tx]; see [Tx].
func (t *tx) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, txKey{}, t.tx)
}

func (t *tx) end(clean bool) {
	t.kill()
	t.hold.leave(clean)
}

// Commit implements [dedup.Tx].
func (t *tx) Commit(ctx context.Context, done dedup.Completion) error {
	if err := t.complete(ctx, done); err != nil {
		rerr := t.tx.Rollback()
		t.end(rerr == nil || errors.Is(rerr, sql.ErrTxDone))
		return fmt.Errorf("sqlstore: commit: %w", err)
	}
	t.hold.allow()
	stop := context.AfterFunc(ctx, t.kill)
	err := t.tx.Commit()
	stop()
	t.end(err == nil)
	if err == nil {
		return nil
	}
	switch class := t.s.classify(err); {
	case errors.Is(err, sql.ErrTxDone): // the end of ctx came before COMMIT
		err = fmt.Errorf("%w: %w", dedup.ErrNotCommitted, orContext(ctx, err))
	case class == Serialization, class == Busy:
		err = fmt.Errorf("%w: %w", dedup.ErrSerialization, err)
	case class == Conflict, class == Aborted: // a deferred constraint
		err = fmt.Errorf("%w: %w", dedup.ErrTxAborted, err)
	default:
		if err = t.find(ctx, err); err == nil {
			return nil
		}
	}
	return fmt.Errorf("sqlstore: commit: %w", err)
}

// complete stores the outcome in the transaction. If it fails, nothing has been
// committed, whatever the error, for COMMIT was not sent.
func (t *tx) complete(ctx context.Context, done dedup.Completion) error {
	if err := checkCompletion(done); err != nil {
		return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
	}
	args := append([]any{t.c.scope, t.c.id, t.c.Token[:]}, completionArgs(done)...)
	n, err := querier{s: t.s, tx: t.tx}.exec(ctx, t.s.q.complete, args...)
	switch {
	case err == nil && n == 0:
		// The database has rolled back by itself, as MySQL does after a
		// deadlock, and the work went on regardless.
		return fmt.Errorf("%w: the claim is gone from it", dedup.ErrTxAborted)
	case err == nil:
		return nil
	case errors.Is(err, sql.ErrTxDone) && t.hold.guarded:
		return fmt.Errorf("%w: the work has ended it: %w", dedup.ErrTxAborted, err)
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: %w", dedup.ErrTxEnded, err)
	}
	switch class := t.s.classify(err); {
	case class == Serialization, class == Busy:
		return fmt.Errorf("%w: %w", dedup.ErrSerialization, err)
	case class == Aborted, class == Conflict && t.hold.guarded: // refused
		return fmt.Errorf("%w: %w", dedup.ErrTxAborted, err)
	}
	return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
}

// find learns what became of a COMMIT that failed with err: nil if the outcome
// is there.
func (t *tx) find(ctx context.Context, err error) error {
	r, ferr := t.s.dialect.settled(ctx, t.s, t.c.Key)
	switch {
	case ferr == nil && r.holds(t.c.Token) && !r.is(dedup.StatusInProgress):
		if derr := t.s.dialect.durable(ctx, t.s, t.c.Key, r); derr != nil {
			return fmt.Errorf("%w (and its outcome may not last: %w)", err, derr)
		}
		return nil
	case ferr == nil, isNoRows(ferr):
		return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
	}
	return fmt.Errorf("%w (and its outcome could not be read: %w)", err, ferr)
}

// rollbackTimeout bounds a rollback on a connection that does not answer.
const rollbackTimeout = 5 * time.Second

// Rollback implements [dedup.Tx]. It also does so under a context that has
// ended: cut short, the server would hold the key until it had noticed.
func (t *tx) Rollback(context.Context) error {
	timer := time.AfterFunc(rollbackTimeout, t.kill)
	err := t.tx.Rollback()
	inTime := timer.Stop() // else the transaction may have been ended by us
	ended := errors.Is(err, sql.ErrTxDone) && inTime
	t.end(err == nil || ended)
	if ended && !t.hold.guarded {
		return fmt.Errorf("sqlstore: rollback: %w: %w", dedup.ErrTxEnded, err)
	}
	return nil // else the connection is lost, and the transaction with it
}
