package pgxstore_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for _, bad := range []pgxstore.Options{
		{Table: "a b"}, {Table: "1a"}, {Table: `a"b`}, {Table: "a.b.c"}, {Table: ".a"}, {Table: "a."}, {Table: "é"},
		{Table: strings.Repeat("a", 51)}, {Table: strings.Repeat("a", 51) + ".a"},
		{Isolation: "chaos"},
		{Lanes: -1}, {BatchRows: -1}, {BatchBytes: -1},
	} {
		if _, err := pgxstore.New(pool, bad); err == nil {
			t.Errorf("New(%+v) = nil, want an error", bad)
		}
	}
	if _, err := pgxstore.New(nil, pgxstore.Options{}); err == nil {
		t.Error("New without a pool = nil, want an error")
	}
	s, err := pgxstore.New(pool, pgxstore.Options{})
	if err != nil || s.Table() != "idempotency_keys" {
		t.Errorf("New of the zero options = %v, table %q", err, s.Table())
	}
}

func TestInvalidCalls(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	token := dedup.NewToken()
	for _, key := range []dedup.Key{{}, {ID: "a\x00"}, {ID: "\xff"}, {Scope: strings.Repeat("a", 256), ID: "a"}} {
		c := claimOf("")
		c.Key = key
		calls := map[string]func() error{
			"Claim":    func() error { _, err := s.Claim(t.Context(), c); return err },
			"Begin":    func() error { _, _, err := s.Begin(t.Context(), c); return err },
			"Renew":    func() error { return s.Renew(t.Context(), key, token, 1) },
			"Complete": func() error { return s.Complete(t.Context(), key, token, done("x")) },
			"Release":  func() error { return s.Release(t.Context(), key, token) },
			"Get":      func() error { _, err := s.Get(t.Context(), key); return err },
			"Resolve":  func() error { return s.Resolve(t.Context(), key, nil, 0) },
		}
		for name, call := range calls {
			if err := call(); !errors.Is(err, dedup.ErrInvalidKey) {
				t.Errorf("%s of %q = %v, want ErrInvalidKey", name, key, err)
			}
		}
	}
	for _, change := range []func(*dedup.Claim){
		func(c *dedup.Claim) { c.Lease = 0 },
		func(c *dedup.Claim) { c.TTL = -1 },
		func(c *dedup.Claim) { c.Fingerprint = make([]byte, dedup.MaxFingerprintLength+1) },
	} {
		c := claimOf("a")
		change(&c)
		if _, err := s.Claim(t.Context(), c); err == nil {
			t.Errorf("Claim(%+v) = nil, want an error", c)
		}
		if _, _, err := s.Begin(t.Context(), c); err == nil {
			t.Errorf("Begin(%+v) = nil, want an error", c)
		}
	}
	for _, c := range []dedup.Completion{
		{Status: dedup.StatusInProgress, TTL: 1}, {Status: dedup.StatusCompleted},
		{Status: dedup.StatusCompleted, TTL: 1, Response: dedup.Response{Code: 1 << 40}},
	} {
		if err := s.Complete(t.Context(), dedup.Key{ID: "a"}, token, c); err == nil || errors.Is(err, dedup.ErrLeaseLost) {
			t.Errorf("Complete(%+v) = %v, want that it is refused", c, err)
		}
		if err := s.Resolve(t.Context(), dedup.Key{ID: "a"}, &c.Response, c.TTL); c.Status == dedup.StatusCompleted && (err == nil || errors.Is(err, dedup.ErrNotFound)) {
			t.Errorf("Resolve(%+v) = %v, want that it is refused", c, err)
		}
	}
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	schema := "pgxtest_" + rand()
	exec(t, pool, "CREATE SCHEMA "+schema)
	t.Cleanup(func() { pool.Exec(context.Background(), "DROP SCHEMA "+schema+" CASCADE") }) //nolint:errcheck // gone or not
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	for _, name := range []string{"a", "Other_Case"} {
		full := schema + "." + name
		var wg sync.WaitGroup
		for i := range 8 { // many nodes at once, of both kinds
			wg.Go(func() {
				var m interface{ Migrate(context.Context) error }
				var err error
				if m, err = pgxstore.New(pool, pgxstore.Options{Table: full}); i%2 == 1 {
					m, err = sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: full})
				}
				if err == nil {
					err = m.Migrate(t.Context())
				}
				if err != nil {
					t.Errorf("Migrate: %v", err)
				}
			})
		}
		wg.Wait()
		s, err := pgxstore.New(pool, pgxstore.Options{Table: full})
		if err != nil {
			t.Fatal(err)
		}
		wantWon(t, claim(t.Context(), s, claimOf("a")))
		if n := count(t, pool, "SELECT count(*) FROM pg_indexes WHERE schemaname = $1 AND tablename = $2", schema, name); n != 2 {
			t.Errorf("%s has %d indexes, want 2", full, n)
		}
	}
}

func TestMigrateNeedsNoRights(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, table := newStore(t, pool, pgxstore.Options{})
	role := "pgxtest_" + rand()
	exec(t, pool, "CREATE ROLE "+role)
	t.Cleanup(func() { pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role) }) //nolint:errcheck // gone or not
	exec(t, pool, "GRANT SELECT, INSERT, UPDATE, DELETE ON "+table+" TO "+role)
	poor := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role })
	s, err := pgxstore.New(poor, pgxstore.Options{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Errorf("Migrate = %v, want nil where the table is there", err)
	}
	wantWon(t, claim(t.Context(), s, claimOf("a")))
}

// Migrate runs what Schema prints, which is what sqlstore's prints.
func TestSchema(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	columns := func(sql string) string {
		t.Helper()
		name := "pgxtest_" + rand()
		exec(t, pool, strings.ReplaceAll(sql, "idempotency_keys", name))
		t.Cleanup(func() { dropTable(t, pool, name) })
		var def string
		err := pool.QueryRow(t.Context(), `SELECT
			(SELECT string_agg(concat_ws(' ', attname, atttypid::regtype, attcollation, attnotnull, attnum), ', ' ORDER BY attnum)
				FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0)
			|| (SELECT string_agg(replace(indexdef, $1::text, 'table'), ', ' ORDER BY indexdef) FROM pg_indexes WHERE tablename = $1::text)`, name).Scan(&def)
		if err != nil {
			t.Fatal(err)
		}
		return def
	}
	s, err := pgxstore.New(pool, pgxstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	other, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := columns(s.Schema()), columns(other.Schema()); a != b {
		t.Errorf("the tables differ:\n%s\n%s", a, b)
	}
}

// Two kinds of store on one table are like one.
func TestInterchangeable(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	native, table := newStore(t, pool, pgxstore.Options{})
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	generic, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	for name, pair := range map[string][2]dedup.TxStore{"native first": {native, generic}, "generic first": {generic, native}} {
		t.Run(name, func(t *testing.T) {
			a, b := pair[0], pair[1]
			want := func(s dedup.Store, c dedup.Claim, state dedup.State) dedup.Result {
				t.Helper()
				res, err := s.Claim(t.Context(), c)
				if err != nil || res.State != state {
					t.Fatalf("Claim = %v, %v, want %v", res.State, err, state)
				}
				return res
			}
			c := claimOf(name)
			want(a, c, dedup.Won)
			want(b, claimOf(name), dedup.InProgress)
			other := claimOf(name)
			other.Fingerprint = []byte("other")
			want(b, other, dedup.Mismatch)
			if err := b.Renew(t.Context(), c.Key, c.Token, time.Hour); err != nil {
				t.Errorf("Renew by the other store: %v", err)
			}
			if err := b.Renew(t.Context(), c.Key, c.Token, 0); err != nil {
				t.Errorf("Renew by the other store: %v", err)
			}
			c = claimOf(name)
			want(b, c, dedup.Abandoned)
			if err := a.Complete(t.Context(), c.Key, c.Token, done("answer")); err != nil {
				t.Errorf("Complete by the other store: %v", err)
			}
			for _, s := range pair {
				if res := want(s, claimOf(name), dedup.Completed); string(res.Record.Response.Body) != "answer" || res.Record.Attempt != 2 {
					t.Errorf("replay is %+v", res.Record)
				}
			}

			// One lock: a transaction of the one is seen by the other at once.
			c = claimOf(name + " tx")
			tx, res, err := a.Begin(t.Context(), c)
			if err != nil || res.State != dedup.Won {
				t.Fatalf("Begin = %v, %v", res.State, err)
			}
			none, res, err := b.Begin(t.Context(), claimOf(name+" tx"))
			if err != nil || res.State != dedup.InProgress || none != nil {
				t.Errorf("Begin by the other store = %v, %v, want in progress", res.State, err)
			}
			want(native, claimOf(name+" tx"), dedup.InProgress) // native claims never wait for a transaction
			if err := tx.Commit(t.Context(), done("tx")); err != nil {
				t.Error(err)
			}
			want(b, claimOf(name+" tx"), dedup.Completed)
		})
	}
}

// A lease-mode claim doesn't wait for a transaction's either, nor takes over
// what a transaction is about to.
func TestClaimBesideTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, table := newStore(t, pool, pgxstore.Options{})
	for name, age := range map[string]string{
		"absent":    "",
		"abandoned": "UPDATE " + table + " SET lease_until = '-infinity' WHERE id_key = $1",
		"expired":   "UPDATE " + table + " SET lease_until = '2000-01-01', expires_at = '2000-01-01' WHERE id_key = $1",
	} {
		if age != "" {
			wantWon(t, claim(t.Context(), s, claimOf(name)))
			exec(t, pool, strings.ReplaceAll(age, "-infinity", "2000-01-01"), name)
		}
		tx, _, err := s.Begin(t.Context(), claimOf(name))
		if err != nil || tx == nil {
			t.Fatalf("Begin on a key that is %s: %v, %v", name, tx, err)
		}
		res, err := s.Claim(t.Context(), claimOf(name))
		if err != nil || res.State != dedup.InProgress {
			t.Errorf("Claim of a key that is %s, beside a transaction = %v, %v, want in progress", name, res.State, err)
		}
		if err := tx.Commit(t.Context(), done("x")); err != nil {
			t.Error(err)
		}
	}
}

// spy keeps the statements.
type spy struct {
	mu   sync.Mutex
	seen []pgx.TraceQueryStartData
}

func (s *spy) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, d)
	return ctx
}
func (s *spy) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A replay writes nothing: no write-ahead log, not even a transaction id,
// whether the store has expected it or not.
func TestReplayWritesNothing(t *testing.T) {
	t.Parallel()
	statements := &spy{}
	pool := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = statements })
	s, table := newStore(t, pool, pgxstore.Options{})
	c := claimOf("replay")
	wantWon(t, claim(t.Context(), s, c))
	if err := s.Complete(t.Context(), c.Key, c.Token, done("x")); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, "VACUUM "+table) // or reading might tidy up, as any SELECT does
	statements.seen = nil
	lengths := map[int]bool{} // of replays, in statements
	for range 10 {
		before := len(statements.seen)
		res, err := s.Claim(t.Context(), claimOf("replay"))
		if err != nil || res.State != dedup.Completed {
			t.Fatalf("Claim = %v, %v, want completed", res.State, err)
		}
		lengths[len(statements.seen)-before] = true
	}
	if !lengths[1] || !lengths[2] || len(lengths) != 2 {
		t.Errorf("replays took %v statements, want 2 at first and then 1", lengths)
	}
	seen := statements.seen

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // nothing is to stay
	wrote := func(query string, args []any) bool {
		t.Helper()
		rows, err := tx.Query(t.Context(), "EXPLAIN (ANALYZE, WAL) "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		var id sql.NullString
		if err := tx.QueryRow(t.Context(), "SELECT pg_current_xact_id_if_assigned()::text").Scan(&id); err != nil {
			t.Fatal(err)
		}
		return id.Valid || strings.Contains(strings.Join(plan, "\n"), "WAL:")
	}
	for _, d := range seen {
		if wrote(d.SQL, d.Args) {
			t.Errorf("a replay writes: %s", d.SQL)
		}
	}
	insert := seen[0] // the test can tell: the same does write for a new key
	insert.Args[1] = "first"
	if !wrote(insert.SQL, insert.Args) {
		t.Errorf("a first claim wrote nothing: %s", insert.SQL)
	}
}

// What wrote nothing is told as busy, so that it can be called again.
func TestBusy(t *testing.T) {
	t.Parallel()
	pool := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["lock_timeout"] = "10ms" })
	s, table := newStore(t, pool, pgxstore.Options{})
	c := claimOf("busy")
	wantWon(t, claim(t.Context(), s, c))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM "+table+" FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if err := s.Complete(t.Context(), c.Key, c.Token, done("x")); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Complete on a locked row = %v, want ErrBusy", err)
	}
	if res, err := s.Claim(t.Context(), claimOf("busy")); err != nil || res.State != dedup.InProgress {
		t.Errorf("Claim on a locked row = %v, %v, want in progress: it locks nothing", res.State, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Complete(t.Context(), c.Key, c.Token, done("x")); err != nil {
		t.Errorf("Complete = %v", err)
	}
}
