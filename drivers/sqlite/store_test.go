package sqlitedb_test

import (
	"context"
	"database/sql"
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
