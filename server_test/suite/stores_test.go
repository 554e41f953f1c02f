package suite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// backend is a store under the server, and a place for the effects of handlers.
// Tests count effects there, not calls, since that is what is promised.
type backend struct {
	dedup.Store

	// effect does one effect, in the transaction of ctx if there is one.
	effect func(ctx context.Context, id string) error

	// effects counts those that lasted.
	effects func(t *testing.T, id string) int

	// increment adds 1 to a row that all transactions share, and reports what
	// it was. nil where there are no transactions.
	increment func(ctx context.Context) (int, error)

	// conflict does an effect that another one forbids (a unique violation).
	// nil where there are no transactions.
	conflict func(ctx context.Context) error
}

// serverBackends are the stores that the suite runs on.
var serverBackends = []struct {
	name string
	tx   bool
	open func(t *testing.T) *backend
}{
	{"memory", false, openMemory},
	{"sqlite", true, openSQLite},
	{"postgres", true, func(t *testing.T) *backend { return openPostgres(t, sql.LevelDefault) }},
	{"pgx", true, func(t *testing.T) *backend { return openPgx(t, "") }},
	{"mysql", true, func(t *testing.T) *backend { return openMySQL(t, sql.LevelDefault) }},
	{"redis", false, openRedis},
}

// onBackends runs a test on every store in lease mode, and on those that can in
// transaction mode.
func onBackends(t *testing.T, test func(t *testing.T, b *backend, mode dedup.Mode)) {
	for _, s := range serverBackends {
		t.Run(s.name+"/lease", func(t *testing.T) {
			t.Parallel()
			test(t, s.open(t), dedup.Lease)
		})
		if s.tx {
			t.Run(s.name+"/transaction", func(t *testing.T) {
				t.Parallel()
				test(t, s.open(t), dedup.Transaction)
			})
		}
	}
}

// missing skips the test of a store whose service is absent, or fails it in CI.
func missing(t *testing.T, service string, err error) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("no %s: %v", service, err)
	}
	t.Skipf("no %s: %v", service, err)
}

// ledger keeps effects in memory.
type ledger struct {
	mu sync.Mutex
	n  map[string]int
}

func (l *ledger) effect(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == nil {
		l.n = make(map[string]int)
	}
	l.n[id]++
	return nil
}

func (l *ledger) effects(_ *testing.T, id string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n[id]
}

func openMemory(*testing.T) *backend {
	var l ledger
	return &backend{Store: memstore.New(), effect: l.effect, effects: l.effects}
}

func openRedis(t *testing.T) *backend {
	client := redis.NewClient(&redis.Options{Addr: cmp.Or(os.Getenv("IDEMPOTENCY_REDIS_ADDR"), "127.0.0.1:6379")})
	t.Cleanup(func() { client.Close() })
	if err := client.Ping(t.Context()).Err(); err != nil {
		missing(t, "Redis (IDEMPOTENCY_REDIS_ADDR)", err)
	}
	prefix := "server_test:" + dedup.NewToken().String() + ":"
	store, err := redisstore.New(t.Context(), client, redisstore.Options{Prefix: prefix, AllowEviction: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.Background()
		for iter := client.Scan(ctx, 0, prefix+"*", 1000).Iterator(); iter.Next(ctx); {
			client.Del(ctx, iter.Val())
		}
	})
	var l ledger
	return &backend{Store: store, effect: l.effect, effects: l.effects}
}

func openSQLite(t *testing.T) *backend {
	db, err := sqlitedb.Open(filepath.Join(t.TempDir(), "test.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	store, err := sqlitedb.NewStore(db, sqlstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return sqlBackend(t, db, store, "effects", "?")
}

func openMySQL(t *testing.T, level sql.IsolationLevel) *backend {
	db, err := mysqldb.Open(cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if err := db.PingContext(t.Context()); err != nil {
		missing(t, "MySQL or MariaDB (IDEMPOTENCY_MYSQL_DSN)", err)
	}
	db.SetMaxOpenConns(6)
	prefix := "server_" + dedup.NewToken().String()[:16]
	t.Cleanup(func() {
		for _, table := range []string{"_keys", "_effects", "_effects_once", "_effects_count"} {
			if _, err := db.Exec(`DROP TABLE IF EXISTS ` + prefix + table); err != nil {
				t.Error(err)
			}
		}
	})
	store, err := mysqldb.NewStore(db, sqlstore.Options{Table: prefix + "_keys", Isolation: level})
	if err != nil {
		t.Fatal(err)
	}
	return sqlBackend(t, db, store, prefix+"_effects", "?")
}

func openPostgres(t *testing.T, level sql.IsolationLevel) *backend {
	db, err := sql.Open("pgx", postgresURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if err := db.PingContext(t.Context()); err != nil {
		missing(t, "PostgreSQL (IDEMPOTENCY_POSTGRES_URL)", err)
	}
	db.SetMaxOpenConns(6)
	schema := postgresSchema(t, func(query string) error { _, err := db.Exec(query); return err })
	store, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: schema + ".keys", Isolation: level})
	if err != nil {
		t.Fatal(err)
	}
	return sqlBackend(t, db, store, schema+".effects", "$1")
}

func postgresURL() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

// postgresSchema makes a schema that is dropped after the test.
func postgresSchema(t *testing.T, exec func(string) error) string {
	schema := "server_" + dedup.NewToken().String()
	if err := exec(`CREATE SCHEMA ` + schema); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := exec(`DROP SCHEMA ` + schema + ` CASCADE`); err != nil {
			t.Error(err)
		}
	})
	return schema
}

// sqlBackend keeps effects in a table of the store's own database.
func sqlBackend(t *testing.T, db *sql.DB, store *sqlstore.Store, table, param string) *backend {
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{
		`CREATE TABLE ` + table + ` (id varchar(100) NOT NULL)`,
		`CREATE TABLE ` + table + `_once (id varchar(100) PRIMARY KEY)`,
		`INSERT INTO ` + table + `_once VALUES ('taken')`,
		`CREATE TABLE ` + table + `_count (n integer NOT NULL)`,
		`INSERT INTO ` + table + `_count VALUES (0)`,
	} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	return &backend{
		Store: store,
		effect: func(ctx context.Context, id string) error {
			exec := db.ExecContext
			if tx, ok := sqlstore.LookupTx(ctx); ok {
				exec = tx.ExecContext
			}
			_, err := exec(ctx, `INSERT INTO `+table+` VALUES (`+param+`)`, id)
			return err
		},
		effects: func(t *testing.T, id string) (n int) {
			t.Helper()
			if err := db.QueryRowContext(t.Context(), `SELECT count(*) FROM `+table+` WHERE id = `+param, id).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		},
		increment: func(ctx context.Context) (n int, err error) {
			tx := sqlstore.Tx(ctx)
			if err := tx.QueryRowContext(ctx, `SELECT n FROM `+table+`_count`).Scan(&n); err != nil {
				return 0, err
			}
			_, err = tx.ExecContext(ctx, `UPDATE `+table+`_count SET n = `+param, n+1)
			return n, err
		},
		conflict: func(ctx context.Context) error {
			_, err := sqlstore.Tx(ctx).ExecContext(ctx, `INSERT INTO `+table+`_once VALUES ('taken')`)
			return err
		},
	}
}

func openPgx(t *testing.T, level pgx.TxIsoLevel) *backend {
	cfg, err := pgxpool.ParseConfig(postgresURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 6
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := pool.Ping(t.Context()); err != nil {
		missing(t, "PostgreSQL (IDEMPOTENCY_POSTGRES_URL)", err)
	}
	exec := func(query string) error { _, err := pool.Exec(context.Background(), query); return err }
	schema := postgresSchema(t, exec)
	store, err := pgxstore.New(pool, pgxstore.Options{Table: schema + ".keys", Isolation: level})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	table := schema + ".effects"
	if err := exec(strings.Join([]string{
		`CREATE TABLE ` + table + ` (id text NOT NULL)`,
		`CREATE TABLE ` + table + `_once (id text PRIMARY KEY)`,
		`INSERT INTO ` + table + `_once VALUES ('taken')`,
		`CREATE TABLE ` + table + `_count (n integer NOT NULL)`,
		`INSERT INTO ` + table + `_count VALUES (0)`,
	}, ";")); err != nil {
		t.Fatal(err)
	}
	return &backend{
		Store: store,
		effect: func(ctx context.Context, id string) error {
			query := `INSERT INTO ` + table + ` VALUES ($1)`
			if tx, ok := pgxstore.LookupTx(ctx); ok {
				_, err := tx.Exec(ctx, query, id)
				return err
			}
			_, err := pool.Exec(ctx, query, id)
			return err
		},
		effects: func(t *testing.T, id string) (n int) {
			t.Helper()
			if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table+` WHERE id = $1`, id).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		},
		increment: func(ctx context.Context) (n int, err error) {
			tx := pgxstore.Tx(ctx)
			if err := tx.QueryRow(ctx, `SELECT n FROM `+table+`_count`).Scan(&n); err != nil {
				return 0, err
			}
			_, err = tx.Exec(ctx, `UPDATE `+table+`_count SET n = $1`, n+1)
			return n, err
		},
		conflict: func(ctx context.Context) error {
			_, err := pgxstore.Tx(ctx).Exec(ctx, `INSERT INTO `+table+`_once VALUES ('taken')`)
			return err
		},
	}
}

// endTx ends the transaction that a handler was given, which it must not.
func endTx(t *testing.T, ctx context.Context) (ended, undone bool) {
	t.Helper()
	if tx, ok := sqlstore.LookupTx(ctx); ok {
		ended = tx.Commit() == nil
		return ended, !ended
	}
	if err := pgxstore.Tx(ctx).Commit(ctx); err == nil || errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("Commit of the work's pgx.Tx: %v; want to be refused", err)
	}
	return false, false
}

// lapse ends the lease that the running request of key holds, as time does when
// its process stands still.
func (b *backend) lapse(t *testing.T, key dedup.Key) {
	t.Helper()
	rec, err := b.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Renew(t.Context(), key, rec.Token, 0); err != nil {
		t.Fatal(err)
	}
}
