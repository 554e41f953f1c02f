package sqlitedb_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	"github.com/effectonce/idempotency/dedup/storetest"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// fixture is a store, with its database for what tests do behind its back.
type fixture struct {
	*sqlstore.Store
	db   *sql.DB
	path string
}

func open(t *testing.T, path string, opts sqlstore.Options, pragmas ...string) *fixture {
	t.Helper()
	// The tests don't cut the power.
	db, err := sqlitedb.Open(path, append([]string{"synchronous(OFF)"}, pragmas...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	s, err := sqlitedb.NewStore(db, opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS effects (n TEXT PRIMARY KEY)`); err != nil {
		t.Fatal(err)
	}
	return &fixture{Store: s, db: db, path: path}
}

func newFixture(t *testing.T) *fixture {
	return open(t, filepath.Join(t.TempDir(), "test.db"), sqlstore.Options{})
}

func (f *fixture) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatal(err)
	}
}

// caps move times with SQL of the tests' own, in the table's unit, microseconds.
func caps() storetest.Caps {
	return storetest.Caps{
		Lapse: func(t *testing.T, s dedup.Store, k dedup.Key) {
			s.(*fixture).exec(t, `UPDATE idempotency_keys SET lease_until = unixepoch() * 1000000 - 2000000 WHERE scope = ? AND id_key = ?`, k.Scope, k.ID)
		},
		Expire: func(t *testing.T, s dedup.Store, k dedup.Key) {
			s.(*fixture).exec(t, `UPDATE idempotency_keys SET lease_until = unixepoch() * 1000000 - 2000000, expires_at = unixepoch() * 1000000 - 2000000
				WHERE scope = ? AND id_key = ?`, k.Scope, k.ID)
		},
	}
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) dedup.Store { return newFixture(t) }, caps())
}

func TestTxStore(t *testing.T) {
	storetest.RunTx(t, func(t *testing.T) dedup.TxStore { return newFixture(t) }, txCaps())
}

// Without a Guard the work can end the transaction.
func TestUnguardedTxStore(t *testing.T) {
	caps := txCaps()
	caps.End = func(ctx context.Context) error { return sqlstore.Tx(ctx).Commit() }
	storetest.RunTx(t, func(t *testing.T) dedup.TxStore {
		f := newFixture(t)
		s, err := sqlstore.New(f.db, sqlstore.SQLite, sqlstore.Options{Classify: sqlitedb.Classify})
		if err != nil {
			t.Fatal(err)
		}
		f.Store = s
		return f
	}, caps)
}

func txCaps() storetest.TxCaps {
	return storetest.TxCaps{
		Caps: caps(),
		Effect: func(ctx context.Context, n string) error {
			_, err := sqlstore.Tx(ctx).ExecContext(ctx, `INSERT INTO effects VALUES (?)`, n)
			return err
		},
		Effects: func(t *testing.T, s dedup.TxStore) []string { return s.(*fixture).effects(t) },
		Violate: func(ctx context.Context) error {
			tx := sqlstore.Tx(ctx)
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO effects VALUES ('twice')`); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES ('twice')`)
			if sqlitedb.Classify(err) != sqlstore.Conflict {
				return fmt.Errorf("want a unique violation, got %w", err)
			}
			return nil
		},
		Serial: true,
	}
}

func (f *fixture) effects(t *testing.T) (names []string) {
	t.Helper()
	rows, err := f.db.QueryContext(context.Background(), `SELECT n FROM effects`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var n string
		if err := rows.Scan(&n); err != nil {
			t.Fatal(err)
		}
		names = append(names, n)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return names
}
