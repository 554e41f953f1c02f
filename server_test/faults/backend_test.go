package faults

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// backend says where a store and its ledger are, in a form that can be handed
// to another process.
type backend struct {
	Kind   string // of backendKinds
	Addr   string // file, URL, DSN or address
	Prefix string // begins the names of tables and keys, so that runs keep apart
}

// backendKinds are the stores that outlive a process.
var backendKinds = []string{"sqlite", "postgres", "pgx", "mysql", "redis"}

// transactional says whether a kind has transaction mode.
func transactional(kind string) bool { return kind != "redis" }

func postgresURL() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

func mysqlDSN() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test")
}

func redisAddr() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_REDIS_ADDR"), "127.0.0.1:6379")
}

// newBackend returns a backend of the shared services, or of a new file, with
// tables that are dropped after the test. A service that isn't there skips the
// test, or fails it where CI=true.
func newBackend(t *testing.T, kind string) backend {
	t.Helper()
	b := backend{Kind: kind, Prefix: "t" + dedup.NewToken().String()[:12]}
	switch kind {
	case "sqlite":
		b.Addr = filepath.Join(t.TempDir(), "test.db")
	case "postgres", "pgx":
		b.Addr = postgresURL()
	case "mysql":
		b.Addr = mysqlDSN()
	case "redis":
		b.Addr = redisAddr()
	}
	setUpBackend(t, b)
	return b
}

// setUpBackend makes b's tables and has them dropped after the test.
func setUpBackend(t *testing.T, b backend) {
	t.Helper()
	conn, err := openBackend(t.Context(), b)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no %s: %v", b.Kind, err)
		}
		t.Skipf("no %s: %v", b.Kind, err)
	}
	t.Cleanup(func() {
		conn.drop(context.Background())
		conn.close()
	})
	if err := conn.migrate(t.Context()); err != nil {
		t.Fatalf("%s: %v", b.Kind, err)
	}
}

// connection is an open backend.
type connection struct {
	store   dedup.Store
	ledger  ledger
	migrate func(ctx context.Context) error
	drop    func(ctx context.Context)
	close   func()
}

func openBackend(ctx context.Context, b backend) (*connection, error) {
	keys, effects := b.Prefix+"_keys", b.Prefix+"_effects"
	switch b.Kind {
	case "sqlite":
		db, err := sqlitedb.Open(b.Addr)
		if err != nil {
			return nil, err
		}
		store, err := sqlitedb.NewStore(db, sqlstore.Options{Table: keys})
		return sqlConnection(ctx, db, store, err, &sqlLedger{db: db, table: effects}, keys,
			`CREATE TABLE IF NOT EXISTS `+effects+` (id INTEGER PRIMARY KEY AUTOINCREMENT, op TEXT NOT NULL)`)
	case "postgres":
		db, err := sql.Open("pgx", b.Addr)
		if err != nil {
			return nil, err
		}
		store, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: keys})
		return sqlConnection(ctx, db, store, err, &sqlLedger{db: db, table: effects, returning: true}, keys,
			`CREATE TABLE IF NOT EXISTS `+effects+` (id bigserial PRIMARY KEY, op text NOT NULL)`)
	case "mysql":
		db, err := mysqldb.Open(b.Addr)
		if err != nil {
			return nil, err
		}
		store, err := mysqldb.NewStore(db, sqlstore.Options{Table: keys})
		return sqlConnection(ctx, db, store, err, &sqlLedger{db: db, table: effects}, keys,
			`CREATE TABLE IF NOT EXISTS `+effects+` (id BIGINT AUTO_INCREMENT PRIMARY KEY, op VARCHAR(255) NOT NULL)`)
	case "pgx":
		return openPgx(ctx, b.Addr, keys, effects)
	case "redis":
		return openRedis(ctx, b.Addr, b.Prefix)
	}
	return nil, fmt.Errorf("no such kind of backend: %q", b.Kind)
}

func sqlConnection(ctx context.Context, db *sql.DB, store *sqlstore.Store, err error, l ledger, keys, createLedger string) (*connection, error) {
	if err == nil {
		err = db.PingContext(ctx)
	}
	if err != nil {
		db.Close()
		return nil, err
	}
	effects := l.(*sqlLedger).table
	return &connection{
		store: store, ledger: l,
		migrate: func(ctx context.Context) error {
			if err := store.Migrate(ctx); err != nil {
				return err
			}
			_, err := db.ExecContext(ctx, createLedger)
			return err
		},
		drop: func(ctx context.Context) {
			for _, table := range []string{keys, effects} {
				_, _ = db.ExecContext(ctx, `DROP TABLE IF EXISTS `+table)
			}
		},
		close: func() { db.Close() },
	}, nil
}

func openPgx(ctx context.Context, url, keys, effects string) (*connection, error) {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, err
	}
	store, err := pgxstore.New(pool, pgxstore.Options{Table: keys})
	if err == nil {
		err = pool.Ping(ctx)
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &connection{
		store: store, ledger: &pgxLedger{pool: pool, table: effects},
		migrate: func(ctx context.Context) error {
			if err := store.Migrate(ctx); err != nil {
				return err
			}
			_, err := pool.Exec(ctx, `CREATE TABLE IF NOT EXISTS `+effects+` (id bigserial PRIMARY KEY, op text NOT NULL)`)
			return err
		},
		drop: func(ctx context.Context) {
			_, _ = pool.Exec(ctx, `DROP TABLE IF EXISTS `+keys+`, `+effects)
		},
		close: pool.Close,
	}, nil
}

func openRedis(ctx context.Context, addr, prefix string) (*connection, error) {
	// The ledger must not repeat an effect by itself.
	client := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	store, err := redisstore.New(ctx, client, redisstore.Options{Prefix: prefix + ":"})
	if err != nil {
		client.Close()
		return nil, err
	}
	return &connection{
		store: store, ledger: &redisLedger{client: client, list: prefix + ":effects"},
		migrate: func(context.Context) error { return nil },
		drop: func(ctx context.Context) {
			keys := client.Scan(ctx, 0, prefix+":*", 1000).Iterator()
			for keys.Next(ctx) {
				client.Del(ctx, keys.Val())
			}
		},
		close: func() { store.Close(); client.Close() },
	}, nil
}
