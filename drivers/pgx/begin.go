package pgxstore

import (
	"bytes"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
)

// Begin implements [dedup.TxStore]. The end of ctx cuts off Begin, and not the
// transaction that it returned.
func (s *Store) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	if err := checkClaim(&c); err != nil {
		return nil, dedup.Result{}, err
	}
	if s.guess.there() {
		// A replay needs no transaction.
		var r row
		n, err := scanRow(s.pool.QueryRow(ctx, s.sql.get, c.Key.Scope, c.Key.ID), &r)
		if err != nil {
			return nil, dedup.Result{}, wrap("begin", err)
		}
		s.guess.was(n > 0)
		if n > 0 {
			if state, step := r.judge(c); step == stepNone && state != dedup.Won && state != dedup.Abandoned {
				return nil, result(state, &r), nil
			}
		}
	}
	for range maxTries {
		t, res, err := s.begin(ctx, c)
		switch {
		case codeOf(err) == codeSerialization && ctx.Err() == nil:
			// Only a new transaction will see what the row has become.
		case err != nil:
			return nil, dedup.Result{}, wrap("begin", err)
		case t == nil: // and not a nil *tx in an interface
			return nil, res, nil
		default:
			return t, res, nil
		}
	}
	return nil, dedup.Result{}, wrap("begin", errContended())
}

// begin returns a nil tx if the claim got nothing to hold.
func (s *Store) begin(ctx context.Context, c dedup.Claim) (*tx, dedup.Result, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, dedup.Result{}, err
	}
	t := &tx{s: s, conn: conn, claim: c}
	res, held, err := t.begin(ctx)
	if !held || err != nil {
		t.drop(ctx)
		return nil, res, err
	}
	return t, res, nil
}

// begin sends BEGIN together with the claim, and looks closer where that is not
// enough. It reports whether the transaction holds the claim.
func (t *tx) begin(ctx context.Context) (dedup.Result, bool, error) {
	s, c, args := t.s, t.claim, t.s.claimArgs(t.claim)
	insert := call{sql: s.sql.insertTx, args: args, token: new([]byte)}
	b := &pgx.Batch{}
	b.BeginTx(s.txOpts)
	insert.queue(b)
	br := t.conn.SendBatch(ctx, b)
	if err := br.Close(); err != nil {
		return dedup.Result{}, false, err
	}
	t.work = &work{ptx: br.Tx()}
	if bytes.Equal(*insert.token, c.Token[:]) {
		s.guess.was(false)
		return fresh(c), true, nil
	}
	var r row
	n, err := scanRow(br.Tx().QueryRow(ctx, s.sql.get, c.Key.Scope, c.Key.ID), &r)
	if err != nil {
		return dedup.Result{}, false, err
	}
	s.guess.was(n > 0)
	return s.settle(ctx, br.Tx(), &s.sql.tx, c, args, n, &r)
}

// rollbackTimeout bounds a ROLLBACK, which is sent although ctx may have ended:
// the key should be free by the time that the caller is told.
const rollbackTimeout = 2 * time.Second

// drop rolls back whatever conn's transaction is and gives conn back. If the
// server can't be told, conn is closed, and the database rolls back by itself.
func (t *tx) drop(ctx context.Context) {
	if t.work != nil {
		t.work.ended.Store(true)
	}
	defer t.conn.Release()
	pc := t.conn.Conn().PgConn()
	switch {
	case pc.IsClosed():
	case pc.IsBusy():
		closeNow(t.conn)
	case pc.TxStatus() != 'I':
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		if _, err := t.conn.Exec(ctx, "rollback"); err != nil {
			closeNow(t.conn)
		}
	}
}

// closeNow closes conn without waiting for the server.
func closeNow(conn *pgxpool.Conn) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = conn.Conn().Close(ctx) // what matters is that it is closed
}
