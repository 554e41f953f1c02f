package mysqldb_test

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"os"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	"github.com/effectonce/idempotency/dedup/storetest"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
)

// fixture is a store on a table of its own, with its pool for what tests do
// behind its back.
type fixture struct {
	*sqlstore.Store
	db    *sql.DB
	table string
}

func dsn() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test")
}

// reachable skips the test if there is no server.
func reachable(t *testing.T, db *sql.DB) *sql.DB {
	t.Helper()
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(30)
	db.SetMaxIdleConns(30)
	if err := db.PingContext(t.Context()); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no MySQL (IDEMPOTENCY_MYSQL_DSN): %v", err)
		}
		t.Skipf("no MySQL (IDEMPOTENCY_MYSQL_DSN): %v", err)
	}
	return db
}

func open(t *testing.T) *sql.DB {
	t.Helper()
	db, err := mysqldb.Open(dsn())
	if err != nil {
		t.Fatal(err)
	}
	return reachable(t, db)
}

// plain opens the database as somebody would who never read our documentation:
// REPEATABLE READ, and UPDATE counts only what it changed.
func plain(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn())
	if err != nil {
		t.Fatal(err)
	}
	return reachable(t, db)
}

func newFixture(t *testing.T, db *sql.DB, opts sqlstore.Options) *fixture {
	t.Helper()
	opts.Table = "t" + dedup.NewToken().String()
	s, err := mysqldb.NewStore(db, opts)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{Store: s, db: db, table: opts.Table}
	t.Cleanup(func() { f.exec(t, "DROP TABLE IF EXISTS "+f.table+", "+f.effectsTable()) })
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.exec(t, "CREATE TABLE "+f.effectsTable()+" (n VARBINARY(255) PRIMARY KEY)")
	return f
}

func (f *fixture) effectsTable() string { return f.table + "_effects" }

func (f *fixture) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func caps() storetest.Caps {
	return storetest.Caps{
		Lapse: func(t *testing.T, s dedup.Store, k dedup.Key) {
			f := s.(*fixture)
			f.exec(t, "UPDATE "+f.table+" SET lease_until = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE scope = ? AND id_key = ?", []byte(k.Scope), []byte(k.ID))
		},
		Expire: func(t *testing.T, s dedup.Store, k dedup.Key) {
			f := s.(*fixture)
			f.exec(t, "UPDATE "+f.table+" SET lease_until = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND, expires_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE scope = ? AND id_key = ?",
				[]byte(k.Scope), []byte(k.ID))
		},
	}
}

// effectsKey carries the name of the effects table to TxCaps.Effect, which gets
// no store.
type effectsKey struct{}

type txStore struct{ *fixture }

type storeTx struct {
	dedup.Tx
	effects string
}

func (s txStore) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	tx, res, err := s.fixture.Begin(ctx, c)
	if tx == nil {
		return nil, res, err
	}
	return storeTx{tx, s.effectsTable()}, res, err
}

func (t storeTx) Context(ctx context.Context) context.Context {
	return context.WithValue(t.Tx.Context(ctx), effectsKey{}, t.effects)
}

func insert(ctx context.Context, n string) error {
	_, err := sqlstore.Tx(ctx).ExecContext(ctx, "INSERT INTO "+ctx.Value(effectsKey{}).(string)+" VALUES (?)", n)
	return err
}

func txCaps() storetest.TxCaps {
	c := caps()
	return storetest.TxCaps{
		Caps: storetest.Caps{
			Lapse:  func(t *testing.T, s dedup.Store, k dedup.Key) { c.Lapse(t, s.(txStore).fixture, k) },
			Expire: func(t *testing.T, s dedup.Store, k dedup.Key) { c.Expire(t, s.(txStore).fixture, k) },
		},
		Effect:  insert,
		Effects: func(t *testing.T, s dedup.TxStore) []string { return s.(txStore).effects(t) },
		Violate: func(ctx context.Context) error {
			if err := insert(ctx, "twice"); err != nil {
				return err
			}
			if err := insert(ctx, "twice"); mysqldb.Classify(err) != sqlstore.Conflict {
				return fmt.Errorf("want a unique violation, got %w", err)
			}
			return nil
		},
		End: func(ctx context.Context) error { return sqlstore.Tx(ctx).Commit() },
	}
}

func (f *fixture) effects(t *testing.T) (names []string) {
	t.Helper()
	rows, err := f.db.QueryContext(context.Background(), "SELECT n FROM "+f.effectsTable())
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

func TestStore(t *testing.T) {
	for name, pool := range map[string]func(*testing.T) *sql.DB{"Open": open, "plain": plain} {
		t.Run(name, func(t *testing.T) {
			db := pool(t)
			storetest.Run(t, func(t *testing.T) dedup.Store { return newFixture(t, db, sqlstore.Options{}) }, caps())
		})
	}
}

func TestTxStore(t *testing.T) {
	for name, pool := range map[string]func(*testing.T) *sql.DB{"Open": open, "plain": plain} {
		t.Run(name, func(t *testing.T) {
			db := pool(t)
			storetest.RunTx(t, func(t *testing.T) dedup.TxStore { return txStore{newFixture(t, db, sqlstore.Options{})} }, txCaps())
		})
	}
}
