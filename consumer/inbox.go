package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Inbox marks an event as processed in the database transaction that holds the
// handler's own writes: they commit together or not at all, so the effect
// happens exactly once. DB is required for all but Mark and Unmark.
//
// Two copies at once: one runs, the other is [Busy]. Postgres tells by an
// advisory lock, MySQL by GET_LOCK (not on Galera clusters, where its locks are
// each node's own and the second copy waits for the first one's row). SQLite
// writes one transaction at a time: the second copy waits for the first as long
// as the driver's busy timeout, and then mostly finds it done.
//
// How often an event failed can't be counted in a transaction that rolls back.
// Put the broker's count to use with [Limit].
type Inbox struct {
	DB      *sql.DB
	Dialect Dialect

	// Group is the consumer group: each group handles every event. At most 255
	// bytes.
	Group string

	// Table is the table's name, maybe with its schema ([DefaultTable] if "").
	// See [Dialect.Schema].
	Table string

	// TxOptions are those of the transactions that Handle begins; nil for the
	// driver's defaults.
	TxOptions *sql.TxOptions

	// Retention is how long a processed event is remembered (7 days if 0). It
	// must be longer than the sender goes on redelivering.
	Retention time.Duration
}

var _ BatchConsumer = (*Inbox)(nil)

type txKey struct{}

// Tx returns the transaction that an event handled by [Inbox] is marked in, or
// nil outside of one. The handler makes its writes through it and must neither
// commit it nor roll it back.
func Tx(ctx context.Context) *sql.Tx {
	tx, _ := ctx.Value(txKey{}).(*sql.Tx)
	return tx
}

// Handle implements [Consumer]. The handler finds the transaction with [Tx].
// It is rolled back when the handler fails or panics, or when ctx ends first.
//
// Failed with an error of COMMIT means that it is not known here whether the
// effect is durable; the next delivery finds out. A transaction that lost a
// race (a serialization failure, a deadlock) is Failed too, and runs again with
// the next delivery.
func (in *Inbox) Handle(ctx context.Context, id string, fn Handler) Result {
	return in.handle(ctx, []string{id}, func(ctx context.Context, _ int) error { return fn(ctx) }, false)[0]
}

// maxBatch is how many events share a transaction. Each holds a lock, of which
// a Postgres server has 6,400 by default.
const maxBatch = 256

// HandleBatch implements [BatchConsumer]: the events share transactions, up to
// 256 each, in which a savepoint keeps them apart: one that fails is rolled
// back alone. Where the transaction itself can't be committed, all of its
// events are Failed.
func (in *Inbox) HandleBatch(ctx context.Context, ids []string, fn BatchHandler) []Result {
	results := make([]Result, 0, len(ids))
	for len(results) < len(ids) {
		from := len(results)
		n := min(len(ids)-from, maxBatch)
		results = append(results, in.handle(ctx, ids[from:from+n], func(ctx context.Context, i int) error {
			return fn(ctx, from+i)
		}, true)...)
	}
	return results
}

// handle handles ids in one transaction.
func (in *Inbox) handle(ctx context.Context, ids []string, fn BatchHandler, savepoints bool) []Result {
	for _, id := range ids {
		if _, err := checkKey(in.Group, id); err != nil {
			return in.apart(ctx, ids, fn, err)
		}
	}
	if err := in.check(true); err != nil {
		return all(ids, invalid(err))
	}
	s, err := in.begin(ctx)
	if err != nil {
		return all(ids, busy(err))
	}
	defer s.end(ctx)
	results, first, err := s.mark(ctx, ids)
	if err != nil {
		return all(ids, busy(err))
	}
	ran := 0
	for i, id := range ids {
		switch {
		case first[i] < i:
			results[i] = again(results[first[i]])
		case results[i].Status != 0:
		default:
			ran++
			results[i], err = s.run(ctx, id, func(ctx context.Context) error { return fn(ctx, i) }, savepoints)
			if err != nil {
				return lost(results, first, i, err)
			}
		}
	}
	if ran == 0 {
		return results // nothing to commit: all were processed before, or are busy
	}
	if err := s.commit(ctx, ids, results); err != nil {
		return lost(results, first, len(ids), err)
	}
	return results
}

// apart is for a batch in which some id can't be used: that one's result says
// so, and the others are handled as if it were not there.
func (in *Inbox) apart(ctx context.Context, ids []string, fn BatchHandler, err error) []Result {
	results := make([]Result, len(ids))
	var good []string
	var at []int
	for i, id := range ids {
		if _, kerr := checkKey(in.Group, id); kerr != nil {
			results[i] = invalid(kerr)
			continue
		}
		good, at = append(good, id), append(at, i)
	}
	if len(good) == 0 {
		return results
	}
	for i, r := range in.handle(ctx, good, func(ctx context.Context, i int) error { return fn(ctx, at[i]) }, true) {
		results[at[i]] = r
	}
	return results
}

// lost gives the results of a transaction that was not committed. What was known
// without it stays: processed before, busy, failed. What ran up to position end
// has failed with it, and the rest was not tried.
func lost(results []Result, first []int, end int, err error) []Result {
	for i, r := range results {
		switch {
		case first[i] < i:
			results[i] = again(results[first[i]])
		case r.Status == Done && !r.Duplicate, r.Status == 0 && i <= end:
			results[i] = Result{Status: Failed, Err: err}
		case r.Status == 0:
			results[i] = busy(err)
		}
	}
	return results
}

func all(ids []string, r Result) []Result {
	results := make([]Result, len(ids))
	for i := range results {
		results[i] = r
	}
	return results
}

// errRolledBack: the database ended the transaction by itself, after a deadlock
// for one, and the handler took no notice.
var errRolledBack = errors.New("consumer: the database rolled the transaction back")

// Mark marks the event as processed in tx, for those who own their
// transactions. It returns true if the event is new: do the work in tx, and
// commit. It returns false if the event was processed before: there is nothing
// to do. [ErrBusy] if another open transaction has marked it; any other error
// is the database's. After an error, roll back.
//
// In MySQL, and in SQLite, Mark waits for that other transaction instead, at
// most as long as innodb_lock_wait_timeout and the driver's busy timeout say.
// In MySQL commit also after false, before the message is acknowledged: InnoDB
// shows the other's commit before it is on disk, and yours makes sure of it.
func (in *Inbox) Mark(ctx context.Context, tx *sql.Tx, id string) (first bool, err error) {
	key, err := checkKey(in.Group, id)
	if err != nil {
		return false, err
	}
	if err := in.check(false); err != nil {
		return false, err
	}
	return in.markOne(ctx, tx, key)
}

func (in *Inbox) markOne(ctx context.Context, tx *sql.Tx, key dedup.Key) (bool, error) {
	st := in.Dialect.statements(in.table())
	if in.Dialect == Postgres {
		var got, first bool
		err := tx.QueryRowContext(ctx, st.mark, Lock(in.Table, key.Scope, key.ID), key.Scope, key.ID).Scan(&got, &first)
		if err == nil && !got {
			err = ErrBusy
		}
		return first, wrap("mark", err)
	}
	var res sql.Result
	var err error
	if in.Dialect == MySQL {
		res, err = tx.ExecContext(ctx, inline(st.mark, key.Scope, key.ID))
	} else {
		res, err = tx.ExecContext(ctx, st.mark, key.Scope, key.ID)
	}
	if err != nil {
		return false, wrap("mark", err)
	}
	n, err := res.RowsAffected()
	return n == 1, wrap("mark", err)
}

// arg is s as the columns hold it: bytes in MySQL, where a collation would take
// different ids for the same.
func (in *Inbox) arg(s string) any {
	if in.Dialect == MySQL {
		return []byte(s)
	}
	return s
}

// Migrate makes the table. It may run again, and on several nodes at once.
func (in *Inbox) Migrate(ctx context.Context) error {
	if err := in.check(true); err != nil {
		return err
	}
	schema, err := in.Dialect.Schema(in.Table)
	if err != nil {
		return err
	}
	tx, err := in.DB.BeginTx(ctx, nil)
	if err != nil {
		return wrap("migrate", err)
	}
	defer tx.Rollback()
	if in.Dialect == Postgres {
		// Postgres's IF NOT EXISTS fails for one of two that run at once.
		if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1)`, Lock(in.Table, "migrate", "migrate")); err != nil {
			return wrap("migrate", err)
		}
	}
	for _, q := range schema {
		if _, err := tx.ExecContext(ctx, q); err != nil {
			return wrap("migrate", err)
		}
	}
	return wrap("migrate", tx.Commit())
}

// Purge forgets at most limit events, of every group in the table, that were
// processed longer ago than Retention, and returns how many. Fewer than limit
// means that there are no more for now. It may run on any number of nodes.
func (in *Inbox) Purge(ctx context.Context, limit int) (int, error) {
	if err := in.check(true); err != nil {
		return 0, err
	}
	if limit <= 0 {
		return 0, fmt.Errorf("%w: the limit of Purge must be positive", ErrConfig)
	}
	if in.Dialect == MySQL {
		n, err := in.purgeMySQL(ctx, limit)
		return n, wrap("purge", err)
	}
	res, err := in.DB.ExecContext(ctx, in.Dialect.statements(in.table()).purge,
		orDefault(in.Retention, DefaultRetention).Microseconds(), limit)
	if err != nil {
		return 0, wrap("purge", err)
	}
	n, err := res.RowsAffected()
	return int(n), wrap("purge", err)
}

func (in *Inbox) table() string {
	if in.Table == "" {
		return DefaultTable
	}
	return in.Table
}

func (in *Inbox) check(db bool) error {
	switch {
	case db && in.DB == nil:
		return fmt.Errorf("%w: DB is nil", ErrConfig)
	case in.Dialect > SQLite:
		return fmt.Errorf("%w: no such dialect: %d", ErrConfig, in.Dialect)
	case in.Retention < 0:
		return fmt.Errorf("%w: Retention must not be negative", ErrConfig)
	}
	return checkTable(in.table())
}

func wrap(what string, err error) error {
	if err == nil || errors.Is(err, ErrBusy) {
		return err
	}
	return fmt.Errorf("consumer: %s: %w", what, err)
}
