// Package sqlwrite has the writes that can be repeated: an UPDATE or DELETE of
// the version that the writer saw, an INSERT of a row that may be there
// already, and both together. Each decides in the statement that writes, never
// by looking first, and tells what it found.
//
// The SQL is the caller's, for any database of database/sql, run on a *sql.DB,
// or on a *sql.Tx with the other writes of an operation.
package sqlwrite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

var (
	// ErrStale: the row is there, in another version than the writer's. It was
	// not written. Over HTTP it is 412, as ErrGone is.
	ErrStale = errors.New("sqlwrite: the row has changed")

	// ErrGone: there is no such row. Nothing was written.
	ErrGone = errors.New("sqlwrite: the row is gone")

	// ErrRows: a statement wrote several rows where one was meant, or inserted
	// by "ON DUPLICATE KEY UPDATE". In a transaction, roll it back.
	ErrRows = errors.New("sqlwrite: the statement wrote more than one row")
)

// StaleError is ErrStale with the row's version, as it was just after the
// refused write.
type StaleError struct {
	Current int64
}

// Error names the version.
func (e *StaleError) Error() string {
	return fmt.Sprintf("%v: it is at version %d", ErrStale, e.Current)
}

// Unwrap returns ErrStale.
func (e *StaleError) Unwrap() error { return ErrStale }

// DB is a *sql.DB, *sql.Tx or *sql.Conn.
type DB interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Query is a statement, in the database's own dialect, with its arguments.
type Query struct {
	SQL  string
	Args []any
}

// Q returns a Query.
func Q(query string, args ...any) Query { return Query{SQL: query, Args: args} }

// Versioned runs a write that names the version it is meant for:
//
//	err := sqlwrite.Versioned(ctx, tx,
//		sqlwrite.Q(`UPDATE accounts SET email = $1, version = version + 1 WHERE id = $2 AND version = $3`, email, id, version),
//		sqlwrite.Q(`SELECT version FROM accounts WHERE id = $1`, id))
//
// It returns nil if the row was written, a *[StaleError] if it is there in
// another version, ErrGone if there is none, or the database's error. The query
// current, one integer, runs only where nothing was written, to tell these two
// apart: another writer may act in between, but either answer refuses a write
// that was not done.
//
// An UPDATE must change the version, always: it is what a second writer is
// told by, and MySQL, unless clientFoundRows is set, counts only rows that
// changed, so that one set to what it was would look stale.
//
// A DELETE works the same. In a transaction of MySQL, current may see the
// transaction's snapshot, and report a row that is gone as stale; end its
// SELECT with FOR UPDATE if it matters. In a serializable or repeatable-read
// transaction of PostgreSQL a stale write is the database's error 40001
// instead, upon which the transaction is to be run anew.
func Versioned(ctx context.Context, db DB, write, current Query) error {
	n, err := exec(ctx, db, write)
	if err != nil || n == 1 {
		return err
	}
	var version int64
	switch err := db.QueryRowContext(ctx, current.SQL, current.Args...).Scan(&version); {
	case errors.Is(err, sql.ErrNoRows):
		return ErrGone
	case err != nil:
		return fmt.Errorf("sqlwrite: nothing was written, and the version can't be read: %w", err)
	}
	return &StaleError{Current: version}
}

// Insert adds a row that may be there already, and reports whether it was it
// who added it. A row that is there is left as it is.
//
// In PostgreSQL and SQLite the statement ends with ON CONFLICT (…) DO NOTHING,
// and duplicate is nil. In MySQL and MariaDB it is a plain INSERT, and
// duplicate reports whether an error is their number 1062 (ER_DUP_ENTRY), which
// undoes that statement only, not the transaction:
//
//	func duplicate(err error) bool {
//		e, ok := errors.AsType[*mysql.MySQLError](err)
//		return ok && e.Number == 1062
//	}
//
// Why not otherwise there: INSERT IGNORE also swallows bad data, and ON
// DUPLICATE KEY UPDATE counts a row that was there as 0, 1 or 2 rows, the 1 just
// like an insertion, depending on clientFoundRows. Nor is a plain INSERT good
// in PostgreSQL: its error aborts the transaction.
//
// Error 1062 doesn't name the index in a form to rely on, so a table with more
// than one unique index tells "there already" of any of them.
func Insert(ctx context.Context, db DB, insert Query, duplicate func(error) bool) (inserted bool, err error) {
	n, err := exec(ctx, db, insert)
	if err != nil {
		if duplicate != nil && duplicate(err) {
			return false, nil
		}
		return false, err
	}
	return n == 1, nil
}

// Upsert sets a row to what it should be, whether it is there or not, and
// reports whether it added it. insert and duplicate are as for [Insert], and
// update sets the same values in the row with that key. The last writer wins;
// where that is not wanted, use [Versioned].
func Upsert(ctx context.Context, db DB, insert Query, duplicate func(error) bool, update Query) (inserted bool, err error) {
	if inserted, err = Insert(ctx, db, insert, duplicate); inserted || err != nil {
		return inserted, err
	}
	if n, err := exec(ctx, db, update); err != nil || n == 1 {
		return false, err
	}
	// No row was counted: it was deleted just now, or MySQL counts only what
	// changed and it has these values already. The insertion tells. If it finds
	// a row in either case, all is well: had ours been deleted and another's
	// added meanwhile, ours would have been the one deleted.
	return Insert(ctx, db, insert, duplicate)
}

// exec returns the number of rows, 0 or 1.
func exec(ctx context.Context, db DB, q Query) (int64, error) {
	res, err := db.ExecContext(ctx, q.SQL, q.Args...)
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("sqlwrite: the driver doesn't count rows: %w", err)
	}
	if n > 1 {
		return 0, fmt.Errorf("%w: %d", ErrRows, n)
	}
	return n, nil
}
