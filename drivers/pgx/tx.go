package pgxstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
)

// tx is a [dedup.Tx]: a connection in a transaction that holds a claim.
type tx struct {
	s     *Store
	conn  *pgxpool.Conn
	claim dedup.Claim
	work  *work
}

type txKey struct{}

// Tx returns the transaction that the work runs in, or nil outside of
// transaction mode. Its Commit and Rollback return [ErrNotYours]; Begin makes a
// savepoint. It ends with the work, and must not be used after that.
//
// What the work does through the transaction's Conn is not seen by it, so that
// a serialization failure that the work swallows there is taken for any other
// error.
func Tx(ctx context.Context) pgx.Tx {
	t, _ := LookupTx(ctx)
	return t
}

// LookupTx is [Tx] for code that runs in both modes: ok says whether there is a
// transaction.
func LookupTx(ctx context.Context) (t pgx.Tx, ok bool) {
	t, ok = ctx.Value(txKey{}).(pgx.Tx)
	return t, ok
}

// Context implements [dedup.Tx]; see [Tx].
func (t *tx) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, txKey{}, pgx.Tx(&workTx{work: t.work}))
}

var (
	errLost     = errors.New("pgxstore: the connection was lost")
	errRowsOpen = errors.New("pgxstore: the work left rows open")
	errEarlier  = errors.New("pgxstore: a statement failed before")
	errClaim    = errors.New("pgxstore: the claim is gone from the transaction")
)

// Commit implements [dedup.Tx].
func (t *tx) Commit(ctx context.Context, c dedup.Completion) error {
	if t.work.ended.Swap(true) {
		return fmt.Errorf("pgxstore: commit: %w", dedup.ErrTxEnded)
	}
	err := t.commit(ctx, c)
	t.drop(ctx)
	if errors.Is(err, errLost) {
		// The dead connection is given back by now, so that a pool of one is
		// enough to find out.
		err = t.find(ctx, err)
	}
	if err != nil {
		return fmt.Errorf("pgxstore: commit: %w", err)
	}
	return nil
}

// commit returns errLost if it can't be told from here what became of it.
func (t *tx) commit(ctx context.Context, c dedup.Completion) error {
	if err := checkCompletion(c); err != nil {
		return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
	}
	pc := t.conn.Conn().PgConn()
	switch {
	case pc.IsClosed():
		return errLost
	case pc.IsBusy():
		closeNow(t.conn)
		return fmt.Errorf("%w: %w", dedup.ErrTxAborted, errRowsOpen)
	case pc.TxStatus() == 'I':
		return dedup.ErrTxEnded
	case pc.TxStatus() == 'E':
		cause := orDefault(t.work.failure, errEarlier)
		if lostRace(cause) {
			return fmt.Errorf("%w: %w", dedup.ErrSerialization, cause)
		}
		return fmt.Errorf("%w: %w", dedup.ErrTxAborted, cause)
	}

	b := &pgx.Batch{}
	b.Queue(t.s.sql.completeTx, completionArgs(t.claim.Key, t.claim.Token, c)...)
	b.Queue("commit")
	br := t.conn.SendBatch(ctx, b)
	completed, err := br.Exec()
	var committed pgconn.CommandTag
	completing := err != nil
	if err == nil {
		committed, err = br.Exec()
	}
	if cerr := br.Close(); err == nil {
		err = cerr
	}
	switch {
	case err == nil && committed.String() == "ROLLBACK":
		return fmt.Errorf("%w: %w", dedup.ErrTxAborted, errEarlier)
	case err == nil && completed.RowsAffected() == 0:
		// The work has ended the transaction by a statement of its own, and
		// begun another.
		return fmt.Errorf("%w: %w", dedup.ErrTxEnded, errClaim)
	case err == nil:
		return nil
	case lostRace(err):
		return fmt.Errorf("%w: %w", dedup.ErrSerialization, err)
	case refused(err) && !completing: // a deferred constraint, say
		return fmt.Errorf("%w: %w", dedup.ErrTxAborted, err)
	case refused(err), !pc.IsClosed() && pc.TxStatus() != 'I':
		return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
	}
	closeNow(t.conn)
	return fmt.Errorf("%w: %w", errLost, err)
}

// How patiently a database is asked what became of a COMMIT: it may be starting
// again.
const (
	findBackoff    = 20 * time.Millisecond
	maxFindBackoff = time.Second
)

// find learns what became of a commit whose connection was lost by err: nil if
// it took effect. It tries for as long as ctx lasts.
func (t *tx) find(ctx context.Context, err error) error {
	for backoff := findBackoff; ; backoff = min(2*backoff, maxFindBackoff) {
		r, n, ferr := t.s.settled(ctx, t.claim.Key)
		switch {
		case ferr == nil && n == 1 && r.holds(t.claim.Token) && r.status == dedup.StatusInProgress:
			return fmt.Errorf("%w: %w", dedup.ErrTxEnded, err) // the work had committed it
		case ferr == nil && n == 1 && r.holds(t.claim.Token):
			return nil
		case ferr == nil:
			return fmt.Errorf("%w: %w", dedup.ErrNotCommitted, err)
		}
		timer := time.NewTimer(backoff)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w (and its outcome could not be read: %w)", err, ferr)
		case <-timer.C:
		}
	}
}

// settled reads the row of key, and how many there are, when no transaction
// holds the key any more: it waits for the lock that each holds to its end, and
// looks by a statement of its own, so that it sees what that one has committed.
func (s *Store) settled(ctx context.Context, key dedup.Key) (r row, n int, err error) {
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	b.Queue(s.sql.await, s.lockOf(key))
	b.Queue(s.sql.get, key.Scope, key.ID).QueryRow(func(res pgx.Row) (err error) {
		n, err = scanRow(res, &r)
		return err
	})
	b.Queue("commit")
	err = s.pool.SendBatch(ctx, b).Close()
	return r, n, err
}

// Rollback implements [dedup.Tx].
func (t *tx) Rollback(ctx context.Context) error {
	if t.work.ended.Swap(true) {
		return fmt.Errorf("pgxstore: rollback: %w", dedup.ErrTxEnded)
	}
	pc := t.conn.Conn().PgConn()
	ended := !pc.IsClosed() && !pc.IsBusy() && pc.TxStatus() == 'I'
	t.drop(ctx)
	if ended {
		return fmt.Errorf("pgxstore: rollback: %w", dedup.ErrTxEnded)
	}
	return nil // else the connection is lost, and the transaction with it
}
