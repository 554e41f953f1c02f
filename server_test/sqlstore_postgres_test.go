package server_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	"github.com/effectonce/idempotency/dedup/storetest"
)

// pgStore is a Store on a table of its own in a schema of its own, with the
// pool for what tests do behind its back.
type pgStore struct {
	*sqlstore.Store
	db     *sql.DB
	schema string
	table  string // with its schema
}

func sqlstorePgURL() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

// sqlstorePgOpen opens a pool, and skips the test if there is no server.
func sqlstorePgOpen(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", sqlstorePgURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if err := db.PingContext(t.Context()); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		t.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	return db
}

// sqlstorePgSchema makes a schema that is dropped after the test.
func sqlstorePgSchema(t *testing.T, db *sql.DB) string {
	t.Helper()
	schema := "sqlstore_" + dedup.NewToken().String()
	if _, err := db.Exec(`CREATE SCHEMA ` + schema); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Exec(`SET lock_timeout = '10s'; DROP SCHEMA ` + schema + ` CASCADE`); err != nil {
			t.Error(err)
		}
	})
	return schema
}

func newPgStore(t *testing.T, db *sql.DB, opts sqlstore.Options) *pgStore {
	t.Helper()
	schema := sqlstorePgSchema(t, db)
	opts.Table = schema + ".keys"
	s, err := sqlstore.New(db, sqlstore.Postgres, opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f := &pgStore{Store: s, db: db, schema: schema, table: opts.Table}
	f.exec(t, `CREATE TABLE `+f.effectsTable()+` (n text PRIMARY KEY)`)
	return f
}

func (f *pgStore) effectsTable() string { return f.schema + ".effects" }

func (f *pgStore) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := f.db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func sqlstorePgCaps() storetest.Caps {
	return storetest.Caps{
		Lapse: func(t *testing.T, s dedup.Store, k dedup.Key) {
			f := s.(*pgStore)
			f.exec(t, `UPDATE `+f.table+` SET lease_until = clock_timestamp() - interval '1 second' WHERE scope = $1 AND id_key = $2`, k.Scope, k.ID)
		},
		Expire: func(t *testing.T, s dedup.Store, k dedup.Key) {
			f := s.(*pgStore)
			f.exec(t, `UPDATE `+f.table+` SET lease_until = clock_timestamp() - interval '1 second', expires_at = clock_timestamp() - interval '1 second'
				WHERE scope = $1 AND id_key = $2`, k.Scope, k.ID)
		},
	}
}

// pgEffectsKey carries the name of the effects table to TxCaps.Effect, which
// gets no store.
type pgEffectsKey struct{}

// pgTxStore puts the store's effects table where TxCaps.Effect finds it.
type pgTxStore struct{ *pgStore }

type pgTx struct {
	dedup.Tx
	effects string
}

func (s pgTxStore) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	tx, res, err := s.pgStore.Begin(ctx, c)
	if tx == nil {
		return nil, res, err
	}
	return pgTx{tx, s.effectsTable()}, res, err
}

func (t pgTx) Context(ctx context.Context) context.Context {
	return context.WithValue(t.Tx.Context(ctx), pgEffectsKey{}, t.effects)
}

func sqlstorePgTxCaps() storetest.TxCaps {
	of := func(s dedup.Store) *pgStore { return s.(pgTxStore).pgStore }
	caps := sqlstorePgCaps()
	lapse, expire := caps.Lapse, caps.Expire
	insert := func(ctx context.Context, n string) error {
		_, err := sqlstore.Tx(ctx).ExecContext(ctx, `INSERT INTO `+ctx.Value(pgEffectsKey{}).(string)+` VALUES ($1)`, n)
		return err
	}
	return storetest.TxCaps{
		Caps: storetest.Caps{
			Lapse:  func(t *testing.T, s dedup.Store, k dedup.Key) { lapse(t, of(s), k) },
			Expire: func(t *testing.T, s dedup.Store, k dedup.Key) { expire(t, of(s), k) },
		},
		Effect: insert,
		Effects: func(t *testing.T, s dedup.TxStore) []string {
			f := of(s)
			return sqlstoreStrings(t, f.db, `SELECT n FROM `+f.effectsTable())
		},
		Violate: func(ctx context.Context) error {
			if err := insert(ctx, "twice"); err != nil {
				return err
			}
			var e interface{ SQLState() string }
			if err := insert(ctx, "twice"); !errors.As(err, &e) || e.SQLState() != "23505" {
				return fmt.Errorf("want a unique violation, got %w", err)
			}
			return nil
		},
		ViolationAborts: true,
		End:             func(ctx context.Context) error { return sqlstore.Tx(ctx).Commit() },
	}
}

func sqlstoreStrings(t *testing.T, db *sql.DB, query string) (out []string) {
	t.Helper()
	rows, err := db.QueryContext(context.Background(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// Each level that a session or an option may ask for.
func sqlstorePgLevels() map[string]sqlstore.Options {
	return map[string]sqlstore.Options{
		"default":        {},
		"RepeatableRead": {Isolation: sql.LevelRepeatableRead},
		"Serializable":   {Isolation: sql.LevelSerializable},
		"Prepare":        {Prepare: true},
	}
}

func TestSQLStorePostgres(t *testing.T) {
	db := sqlstorePgOpen(t)
	db.SetMaxOpenConns(40)
	storetest.Run(t, func(t *testing.T) dedup.Store { return newPgStore(t, db, sqlstore.Options{}) }, sqlstorePgCaps())
}

func TestSQLStorePostgresTx(t *testing.T) {
	db := sqlstorePgOpen(t)
	db.SetMaxOpenConns(40)
	for name, opts := range sqlstorePgLevels() {
		t.Run(name, func(t *testing.T) {
			caps := sqlstorePgTxCaps()
			// On tables of a page or two, SERIALIZABLE sees conflicts between
			// different keys.
			caps.Serial = opts.Isolation == sql.LevelSerializable
			storetest.RunTx(t, func(t *testing.T) dedup.TxStore { return pgTxStore{newPgStore(t, db, opts)} }, caps)
		})
	}
}
