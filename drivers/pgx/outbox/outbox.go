// Package pgxoutbox is the outbox over pgx: messages are written in a pgx.Tx, and
// relays on other nodes are woken by NOTIFY.
//
//	box := pgxoutbox.New(pool, pgxoutbox.Options{})
//	go box.Listen(ctx) // where a relay runs, or wake-ups are to be sent
//	err := box.InTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
//		// the business writes, and then
//		return box.Enqueue(ctx, tx, outbox.Message{Topic: "orders", Key: id, Payload: body})
//	})
//	relay, err := outbox.New(box, publisher, outbox.Options{})
//
// The table is that of outbox.Outbox with the dialect Postgres, and both may use
// one table at the same time.
package pgxoutbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/outbox"
)

// Options are those of an [Outbox]. The zero value works.
type Options struct {
	// Table, Retention and Inject are those of outbox.Outbox.
	Table     string
	Retention time.Duration
	Inject    func(ctx context.Context, header map[string]string)

	// TxOptions are those of the transactions that InTx begins.
	TxOptions pgx.TxOptions

	// Channel is the channel of NOTIFY (the table's name if ""). Those who write
	// and those who relay must have the same.
	Channel string

	// NotifyEvery is how much time there is between two NOTIFYs of this process
	// at the least (10 ms if 0): one tells of all commits before it.
	NotifyEvery time.Duration

	// PingEvery is how long a listening connection may be silent before it is
	// asked whether it is still there, and PingTimeout how long it has to answer
	// (15 s and 5 s if 0).
	PingEvery, PingTimeout time.Duration
}

// Outbox is an outbox.Outbox, whose methods it has, that is written through pgx.
type Outbox struct {
	*outbox.Outbox

	pool  *pgxpool.Pool
	opts  Options
	dirty chan struct{} // has a value if there is something to NOTIFY of
}

var _ outbox.Store = (*Outbox)(nil)

// New returns an outbox on pool, which stays the caller's to close, after
// [Outbox.Close].
func New(pool *pgxpool.Pool, opts Options) *Outbox {
	if opts.Channel == "" {
		opts.Channel = opts.Table
	}
	if opts.Channel == "" {
		opts.Channel = outbox.DefaultTable
	}
	setDefault(&opts.NotifyEvery, 10*time.Millisecond)
	setDefault(&opts.PingEvery, 15*time.Second)
	setDefault(&opts.PingTimeout, 5*time.Second)
	o := &Outbox{pool: pool, opts: opts, dirty: make(chan struct{}, 1), Outbox: &outbox.Outbox{
		Dialect: outbox.Postgres, Table: opts.Table, Retention: opts.Retention, Inject: opts.Inject}}
	if pool != nil {
		o.DB = stdlib.OpenDBFromPool(pool)
	}
	return o
}

func setDefault(d *time.Duration, to time.Duration) {
	if *d <= 0 {
		*d = to
	}
}

// Close gives back what the relay's side holds; the pool stays open.
func (o *Outbox) Close() error {
	if o.DB == nil {
		return nil
	}
	return o.DB.Close()
}

// Enqueue writes msgs in the caller's transaction, in one round trip for each
// 4,096; see outbox.Outbox. Call [Outbox.Wake] after the commit, or use
// [Outbox.InTx].
func (o *Outbox) Enqueue(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	return o.Outbox.Enqueue(ctx, execer{tx}, msgs...)
}

type execer struct{ tx pgx.Tx }

func (e execer) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tag, err := e.tx.Exec(ctx, query, args...)
	return driver.RowsAffected(tag.RowsAffected()), err
}

// InTx runs fn in a transaction, commits it, and wakes the relays, here and
// elsewhere. It is rolled back if fn returns an error, or panics. An error of
// the commit may mean that it is not known whether it was committed.
func (o *Outbox) InTx(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if o.pool == nil {
		return fmt.Errorf("%w: the pool is nil", outbox.ErrConfig)
	}
	tx, err := o.pool.BeginTx(ctx, o.opts.TxOptions)
	if err != nil {
		return fmt.Errorf("pgxoutbox: begin: %w", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		_ = tx.Rollback(ctx) // after Commit it does nothing
	}()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("pgxoutbox: commit: %w", err)
	}
	o.Wake()
	return nil
}

const cleanupTimeout = 2 * time.Second

// Wake tells the relays that there are messages: one in this process at once,
// others by a NOTIFY that [Outbox.Listen] sends. It never blocks.
func (o *Outbox) Wake() {
	o.Outbox.Wake()
	select {
	case o.dirty <- struct{}{}:
	default: // the next NOTIFY tells of this, too
	}
}
