package pgxstore_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

func databaseURL() string {
	if url := os.Getenv("IDEMPOTENCY_POSTGRES_URL"); url != "" {
		return url
	}
	return "postgres://postgres@127.0.0.1:5432/test?sslmode=disable"
}

// newPool opens a pool of its own, or skips the test where there is no server.
func newPool(t testing.TB, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(databaseURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 10
	for _, f := range change {
		f(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := ping(pool); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		t.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	return pool
}

func ping(pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return pool.Ping(ctx)
}

// newStore makes a store on a table of its own.
func newStore(t testing.TB, pool *pgxpool.Pool, opts pgxstore.Options) (*pgxstore.Store, string) {
	t.Helper()
	opts.Table = "pgxtest_" + rand()
	s, err := pgxstore.New(pool, opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dropTable(t, pool, opts.Table) })
	return s, opts.Table
}

func dropTable(t testing.TB, pool *pgxpool.Pool, name string) {
	if _, err := pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+name); err != nil {
		t.Errorf("drop %s: %v", name, err)
	}
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	var n int
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

func claimOf(id string) dedup.Claim {
	return dedup.Claim{
		Key:         dedup.Key{Scope: "scope", ID: id},
		Fingerprint: []byte("fingerprint"),
		Token:       dedup.NewToken(),
		Lease:       time.Minute,
		TTL:         time.Hour,
	}
}

func done(body string) dedup.Completion {
	return dedup.Completion{
		Status:   dedup.StatusCompleted,
		Response: dedup.Response{Code: 201, Header: []byte("h"), Body: []byte(body)},
		TTL:      time.Hour,
	}
}

func rand() string { return dedup.NewToken().String() }

// begin begins and expects to win.
func begin(t testing.TB, s *pgxstore.Store, c dedup.Claim) dedup.Tx {
	t.Helper()
	tx, res, err := s.Begin(t.Context(), c)
	if err != nil || tx == nil {
		t.Fatalf("Begin = %v, %v, want won", res.State, err)
	}
	return tx
}

// txOf is the transaction as the work has it.
func txOf(t testing.TB, tx dedup.Tx) pgx.Tx {
	t.Helper()
	ptx, ok := pgxstore.LookupTx(tx.Context(t.Context()))
	if !ok {
		t.Fatal("no transaction in the context")
	}
	return ptx
}

func work(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if _, err := tx.Exec(t.Context(), "SELECT 1"); err != nil {
		t.Fatal(err)
	}
}

// newEffects makes a table of effects, and returns its name.
func newEffects(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	name := "pgxtest_effects_" + rand()
	exec(t, pool, "CREATE TABLE "+name+" (name text PRIMARY KEY)")
	t.Cleanup(func() { dropTable(t, pool, name) })
	return name
}
