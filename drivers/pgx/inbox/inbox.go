// Package pgxinbox is the consumer's inbox over pgx: an event is marked as
// processed in the pgx transaction that holds the handler's own writes, so that
// they commit together or not at all and the effect happens exactly once.
//
//	in := &pgxinbox.Inbox{Pool: pool, Group: "billing"}
//	err := in.Migrate(ctx)
//	...
//	res := in.Handle(ctx, eventID, func(ctx context.Context) error {
//		_, err := pgxinbox.Tx(ctx).Exec(ctx, "INSERT INTO charges ...")
//		return err
//	})
//
// The table is that of consumer.Inbox with the dialect Postgres, and both may
// use one table at the same time. This one saves a round trip, since BEGIN goes
// out together with the mark, and refuses the handler's COMMIT and ROLLBACK.
package pgxinbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/consumer"
)

// ErrNotYours: the handler called Commit or Rollback on the transaction that it
// was given. It returns nil or an error instead.
var ErrNotYours = errors.New("pgxinbox: the transaction is not the handler's to end")

// Inbox is a consumer.Consumer. Pool is required for all but Mark.
type Inbox struct {
	Pool *pgxpool.Pool

	// Group is the consumer group: each group handles every event. At most 255
	// bytes.
	Group string

	// Table is the table's name, maybe with its schema (consumer.DefaultTable
	// if ""). See consumer.Dialect.Schema.
	Table string

	// TxOptions are those of the transactions that Handle begins.
	TxOptions pgx.TxOptions

	// Retention is how long a processed event is remembered (7 days if 0). It
	// must be longer than the sender goes on redelivering.
	Retention time.Duration
}

var _ consumer.Consumer = (*Inbox)(nil)

type txKey struct{}

// Tx returns the transaction that an event handled by [Inbox] is marked in, or
// nil outside of one. Its Commit and Rollback are refused with [ErrNotYours];
// its Begin makes a savepoint, which may be ended as usual.
func Tx(ctx context.Context) pgx.Tx {
	tx, _ := ctx.Value(txKey{}).(pgx.Tx)
	return tx
}

// handlerTx is the transaction as the handler has it.
type handlerTx struct{ pgx.Tx }

func (handlerTx) Commit(context.Context) error   { return ErrNotYours }
func (handlerTx) Rollback(context.Context) error { return ErrNotYours }

// cleanupTimeout bounds a rollback, which the end of the caller's context must
// not keep from happening.
const cleanupTimeout = 2 * time.Second

// Handle implements consumer.Consumer. The handler finds the transaction with
// [Tx]. It is rolled back when the handler fails or panics.
//
// Failed with an error of COMMIT means that it is not known here whether the
// effect is durable; the next delivery finds out.
func (in *Inbox) Handle(ctx context.Context, id string, fn consumer.Handler) consumer.Result {
	st, err := in.statements(id)
	if err == nil && in.Pool == nil {
		err = fmt.Errorf("%w: Pool is nil", consumer.ErrConfig)
	}
	if err != nil {
		return consumer.Result{Status: consumer.Failed, Err: err}
	}
	conn, err := in.Pool.Acquire(ctx)
	if err != nil {
		return busy(wrap("connect", err))
	}
	defer conn.Release()
	var got, first bool
	b := &pgx.Batch{}
	b.BeginTx(in.TxOptions)
	b.Queue(st.mark, st.args...).QueryRow(func(row pgx.Row) error { return row.Scan(&got, &first) })
	br := conn.SendBatch(ctx, b)
	err = br.Close()
	tx := br.Tx()
	defer rollback(ctx, tx) // after a commit it does nothing
	switch {
	case err != nil:
		return busy(wrap("mark", err))
	case !got:
		return busy(consumer.ErrBusy)
	case !first:
		return consumer.Result{Status: consumer.Done, Duplicate: true}
	}
	ctx = consumer.OperationContext(ctx, in.Group, id)
	err = fn(context.WithValue(ctx, txKey{}, pgx.Tx(handlerTx{tx})))
	switch {
	case errors.Is(err, consumer.ErrPoison):
		return consumer.Result{Status: consumer.Poison, Err: err}
	case err != nil:
		return consumer.Result{Status: consumer.Failed, Err: err}
	}
	if err := tx.Commit(ctx); err != nil {
		return consumer.Result{Status: consumer.Failed, Err: wrap("commit", err)}
	}
	return consumer.Result{Status: consumer.Done}
}

func rollback(ctx context.Context, tx pgx.Tx) {
	if tx == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // a connection that is gone has rolled back by itself
}

func busy(err error) consumer.Result {
	return consumer.Result{Status: consumer.Busy, RetryAfter: consumer.DefaultRetryAfter, Err: err}
}

// Mark marks the event as processed in tx, for those who own their
// transactions. It returns true if the event is new: do the work in tx, and
// commit. It returns false if the event was processed before: there is nothing
// to do. consumer.ErrBusy if another open transaction has marked it; any other
// error is the database's. After an error, roll back.
func (in *Inbox) Mark(ctx context.Context, tx pgx.Tx, id string) (first bool, err error) {
	st, err := in.statements(id)
	if err != nil {
		return false, err
	}
	var got bool
	if err := tx.QueryRow(ctx, st.mark, st.args...).Scan(&got, &first); err != nil {
		return false, wrap("mark", err)
	}
	if !got {
		return false, consumer.ErrBusy
	}
	return first, nil
}

// Migrate makes the table. It may run again, and on several nodes at once.
func (in *Inbox) Migrate(ctx context.Context) error {
	if in.Pool == nil {
		return fmt.Errorf("%w: Pool is nil", consumer.ErrConfig)
	}
	schema, err := consumer.Postgres.Schema(in.Table)
	if err != nil {
		return err
	}
	return wrap("migrate", pgx.BeginFunc(ctx, in.Pool, func(tx pgx.Tx) error {
		// Postgres's IF NOT EXISTS fails for one of two that run at once.
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, consumer.Lock(in.Table, "migrate", "migrate")); err != nil {
			return err
		}
		for _, q := range schema {
			if _, err := tx.Exec(ctx, q); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Purge forgets at most limit events, of every group in the table, that were
// processed longer ago than Retention, and returns how many. Fewer than limit
// means that there are no more for now. It may run on any number of nodes.
func (in *Inbox) Purge(ctx context.Context, limit int) (int, error) {
	st, err := in.statements("any")
	switch {
	case err != nil:
		return 0, err
	case in.Pool == nil:
		return 0, fmt.Errorf("%w: Pool is nil", consumer.ErrConfig)
	case limit <= 0:
		return 0, fmt.Errorf("%w: the limit of Purge must be positive", consumer.ErrConfig)
	}
	retention := in.Retention
	if retention == 0 {
		retention = consumer.DefaultRetention
	}
	tag, err := in.Pool.Exec(ctx, st.purge, retention.Microseconds(), limit)
	return int(tag.RowsAffected()), wrap("purge", err)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("pgxinbox: %s: %w", what, err)
}
