package consumer_test

import (
	"cmp"
	"context"
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
	pgxinbox "github.com/effectonce/idempotency/drivers/pgx/inbox"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
	rediswindow "github.com/effectonce/idempotency/drivers/redis/window"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// The kinds of stores: every mode on everything it works on.
var (
	inboxKinds = []string{"inbox/postgres", "inbox/pgx", "inbox/mysql", "inbox/sqlite"}
	leaseKinds = []string{"lease/memory", "lease/postgres", "lease/pgx", "lease/mysql", "lease/sqlite", "lease/redis"}
	allKinds   = append(append([]string{"window/redis"}, inboxKinds...), leaseKinds...)
)

// place says where a fixture's tables are, so that another process finds them.
type place struct{ Kind, Prefix, File string }

// fixture is a store with what a handler's effect is written to.
type fixture struct {
	place
	// consumer returns one of the group, on the fixture's table.
	consumer func(group string) consumer.Consumer

	// write makes the effect of an event: in the handler's transaction if it
	// has one, else in memory.
	write func(ctx context.Context, event string) error

	// exec runs a statement in the handler's transaction.
	exec func(ctx context.Context, query string) error

	db      *sql.DB // inboxes only, for what tests do behind the back
	pool    *pgxpool.Pool
	table   string
	dialect consumer.Dialect

	mu     sync.Mutex
	inMem  map[string]int
	loaded func(t *testing.T) map[string]int
}

// effects returns how often each event had its effect.
func (f *fixture) effects(t *testing.T) map[string]int {
	t.Helper()
	if f.loaded != nil {
		return f.loaded(t)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]int{}
	for id, n := range f.inMem {
		all[id] = n
	}
	return all
}

func newFixture(t *testing.T, kind string) *fixture {
	t.Helper()
	p := place{Kind: kind, Prefix: "ct" + dedup.NewToken().String()[:12], File: filepath.Join(t.TempDir(), "test.db")}
	return openFixture(t, p, true)
}

// openFixture opens the place's tables; create makes them, and drops them after
// the test.
func openFixture(t *testing.T, p place, create bool) *fixture {
	t.Helper()
	f := &fixture{place: p, inMem: map[string]int{}, table: p.Prefix + "_events"}
	f.write = func(_ context.Context, event string) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.inMem[event]++
		return nil
	}
	switch p.Kind {
	case "inbox/postgres":
		f.sqlInbox(t, consumer.Postgres, openPostgres(t), `INSERT INTO `+f.effectsTable()+` VALUES ($1)`, create)
	case "inbox/mysql":
		f.sqlInbox(t, consumer.MySQL, openMySQL(t), `INSERT INTO `+f.effectsTable()+` VALUES (?)`, create)
	case "inbox/sqlite":
		f.sqlInbox(t, consumer.SQLite, openSQLite(t, p.File), `INSERT INTO `+f.effectsTable()+` VALUES (?)`, create)
	case "inbox/pgx":
		f.pgxInbox(t, create)
	case "lease/memory":
		f.lease(t, memstore.New(), func() {}, create)
	case "lease/postgres":
		db := openPostgres(t)
		s, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: f.table})
		must(t, err)
		f.lease(t, s, func() { db.Exec(`DROP TABLE ` + f.table) }, create)
	case "lease/mysql":
		db := openMySQL(t)
		s, err := sqlstore.New(db, sqlstore.MySQL, sqlstore.Options{Table: f.table, Classify: mysqldb.Classify})
		must(t, err)
		f.lease(t, s, func() { db.Exec(`DROP TABLE ` + f.table) }, create)
	case "lease/sqlite":
		s, err := sqlitedb.NewStore(openSQLite(t, p.File), sqlstore.Options{Table: f.table})
		must(t, err)
		f.lease(t, s, func() {}, create)
	case "lease/pgx":
		pool := openPgx(t)
		s, err := pgxstore.New(pool, pgxstore.Options{Table: f.table})
		must(t, err)
		f.lease(t, s, func() { pool.Exec(context.Background(), `DROP TABLE `+f.table) }, create)
	case "lease/redis":
		client := openRedis(t)
		s, err := redisstore.New(t.Context(), client, redisstore.Options{Prefix: p.Prefix + ":", AllowEviction: true})
		must(t, err)
		f.lease(t, s, func() { dropKeys(client, p.Prefix+":*") }, create)
	case "window/redis":
		client := openRedis(t)
		t.Cleanup(func() { dropKeys(client, p.Prefix+":*") })
		f.consumer = func(group string) consumer.Consumer {
			return &consumer.Window{
				Store: &rediswindow.Store{Client: client, Prefix: p.Prefix + ":"},
				Group: group, Window: time.Hour, Lease: leaseTime,
			}
		}
	default:
		t.Fatalf("no such kind: %s", p.Kind)
	}
	return f
}

func (f *fixture) effectsTable() string { return f.Prefix + "_effects" }

func (f *fixture) sqlInbox(t *testing.T, d consumer.Dialect, db *sql.DB, insert string, create bool) {
	t.Helper()
	f.db, f.dialect = db, d
	inbox := func(group string) *consumer.Inbox {
		return &consumer.Inbox{DB: db, Dialect: d, Group: group, Table: f.table}
	}
	f.consumer = func(group string) consumer.Consumer { return inbox(group) }
	f.write = func(ctx context.Context, event string) error {
		_, err := consumer.Tx(ctx).ExecContext(ctx, insert, event)
		return err
	}
	f.exec = func(ctx context.Context, query string) error {
		_, err := consumer.Tx(ctx).ExecContext(ctx, query)
		return err
	}
	f.loaded = func(t *testing.T) map[string]int { return loadEffects(t, db, f.effectsTable()) }
	if !create {
		return
	}
	must(t, inbox("").Migrate(t.Context()))
	_, err := db.Exec(`CREATE TABLE ` + f.effectsTable() + ` (event VARCHAR(255) NOT NULL)`)
	must(t, err)
	t.Cleanup(func() {
		for _, table := range []string{f.table, f.effectsTable()} {
			if _, err := db.Exec(`DROP TABLE ` + table); err != nil {
				t.Error(err)
			}
		}
	})
}

func (f *fixture) pgxInbox(t *testing.T, create bool) {
	t.Helper()
	f.pool, f.db, f.dialect = openPgx(t), openPostgres(t), consumer.Postgres
	inbox := func(group string) *pgxinbox.Inbox {
		return &pgxinbox.Inbox{Pool: f.pool, Group: group, Table: f.table}
	}
	f.consumer = func(group string) consumer.Consumer { return inbox(group) }
	f.exec = func(ctx context.Context, query string) error {
		_, err := pgxinbox.Tx(ctx).Exec(ctx, query)
		return err
	}
	f.write = func(ctx context.Context, event string) error {
		_, err := pgxinbox.Tx(ctx).Exec(ctx, `INSERT INTO `+f.effectsTable()+` VALUES ($1)`, event)
		return err
	}
	f.loaded = func(t *testing.T) map[string]int { return loadEffects(t, f.db, f.effectsTable()) }
	if !create {
		return
	}
	must(t, inbox("").Migrate(t.Context()))
	_, err := f.db.Exec(`CREATE TABLE ` + f.effectsTable() + ` (event text NOT NULL)`)
	must(t, err)
	t.Cleanup(func() {
		for _, table := range []string{f.table, f.effectsTable()} {
			if _, err := f.db.Exec(`DROP TABLE ` + table); err != nil {
				t.Error(err)
			}
		}
	})
}

func (f *fixture) lease(t *testing.T, s dedup.Store, drop func(), create bool) {
	t.Helper()
	f.consumer = func(group string) consumer.Consumer {
		return &consumer.Lease{Store: s, Group: group, MaxAttempts: 3, Lease: leaseTime}
	}
	if !create {
		return
	}
	if m, ok := s.(interface{ Migrate(context.Context) error }); ok {
		must(t, m.Migrate(t.Context()))
	}
	t.Cleanup(drop)
}

// leaseTime is short, since tests of crashes wait for its end.
const leaseTime = 2 * time.Second

func loadEffects(t *testing.T, db *sql.DB, table string) map[string]int {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `SELECT event, COUNT(*) FROM `+table+` GROUP BY event`)
	must(t, err)
	defer rows.Close()
	all := map[string]int{}
	for rows.Next() {
		var id string
		var n int
		must(t, rows.Scan(&id, &n))
		all[id] = n
	}
	must(t, rows.Err())
	return all
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// missing ends a test whose service isn't there.
func missing(t testing.TB, service, variable string, err error) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s (%s): %v", service, variable, err)
	}
	t.Skipf("no %s (%s): %v", service, variable, err)
}

func postgresURL() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

func usable(t *testing.T, db *sql.DB, service, variable string) *sql.DB {
	t.Helper()
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(12)
	if err := db.PingContext(t.Context()); err != nil {
		missing(t, service, variable, err)
	}
	return db
}

func openPostgres(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", postgresURL())
	must(t, err)
	return usable(t, db, "PostgreSQL", "IDEMPOTENCY_POSTGRES_URL")
}

func openMySQL(t *testing.T) *sql.DB {
	t.Helper()
	dsn := cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test")
	// So that what waits for a lock fails soon.
	sep := "?"
	if strings.Contains(dsn, sep) {
		sep = "&"
	}
	db, err := mysqldb.Open(dsn + sep + "innodb_lock_wait_timeout=5")
	must(t, err)
	return usable(t, db, "MySQL", "IDEMPOTENCY_MYSQL_DSN")
}

func openSQLite(t *testing.T, file string) *sql.DB {
	t.Helper()
	db, err := sqlitedb.Open(file)
	must(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func openPgx(t testing.TB) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(postgresURL())
	must(t, err)
	cfg.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	if err := pool.Ping(context.Background()); err != nil {
		missing(t, "PostgreSQL", "IDEMPOTENCY_POSTGRES_URL", err)
	}
	return pool
}

func openRedis(t *testing.T) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: cmp.Or(os.Getenv("IDEMPOTENCY_REDIS_ADDR"), "127.0.0.1:6379")})
	t.Cleanup(func() { client.Close() })
	if err := client.Ping(t.Context()).Err(); err != nil {
		missing(t, "Redis", "IDEMPOTENCY_REDIS_ADDR", err)
	}
	return client
}

func dropKeys(client *redis.Client, pattern string) {
	it := client.Scan(context.Background(), 0, pattern, 1000).Iterator()
	for it.Next(context.Background()) {
		client.Del(context.Background(), it.Val())
	}
}

func wantStatus(t *testing.T, r consumer.Result, want consumer.Status) {
	t.Helper()
	if r.Status != want {
		t.Fatalf("status is %v (%v), want %v", r.Status, r.Err, want)
	}
}
