package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

// The benchmarks of the native PostgreSQL store time it in turns with its floor,
// which is what a person would write by hand through pgx on the same pool and
// on a table of the same shape. They report
//   - floor-ns/op and store-ns/op: the medians of the turns;
//   - x-floor: the store's time by the floor's.
//
// Run them with a fixed number of operations, several times:
//
//	go test -run '^$' -bench Postgres -benchtime 6000x -count 5 ./bench
//
// IDEMPOTENCY_BENCH_ROWS sets the size of BenchmarkPostgresGrowth's large table
// (10,000,000 for the figure in the README; 100,000 if it is not set).

const (
	scope   = "acme\x1fPOST /charges"
	poolMax = 16
)

var body100 = []byte(`{"id":"ch_1N2k3l4m5n6o7p8q","status":"succeeded","amount":1999,"currency":"eur","order":"1234567"}`)
var header100 = []byte("content-type: application/json\nlocation: /charges/ch_1N2k3l4m5n6o7p8q\n")

func openPool(b *testing.B, size int32) *pgxpool.Pool {
	b.Helper()
	url := os.Getenv("IDEMPOTENCY_POSTGRES_URL")
	if url == "" {
		url = "postgres://postgres@127.0.0.1:5432/test?sslmode=disable"
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns, cfg.MinConns = size, size
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	if err := pool.Ping(b.Context()); err != nil {
		if os.Getenv("CI") == "true" {
			b.Fatalf("PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		b.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	return pool
}

// openStore makes a store on a table of its own.
func openStore(b *testing.B, pool *pgxpool.Pool, opts pgxstore.Options) (*pgxstore.Store, string) {
	b.Helper()
	opts.Table = "pgxbench_" + dedup.NewToken().String()
	s, err := pgxstore.New(pool, opts)
	if err != nil {
		b.Fatal(err)
	}
	if err := s.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { sqlExec(b, pool, "DROP TABLE "+opts.Table) })
	return s, opts.Table
}

func sqlExec(b *testing.B, pool *pgxpool.Pool, sql string, args ...any) {
	b.Helper()
	if _, err := pool.Exec(context.Background(), sql, args...); err != nil {
		b.Fatalf("%s: %v", sql, err)
	}
}

func newClaim() dedup.Claim {
	t := dedup.NewToken()
	return dedup.Claim{
		Key:         dedup.Key{Scope: scope, ID: dedup.NewToken().String()},
		Fingerprint: append(t[:], t[:]...),
		Token:       t,
		Lease:       30 * time.Second,
		TTL:         24 * time.Hour,
	}
}

func completed() dedup.Completion {
	return dedup.Completion{
		Status:   dedup.StatusCompleted,
		Response: dedup.Response{Code: 201, Header: header100, Body: body100},
		TTL:      24 * time.Hour,
	}
}

// turns runs floor and store in turns, by so many callers at once, and reports.
func turns(b *testing.B, callers int, floor, store func(context.Context) error) {
	b.Helper()
	const perTurn = 25 // operations of each caller
	ctx := b.Context()
	turn := func(f func(context.Context) error) float64 {
		var wg sync.WaitGroup
		var failed atomic.Pointer[error]
		var taken atomic.Int64
		start := time.Now()
		for range callers {
			wg.Go(func() {
				for taken.Add(1) <= int64(callers*perTurn) { // so that all end together
					if err := f(ctx); err != nil {
						failed.Store(&err)
						return
					}
				}
			})
		}
		wg.Wait()
		d := time.Since(start)
		if err := failed.Load(); err != nil {
			b.Fatal(*err)
		}
		return float64(d.Nanoseconds()) / float64(callers*perTurn)
	}
	for range 3 { // connections, statements, caches
		turn(floor)
		turn(store)
	}
	var floors, stores, ratios []float64
	b.ResetTimer()
	for done := 0; done < b.N; done += callers * perTurn {
		var f, s float64
		if len(ratios)%2 == 0 {
			f, s = turn(floor), turn(store)
		} else {
			s, f = turn(store), turn(floor)
		}
		floors, stores, ratios = append(floors, f), append(stores, s), append(ratios, s/f)
	}
	b.StopTimer()
	b.ReportMetric(0, "ns/op") // of both together: says nothing
	b.ReportMetric(median(floors), "floor-ns/op")
	b.ReportMetric(median(stores), "store-ns/op")
	b.ReportMetric(median(ratios), "x-floor")
}

func median(xs []float64) float64 {
	slices.Sort(xs)
	if n := len(xs); n%2 == 0 {
		return (xs[n/2-1] + xs[n/2]) / 2
	}
	return xs[len(xs)/2]
}

// bareLease is a first request in two statements by hand.
func bareLease(pool *pgxpool.Pool, table string) func(context.Context) error {
	insert := "INSERT INTO " + table + ` (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
		VALUES ($1, $2, $3, $4, 1, 1, clock_timestamp() + $5::interval, clock_timestamp(), clock_timestamp() + $6::interval)`
	update := "UPDATE " + table + ` SET status = $4, code = $5, header = $6, body = $7, expires_at = clock_timestamp() + $8::interval
		WHERE scope = $1 AND id_key = $2 AND token = $3`
	return func(ctx context.Context) error {
		c, d := newClaim(), completed()
		if _, err := pool.Exec(ctx, insert, c.Key.Scope, c.Key.ID, c.Token[:], c.Fingerprint, c.Lease, c.TTL); err != nil {
			return err
		}
		_, err := pool.Exec(ctx, update, c.Key.Scope, c.Key.ID, c.Token[:], d.Status, d.Response.Code, d.Response.Header, d.Response.Body, d.TTL)
		return err
	}
}

func leased(s dedup.Store) func(context.Context) error {
	return func(ctx context.Context) error {
		c := newClaim()
		res, err := s.Claim(ctx, c)
		if err != nil || res.State != dedup.Won {
			return fmt.Errorf("claim: %v, %w", res.State, err)
		}
		return s.Complete(ctx, c.Key, c.Token, completed())
	}
}

// BenchmarkPostgresLease is a first request in lease mode, claim and completion,
// beside an INSERT and an UPDATE, by 1, 8 and 64 callers at once. At 64 the
// floor is one statement per commit, and x-floor well below 1 is what batches
// gain.
func BenchmarkPostgresLease(b *testing.B) {
	for _, callers := range []int{1, 8, 64} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			pool := openPool(b, poolMax)
			s, _ := openStore(b, pool, pgxstore.Options{})
			_, table := openStore(b, pool, pgxstore.Options{})
			turns(b, callers, bareLease(pool, table), leased(s))
		})
	}
}

// BenchmarkPostgresReplay is the claim of a completed key beside a SELECT of its
// row by the primary key.
func BenchmarkPostgresReplay(b *testing.B) {
	for _, callers := range []int{1, 8} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			pool := openPool(b, poolMax)
			s, table := openStore(b, pool, pgxstore.Options{})
			sqlExec(b, pool, "INSERT INTO "+table+` SELECT $1, 'k' || n, $2, $2, 2, 1, now(), now(), now() + interval '1 day', 201, $3, $4
				FROM generate_series(1, 10000) n`, scope, make([]byte, 16), header100, body100)
			sqlExec(b, pool, "VACUUM ANALYZE "+table)
			var n atomic.Int64
			key := func() string { return "k" + strconv.FormatInt(n.Add(7919)%10000+1, 10) }
			query := "SELECT token, fingerprint, status, attempt, code, header, body, lease_until, created_at, expires_at FROM " +
				table + " WHERE scope = $1 AND id_key = $2"
			floor := func(ctx context.Context) error {
				var token, fingerprint, header, body []byte
				var status, attempt, code int
				var lease, created, expires time.Time
				return pool.QueryRow(ctx, query, scope, key()).Scan(&token, &fingerprint, &status, &attempt, &code, &header, &body, &lease, &created, &expires)
			}
			turns(b, callers, floor, func(ctx context.Context) error {
				c := newClaim()
				c.Key.ID, c.Fingerprint = key(), make([]byte, 16)
				res, err := s.Claim(ctx, c)
				if err != nil || res.State != dedup.Completed {
					return fmt.Errorf("claim: %v, %w", res.State, err)
				}
				return nil
			})
		})
	}
}

// BenchmarkPostgresTx is a business transaction of one INSERT in transaction
// mode, beside the same without.
func BenchmarkPostgresTx(b *testing.B) {
	for _, callers := range []int{1, 8} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			pool := openPool(b, poolMax)
			s, table := openStore(b, pool, pgxstore.Options{})
			floor, store := businessTx(b, pool, s, table)
			turns(b, callers, floor, store)
		})
	}
}

// businessTx returns a transaction of one INSERT, by hand and in the store.
func businessTx(b *testing.B, pool *pgxpool.Pool, s *pgxstore.Store, table string) (floor, store func(context.Context) error) {
	charges := table + "_charges"
	sqlExec(b, pool, "CREATE TABLE "+charges+" (id text PRIMARY KEY, amount bigint NOT NULL, created_at timestamptz NOT NULL DEFAULT now())")
	b.Cleanup(func() { sqlExec(b, pool, "DROP TABLE "+charges) })
	insert := "INSERT INTO " + charges + " (id, amount) VALUES ($1, $2)"
	floor = func(ctx context.Context) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx) //nolint:errcheck // after Commit it does nothing
		if _, err := tx.Exec(ctx, insert, dedup.NewToken().String(), 1999); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	store = func(ctx context.Context) error {
		tx, res, err := s.Begin(ctx, newClaim())
		if err != nil || tx == nil {
			return fmt.Errorf("begin: %v, %w", res.State, err)
		}
		wctx := tx.Context(ctx)
		if _, err := pgxstore.Tx(wctx).Exec(wctx, insert, dedup.NewToken().String(), 1999); err != nil {
			return err
		}
		return tx.Commit(ctx, completed())
	}
	return floor, store
}

// BenchmarkPostgresTxSQL is the same over database/sql, with pgx as its driver:
// each statement and COMMIT is a round trip of its own there.
func BenchmarkPostgresTxSQL(b *testing.B) {
	for _, callers := range []int{1, 8} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			pool := openPool(b, poolMax)
			_, table := openStore(b, pool, pgxstore.Options{})
			floor, _ := businessTx(b, pool, nil, table)
			db := stdlib.OpenDBFromPool(pool)
			b.Cleanup(func() { db.Close() })
			s, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: table})
			if err != nil {
				b.Fatal(err)
			}
			turns(b, callers, floor, func(ctx context.Context) error {
				tx, res, err := s.Begin(ctx, newClaim())
				if err != nil || tx == nil {
					return fmt.Errorf("begin: %v, %w", res.State, err)
				}
				wctx := tx.Context(ctx)
				insert := "INSERT INTO " + table + "_charges (id, amount) VALUES ($1, $2)"
				if _, err := sqlstore.Tx(wctx).ExecContext(wctx, insert, dedup.NewToken().String(), 1999); err != nil {
					return err
				}
				return tx.Commit(ctx, completed())
			})
		})
	}
}

// BenchmarkPostgresGrowth is a claim in a table of 10,000 rows (the floor) and
// in a large one.
func BenchmarkPostgresGrowth(b *testing.B) {
	rows := 100_000
	if env := os.Getenv("IDEMPOTENCY_BENCH_ROWS"); env != "" {
		var err error
		if rows, err = strconv.Atoi(env); err != nil {
			b.Fatal(err)
		}
	}
	pool := openPool(b, poolMax)
	filled := func(n int) func(context.Context) error {
		s, table := openStore(b, pool, pgxstore.Options{})
		claim := func(ctx context.Context) error {
			res, err := s.Claim(ctx, newClaim())
			if err != nil || res.State != dedup.Won {
				return fmt.Errorf("claim: %v, %w", res.State, err)
			}
			return nil
		}
		for range 100 { // so that the plan is made before the table has grown
			if err := claim(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		const chunk = 1_000_000
		for from := 1; from <= n; from += chunk {
			sqlExec(b, pool, "INSERT INTO "+table+` SELECT $1, md5(n::text), $2, $2, 2, 1, now(), now(), now() + n * interval '1 second', 201, NULL, $3
				FROM generate_series($4::bigint, $5::bigint) n`, scope, make([]byte, 16), body100, from, min(n, from+chunk-1))
		}
		sqlExec(b, pool, "VACUUM ANALYZE "+table)
		sqlExec(b, pool, "CHECKPOINT")
		return claim
	}
	small, large := filled(10_000), filled(rows)
	for _, callers := range []int{1, 8} {
		b.Run(fmt.Sprintf("%drows/%d", rows, callers), func(b *testing.B) { turns(b, callers, small, large) })
	}
}

// BenchmarkPostgresPurge reports how many expired rows a second one node
// removes, in batches of 1,000.
func BenchmarkPostgresPurge(b *testing.B) {
	pool := openPool(b, 2)
	s, table := openStore(b, pool, pgxstore.Options{})
	removed := 0
	b.ResetTimer()
	for removed < b.N {
		b.StopTimer()
		sqlExec(b, pool, "INSERT INTO "+table+` SELECT $1, md5(n::text), $2, $2, 2, 1, now(), now(), now() - n * interval '1 millisecond', 201, $3, $4
			FROM generate_series(1, 20000) n`, scope, make([]byte, 16), header100, body100)
		b.StartTimer()
		for {
			n, err := s.Purge(b.Context(), 1000)
			if err != nil {
				b.Fatal(err)
			}
			removed += n
			if n < 1000 {
				break
			}
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(removed)/b.Elapsed().Seconds(), "rows/s")
}
