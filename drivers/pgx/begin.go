package pgxstore

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
)

// errAgain: only a new transaction will see what the row has become.
var errAgain = errors.New("pgxstore: the row was changing")

// Begin implements [dedup.TxStore]. The end of ctx cuts off Begin, and not the
// transaction that it returned.
func (s *Store) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	if err := checkClaim(&c); err != nil {
		return nil, dedup.Result{}, err
	}
	for range maxTries {
		t, res, err := s.begin(ctx, c)
		switch {
		case errors.Is(err, errAgain), codeOf(err) == codeSerialization && ctx.Err() == nil:
		case err != nil:
			return nil, dedup.Result{}, wrap("begin", err)
		case t == nil: // and not a nil *tx in an interface
			return nil, res, nil
		default:
			return t, res, nil
		}
	}
	return nil, dedup.Result{}, errContended()
}

// begin returns a nil tx if the claim got nothing to hold.
func (s *Store) begin(ctx context.Context, c dedup.Claim) (_ *tx, _ dedup.Result, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, dedup.Result{}, err
	}
	t := &tx{s: s, conn: conn, claim: c}
	keep := false
	defer func() {
		if !keep {
			t.drop(ctx)
		}
	}()

	args := s.claimArgs(c)
	var r row
	var n int
	b := &pgx.Batch{}
	b.BeginTx(s.txOpts)
	b.Queue(s.sql.claimTx, args...).QueryRow(func(res pgx.Row) (err error) {
		n, err = scanRow(res, &r)
		return err
	})
	br := conn.SendBatch(ctx, b)
	if err := br.Close(); err != nil {
		return nil, dedup.Result{}, err
	}
	t.work = newWork(br.Tx())

	res, held, err := s.settle(ctx, br.Tx(), c, args, n, &r)
	keep = held && err == nil
	if !keep {
		return nil, res, err
	}
	return t, res, nil
}

// settle goes on from a claim's answer in its transaction, which is n rows. It
// reports whether the transaction holds the claim.
func (s *Store) settle(ctx context.Context, ptx pgx.Tx, c dedup.Claim, args []any, n int, r *row) (dedup.Result, bool, error) {
	for range maxTries {
		if n == 0 {
			// Somebody inserted the row meanwhile and has committed. Under
			// repeatable read it would be an error instead.
			var err error
			*r = row{}
			if n, err = scanRow(ptx.QueryRow(ctx, s.sql.claimTx, args...), r); err != nil {
				return dedup.Result{}, false, err
			}
			continue
		}
		state, step := r.judge(c)
		if r.kind == kindThere && step == stepNone && (state == dedup.Won || state == dedup.Abandoned) {
			step = stepTakeOver // ours, but not held by this transaction yet
		}
		if step == stepNone {
			return result(state, r), state == dedup.Won, nil
		}
		sql := s.sql.takeOverTx
		if step == stepReclaim {
			sql = s.sql.reclaimTx
		}
		var free, changed bool
		err := ptx.QueryRow(ctx, sql, append(args, r.token)...).Scan(&free, &changed)
		switch {
		case err != nil:
			return dedup.Result{}, false, err
		case !free:
			return dedup.Result{State: dedup.InProgress}, false, nil
		case changed:
			return taken(c, step, r), true, nil
		}
		n = 0 // look again
	}
	return dedup.Result{}, false, errAgain
}

// scanRow returns how many rows there were, 0 or 1.
func scanRow(res pgx.Row, r *row) (int, error) {
	err := res.Scan(r.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return 1, err
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
