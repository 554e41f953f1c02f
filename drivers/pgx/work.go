package pgxstore

import (
	"context"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// work is the transaction as the work has it. It notes what failed, since an
// error that the work swallows decides what becomes of the whole: after a lost
// race it is run again.
type work struct {
	ptx        pgx.Tx
	ended      atomic.Bool // the engine's doing; conn is somebody else's by now
	failure    error       // the last that a statement met, nil if none
	savepoints int
}

func (w *work) note(err error) error {
	if code := codeOf(err); code != "" && code != codeAborted {
		w.failure = err
	}
	return err
}

// workTx is the pgx.Tx of the work, or a savepoint in it.
type workTx struct {
	*work
	savepoint string
	closed    bool // of a savepoint
}

var _ pgx.Tx = (*workTx)(nil)

// usable is pgx.ErrTxClosed after the end.
func (t *workTx) usable() error {
	if t.closed || t.ended.Load() {
		return pgx.ErrTxClosed
	}
	return nil
}

// Begin makes a savepoint.
func (t *workTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.usable(); err != nil {
		return nil, err
	}
	t.savepoints++
	name := "idempotency_" + strconv.Itoa(t.savepoints)
	if _, err := t.Exec(ctx, "savepoint "+name); err != nil {
		return nil, err
	}
	return &workTx{work: t.work, savepoint: name}, nil
}

// Commit releases a savepoint.
func (t *workTx) Commit(ctx context.Context) error {
	return t.end(ctx, "release savepoint ")
}

// Rollback rolls back to a savepoint.
func (t *workTx) Rollback(ctx context.Context) error {
	return t.end(ctx, "rollback to savepoint ")
}

func (t *workTx) end(ctx context.Context, sql string) error {
	if err := t.usable(); err != nil {
		return err
	}
	if t.savepoint == "" {
		return ErrNotYours
	}
	_, err := t.Exec(ctx, sql+t.savepoint)
	t.closed = true
	return err
}

func (t *workTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.usable(); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := t.ptx.Exec(ctx, sql, args...)
	return tag, t.note(err)
}

func (t *workTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.usable(); err != nil {
		return failedRows(err), err
	}
	r, err := t.ptx.Query(ctx, sql, args...)
	return &notedRows{r, t.work}, t.note(err)
}

func (t *workTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.usable(); err != nil {
		return failedRow{err}
	}
	return &notedRow{t.ptx.QueryRow(ctx, sql, args...), t.work}
}

func (t *workTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.usable(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return &notedBatch{t.ptx.SendBatch(ctx, b), t.work}
}

func (t *workTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := t.usable(); err != nil {
		return 0, err
	}
	n, err := t.ptx.CopyFrom(ctx, table, columns, src)
	return n, t.note(err)
}

func (t *workTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.usable(); err != nil {
		return nil, err
	}
	sd, err := t.ptx.Prepare(ctx, name, sql)
	return sd, t.note(err)
}

func (t *workTx) LargeObjects() pgx.LargeObjects { return t.ptx.LargeObjects() }

func (t *workTx) Conn() *pgx.Conn { return t.ptx.Conn() }

// notedRows, notedRow and notedBatch note the errors of what they wrap.
type notedRows struct {
	pgx.Rows
	w *work
}

func (r *notedRows) Next() bool {
	ok := r.Rows.Next()
	if !ok {
		r.w.note(r.Rows.Err()) //nolint:errcheck // returned by Err
	}
	return ok
}

func (r *notedRows) Close() {
	r.Rows.Close()
	r.w.note(r.Rows.Err()) //nolint:errcheck // returned by Err
}

type notedRow struct {
	pgx.Row
	w *work
}

func (r *notedRow) Scan(dest ...any) error { return r.w.note(r.Row.Scan(dest...)) }

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// failedRows are rows that there are none of, but err.
func failedRows(err error) pgx.Rows {
	rows, _ := pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	return rows
}

type notedBatch struct {
	pgx.BatchResults
	w *work
}

func (b *notedBatch) Exec() (pgconn.CommandTag, error) {
	tag, err := b.BatchResults.Exec()
	return tag, b.w.note(err)
}

func (b *notedBatch) Query() (pgx.Rows, error) {
	r, err := b.BatchResults.Query()
	return &notedRows{r, b.w}, b.w.note(err)
}

func (b *notedBatch) QueryRow() pgx.Row { return &notedRow{b.BatchResults.QueryRow(), b.w} }

func (b *notedBatch) Close() error { return b.w.note(b.BatchResults.Close()) }
