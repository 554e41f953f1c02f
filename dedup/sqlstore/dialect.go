package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strings"

	"github.com/effectonce/idempotency/dedup"
)

// Dialect names a kind of database.
type Dialect uint8

// The dialects.
const (
	Postgres Dialect = iota + 1 // PostgreSQL 12 or later
	MySQL                       // MySQL 8.0, MariaDB 10.6, or later
	SQLite                      // SQLite 3.42 or later
)

// String returns the dialect's name.
func (d Dialect) String() string {
	switch d {
	case Postgres:
		return "postgres"
	case MySQL:
		return "mysql"
	case SQLite:
		return "sqlite"
	}
	return fmt.Sprintf("dialect %d", uint8(d))
}

// dialect is what a kind of database does in a way of its own. All else is
// common, and made of queries.
type dialect interface {
	queries(t table) queries

	// key returns the parts of k as arguments of a query.
	key(k dedup.Key) (scope, id any)

	// ask inserts the claim's row if there is none, and returns the row that is
	// there then. In a transaction it does not wait for another one's claim of
	// the key: for that it returns errTaken, or the row with free false.
	// errAgain if the row was changing under it.
	ask(ctx context.Context, q querier, c *claim) (row, error)

	// write waits until the caller may write outside of a transaction.
	write(ctx context.Context, s *Store) (done func(), err error)

	// enter makes ready for a transaction that claims k; errTaken if another
	// one has claimed it.
	enter(ctx context.Context, s *Store, k dedup.Key) (hold, error)

	// settled reads the row of k once a transaction whose end was not seen can
	// no longer be under way.
	settled(ctx context.Context, s *Store, k dedup.Key) (row, error)

	// durable returns once the outcome in r, the row of k, outlasts a crash of
	// the database. It is called outside of transactions, with no connection
	// held.
	durable(ctx context.Context, s *Store, k dedup.Key, r row) error

	// purge removes at most n expired rows, in one transaction.
	purge(ctx context.Context, s *Store, n int) (int, error)
}

// hold is what a transaction needs and holds beside itself.
type hold struct {
	beginner
	allow   func()           // is called before COMMIT
	leave   func(clean bool) // after it: is its connection as it was before?
	guarded bool             // nothing is committed before allow
}

// beginner is where a transaction begins: the pool, or one connection of it.
type beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

// DefaultTable is the table's name unless [Options.Table] says otherwise.
const DefaultTable = "idempotency_keys"

// maxName leaves room for an index's suffix in the 63 bytes of a PostgreSQL
// identifier.
const maxName = 50

// table is a checked name, not quoted.
type table struct{ schema, name string }

func parseTable(d Dialect, s string) (table, error) {
	t := table{name: s}
	if schema, name, ok := strings.Cut(s, "."); ok {
		if d == SQLite {
			return table{}, fmt.Errorf("sqlstore: table %q: SQLite has no schemas", s)
		}
		t = table{schema, name}
	}
	identifier := regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	for _, part := range []string{t.schema, t.name} {
		if part == "" && t.schema == "" && t.name != "" {
			continue
		}
		if !identifier.MatchString(part) || len(part) > maxName {
			return table{}, fmt.Errorf("sqlstore: table %q: want letters, digits and _, at most %d, and no digit first; a schema may stand before it", s, maxName)
		}
	}
	return t, nil
}

// quoted returns the name as SQL, between marks of quotation.
func (t table) quoted(mark string) string {
	q := mark + t.name + mark
	if t.schema != "" {
		q = mark + t.schema + mark + "." + q
	}
	return q
}
