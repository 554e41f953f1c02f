package sqlwrite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/effectonce/idempotency/etag/sqlwrite"
)

// These tests script what a database answers, for the answers that real ones
// give only in a race or in trouble. TestByDesign runs the package on real
// databases.

// reply is what one statement gets.
type reply struct {
	rows    int64 // affected, for Exec
	version int64 // the row, for Query; 0: there is none
	err     error
}

// script is a database whose statements get the replies in turn. It records
// them.
type script struct {
	replies []reply
	seen    []string
}

func (s *script) next(query string) reply {
	s.seen = append(s.seen, query)
	if len(s.replies) == 0 {
		return reply{err: errors.New("script: one statement too many: " + query)}
	}
	r := s.replies[0]
	s.replies = s.replies[1:]
	return r
}

func (s *script) Connect(context.Context) (driver.Conn, error) { return conn{s}, nil }
func (s *script) Driver() driver.Driver                        { return nil }

type conn struct{ s *script }

func (conn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("script: no Prepare") }
func (conn) Begin() (driver.Tx, error)           { return nil, errors.New("script: no Begin") }
func (conn) Close() error                        { return nil }

func (c conn) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	r := c.s.next(query)
	return driver.RowsAffected(r.rows), r.err
}

func (c conn) QueryContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Rows, error) {
	r := c.s.next(query)
	return &rows{version: r.version}, r.err
}

type rows struct{ version int64 }

func (*rows) Columns() []string { return []string{"version"} }
func (*rows) Close() error      { return nil }
func (r *rows) Next(dest []driver.Value) error {
	if r.version == 0 {
		return io.EOF
	}
	dest[0], r.version = r.version, 0
	return nil
}

func open(t *testing.T, replies ...reply) (*sql.DB, *script) {
	s := &script{replies: replies}
	db := sql.OpenDB(s)
	t.Cleanup(func() { db.Close() })
	return db, s
}

var (
	errDown      = errors.New("down")
	errDuplicate = errors.New("duplicate")
)

func duplicate(err error) bool { return errors.Is(err, errDuplicate) }

func TestVersioned(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		replies []reply
		want    error
		seen    []string
	}{
		{"written", []reply{{rows: 1}}, nil, []string{"write"}},
		{"stale", []reply{{}, {version: 9}}, sqlwrite.ErrStale, []string{"write", "current"}},
		{"gone", []reply{{}, {}}, sqlwrite.ErrGone, []string{"write", "current"}},
		{"several rows", []reply{{rows: 2}}, sqlwrite.ErrRows, []string{"write"}},
		{"write fails", []reply{{err: errDown}}, errDown, []string{"write"}},
		{"look fails", []reply{{}, {err: errDown}}, errDown, []string{"write", "current"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			db, s := open(t, tc.replies...)
			err := sqlwrite.Versioned(t.Context(), db, sqlwrite.Q("write"), sqlwrite.Q("current"))
			if !errors.Is(err, tc.want) || !slices.Equal(s.seen, tc.seen) {
				t.Errorf("%v after %v, want %v after %v", err, s.seen, tc.want, tc.seen)
			}
			var stale *sqlwrite.StaleError
			if errors.As(err, &stale) != (tc.want == sqlwrite.ErrStale) || stale != nil && stale.Current != 9 {
				t.Errorf("stale: %+v", stale)
			}
		})
	}
}

func TestInsertAndUpsert(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		upsert   bool
		replies  []reply
		inserted bool
		want     error
		seen     []string
	}{
		{"inserted", false, []reply{{rows: 1}}, true, nil, []string{"insert"}},
		{"there, by count", false, []reply{{rows: 0}}, false, nil, []string{"insert"}},
		{"there, by error", false, []reply{{err: errDuplicate}}, false, nil, []string{"insert"}},
		{"on duplicate key update", false, []reply{{rows: 2}}, false, sqlwrite.ErrRows, []string{"insert"}},
		{"fails", false, []reply{{err: errDown}}, false, errDown, []string{"insert"}},
		{"upsert: inserted", true, []reply{{rows: 1}}, true, nil, []string{"insert"}},
		{"upsert: updated", true, []reply{{}, {rows: 1}}, false, nil, []string{"insert", "update"}},
		{"upsert: the same already", true, []reply{{err: errDuplicate}, {}, {err: errDuplicate}}, false, nil, []string{"insert", "update", "insert"}},
		{"upsert: deleted in between", true, []reply{{}, {}, {rows: 1}}, true, nil, []string{"insert", "update", "insert"}},
		{"upsert: insert fails", true, []reply{{err: errDown}}, false, errDown, []string{"insert"}},
		{"upsert: update fails", true, []reply{{}, {err: errDown}}, false, errDown, []string{"insert", "update"}},
		{"upsert: updates too much", true, []reply{{}, {rows: 3}}, false, sqlwrite.ErrRows, []string{"insert", "update"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			db, s := open(t, tc.replies...)
			var inserted bool
			var err error
			if tc.upsert {
				inserted, err = sqlwrite.Upsert(t.Context(), db, sqlwrite.Q("insert"), duplicate, sqlwrite.Q("update"))
			} else {
				inserted, err = sqlwrite.Insert(t.Context(), db, sqlwrite.Q("insert"), duplicate)
			}
			if inserted != tc.inserted || !errors.Is(err, tc.want) || !slices.Equal(s.seen, tc.seen) {
				t.Errorf("%v, %v after %v; want %v, %v after %v", inserted, err, s.seen, tc.inserted, tc.want, tc.seen)
			}
		})
	}
}

// Without a duplicate function, the error of a plain INSERT is an error.
func TestInsertWithoutDuplicate(t *testing.T) {
	t.Parallel()
	db, _ := open(t, reply{err: errDuplicate})
	if inserted, err := sqlwrite.Insert(t.Context(), db, sqlwrite.Q("insert"), nil); inserted || !errors.Is(err, errDuplicate) {
		t.Errorf("%v, %v", inserted, err)
	}
}
