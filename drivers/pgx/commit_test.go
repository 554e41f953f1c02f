package pgxstore_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

// outcomes are the errors of Commit that say what became of it.
var outcomes = []error{dedup.ErrSerialization, dedup.ErrTxAborted, dedup.ErrNotCommitted, dedup.ErrTxEnded}

// wantOutcome checks that err is want and none of the others.
func wantOutcome(t *testing.T, err, want error) {
	t.Helper()
	if want == nil && err != nil || want != nil && !errors.Is(err, want) {
		t.Errorf("Commit = %v, want %v", err, want)
	}
	for _, o := range outcomes {
		if o != want && errors.Is(err, o) {
			t.Errorf("Commit = %v, which must not be %q", err, o)
		}
	}
}

// wantRow checks that all of the transaction is there, or nothing.
func wantRow(t *testing.T, s *pgxstore.Store, pool *pgxpool.Pool, c dedup.Claim, effects string, committed bool) {
	t.Helper()
	rec, err := s.Get(t.Context(), c.Key)
	n := count(t, pool, "SELECT count(*) FROM "+effects+" WHERE name = $1", c.Key.ID)
	switch {
	case committed && (err != nil || rec.Status != dedup.StatusCompleted || rec.Token != c.Token || n != 1):
		t.Errorf("row %v, %v, %d effects, want a completed row and one effect", rec.Status, err, n)
	case !committed && (!errors.Is(err, dedup.ErrNotFound) || n != 0):
		t.Errorf("row %v, %v, %d effects, want neither row nor effect", rec.Status, err, n)
	}
}

func effect(t *testing.T, tx dedup.Tx, effects, name string) {
	t.Helper()
	if _, err := txOf(t, tx).Exec(t.Context(), "INSERT INTO "+effects+" VALUES ($1)", name); err != nil {
		t.Fatal(err)
	}
}

func TestConnectionLostDuringCommit(t *testing.T) {
	cuts := []struct {
		name      string
		cut       cut
		committed bool
		want      error
	}{
		{"BeforeItArrived", cutBefore, false, dedup.ErrNotCommitted},
		{"AfterItTookEffect", cutAfter, true, nil},
	}
	for _, su := range setups {
		for _, cc := range cuts {
			t.Run(su.name+"/"+cc.name, func(t *testing.T) {
				t.Parallel()
				var w wire
				pool := newPool(t, w.config, func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode = su.mode
					c.MaxConns = 1
				})
				s, _ := newStore(t, pool, su.opts)
				effects := newEffects(t, pool)

				warm := claimOf("warm") // so that Commit has nothing to prepare
				tx := begin(t, s, warm)
				effect(t, tx, effects, "warm")
				wantOutcome(t, tx.Commit(t.Context(), done("x")), nil)

				c := claimOf("cut")
				tx = begin(t, s, c)
				effect(t, tx, effects, c.Key.ID)
				if su.mode == pgx.QueryExecModeDescribeExec { // which always prepares first
					w.after(1, cc.cut)
				} else {
					w.after(0, cc.cut)
				}
				w.refuse(3) // the database is away for a moment
				wantOutcome(t, tx.Commit(t.Context(), done("x")), cc.want)
				wantRow(t, s, pool, c, effects, cc.committed)
			})
		}
	}
}

// Whatever the moment, what Commit says is so.
func TestConnectionLostAtOnce(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, w.config)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	for range 20 {
		c := claimOf(rand())
		tx := begin(t, s, c)
		effect(t, tx, effects, c.Key.ID)
		w.after(0, cutSent)
		err := tx.Commit(t.Context(), done("x"))
		if err != nil && !errors.Is(err, dedup.ErrNotCommitted) {
			t.Fatalf("Commit = %v, want nil or ErrNotCommitted", err)
		}
		wantRow(t, s, pool, c, effects, err == nil)
	}
}

// A COMMIT that the server is still busy with, when its connection is lost, is
// waited for.
func TestConnectionLostWhileCommitting(t *testing.T) {
	t.Parallel()
	w := wire{deaf: true}
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	exec(t, pool, "CREATE FUNCTION wait_"+effects+`() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN PERFORM pg_advisory_xact_lock(hashtext('`+effects+`')); RETURN NULL; END$$`)
	t.Cleanup(func() { pool.Exec(context.Background(), "DROP FUNCTION wait_"+effects+" CASCADE") })
	exec(t, pool, "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON "+effects+
		" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_"+effects+"()")
	blocked := func(n int) {
		t.Helper()
		const q = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND NOT l.granted AND a.application_name = $1"
		for count(t, pool, q, effects) < n {
			runtime.Gosched()
		}
	}
	named := newPool(t, w.config, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = effects })
	s, err := pgxstore.New(named, pgxstore.Options{Table: s.Table()})
	if err != nil {
		t.Fatal(err)
	}

	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtext($1))", effects); err != nil {
		t.Fatal(err)
	}
	c := claimOf("slow")
	tx := begin(t, s, c)
	effect(t, tx, effects, c.Key.ID)
	result := make(chan error, 1)
	conn := txOf(t, tx).Conn().PgConn().Conn()
	go func() { result <- tx.Commit(t.Context(), done("x")) }()
	blocked(1) // the COMMIT on the gate
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	blocked(2) // and who asks for the outcome on the COMMIT
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, <-result, nil)
	wantRow(t, s, pool, c, effects, true)
}

func TestConnectionLostBeforeCommit(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t)
	one := newPool(t, w.config, func(c *pgxpool.Config) { c.MaxConns = 1 })
	s, _ := newStore(t, one, pgxstore.Options{})
	effects := newEffects(t, pool)
	kills := map[string]func(tx dedup.Tx){
		"killed": func(tx dedup.Tx) {
			exec(t, pool, "SELECT pg_terminate_backend($1, 10000)", int(txOf(t, tx).Conn().PgConn().PID()))
		},
		"closed": func(tx dedup.Tx) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			txOf(t, tx).Conn().Close(ctx) //nolint:errcheck // it is to be gone
		},
		"cancelled": func(tx dedup.Tx) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if _, err := txOf(t, tx).Exec(ctx, "SELECT pg_sleep(60)"); err == nil {
				t.Error("the statement was not cancelled")
			}
		},
	}
	for name, kill := range kills {
		c := claimOf(name)
		tx := begin(t, s, c)
		effect(t, tx, effects, name)
		kill(tx)
		wantOutcome(t, tx.Commit(t.Context(), done("x")), dedup.ErrNotCommitted)
		wantRow(t, s, pool, c, effects, false)

		c = claimOf(name + " rollback")
		tx = begin(t, s, c)
		effect(t, tx, effects, c.Key.ID)
		kill(tx)
		if err := tx.Rollback(t.Context()); err != nil {
			t.Errorf("%s: Rollback = %v, want nil: the database rolls back by itself", name, err)
		}
	}
}

// Where the outcome can't be read in time, nothing is claimed to be known.
func TestOutcomeNotReadable(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	one := newPool(t, w.config, func(c *pgxpool.Config) { c.MaxConns = 1 })
	s, err := pgxstore.New(one, pgxstore.Options{Table: s.Table()})
	if err != nil {
		t.Fatal(err)
	}
	tx := begin(t, s, claimOf("lost"))
	ctx, cancel := context.WithCancel(t.Context())
	w.after(0, cutBefore)
	w.refuse(1 << 30)
	dials := 0
	w.onDial = func() {
		if dials++; dials == 4 {
			cancel()
		}
	}
	err = tx.Commit(ctx, done("x"))
	if err == nil {
		t.Error("Commit = nil, want an error")
	}
	wantOutcome(t, err, err)
	w.refuse(0)
}

func TestCommitRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, table := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	exec(t, pool, "CREATE FUNCTION fail_"+effects+`() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = TG_ARGV[0]; END$$`)
	t.Cleanup(func() { pool.Exec(context.Background(), "DROP FUNCTION fail_"+effects+" CASCADE") })
	exec(t, pool, "CREATE TRIGGER fail BEFORE UPDATE ON "+table+" FOR EACH ROW WHEN (NEW.code = 500) EXECUTE FUNCTION fail_"+effects+"('P0001')")
	for _, code := range []string{"40001", "40P01", "23503"} {
		exec(t, pool, "CREATE TABLE "+effects+"_"+code+" (name text)")
		t.Cleanup(func() { dropTable(t, pool, effects+"_"+code) })
		exec(t, pool, "CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON "+effects+"_"+code+
			" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail_"+effects+"('"+code+"')")
	}
	cases := []struct {
		name string
		sql  string
		done dedup.Completion
		want error
	}{
		{"serialization at COMMIT", "INSERT INTO " + effects + "_40001 VALUES ('x')", done("x"), dedup.ErrSerialization},
		{"deadlock at COMMIT", "INSERT INTO " + effects + "_40P01 VALUES ('x')", done("x"), dedup.ErrSerialization},
		{"deferred constraint", "INSERT INTO " + effects + "_23503 VALUES ('x')", done("x"), dedup.ErrTxAborted},
		{"completion refused", "SELECT 1", dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 500}, TTL: 1}, dedup.ErrNotCommitted},
		{"completion invalid", "SELECT 1", dedup.Completion{}, dedup.ErrNotCommitted},
		{"ended by the work", "COMMIT", done("x"), dedup.ErrTxEnded},
		{"rolled back by the work", "ROLLBACK", done("x"), dedup.ErrTxEnded},
		{"begun anew by the work", "ROLLBACK; BEGIN", done("x"), dedup.ErrTxEnded},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := claimOf(tc.name)
			tx := begin(t, s, c)
			if _, err := txOf(t, tx).Exec(t.Context(), tc.sql); err != nil {
				t.Fatal(err)
			}
			wantOutcome(t, tx.Commit(t.Context(), tc.done), tc.want)
			if tc.sql != "COMMIT" {
				wantRow(t, s, pool, c, effects, false)
				again := begin(t, s, claimOf(tc.name))
				if err := again.Rollback(t.Context()); err != nil {
					t.Errorf("Rollback = %v", err)
				}
			}
		})
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections were not given back", n)
	}
}

// The work swallows an error; what it was decides.
func TestErrorSwallowed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	const fail = "SELECT pg_temp.fail($1)"
	ways := map[string]func(tx pgx.Tx, code string) error{
		"Exec": func(tx pgx.Tx, code string) error {
			_, err := tx.Exec(t.Context(), fail, code)
			return err
		},
		"QueryRow": func(tx pgx.Tx, code string) error {
			return tx.QueryRow(t.Context(), fail, code).Scan(new(int))
		},
		"Query, read to the end": func(tx pgx.Tx, code string) error {
			rows, _ := tx.Query(t.Context(), fail, code)
			_, err := pgx.CollectRows(rows, pgx.RowTo[int])
			return err
		},
		"Query, closed": func(tx pgx.Tx, code string) error {
			rows, _ := tx.Query(t.Context(), fail, code)
			rows.Close()
			return rows.Err()
		},
		"SendBatch": func(tx pgx.Tx, code string) error {
			b := &pgx.Batch{}
			b.Queue(fail, code)
			return tx.SendBatch(t.Context(), b).Close()
		},
		"SendBatch, Exec": func(tx pgx.Tx, code string) error {
			b := &pgx.Batch{}
			b.Queue(fail, code)
			br := tx.SendBatch(t.Context(), b)
			defer br.Close()
			_, err := br.Exec()
			return err
		},
		"SendBatch, QueryRow": func(tx pgx.Tx, code string) error {
			b := &pgx.Batch{}
			b.Queue(fail, code)
			br := tx.SendBatch(t.Context(), b)
			defer br.Close()
			return br.QueryRow().Scan(new(int))
		},
		"SendBatch, Query": func(tx pgx.Tx, code string) error {
			b := &pgx.Batch{}
			b.Queue(fail, code)
			br := tx.SendBatch(t.Context(), b)
			defer br.Close()
			rows, _ := br.Query()
			rows.Close()
			return rows.Err()
		},
		"CopyFrom": func(tx pgx.Tx, code string) error {
			_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"failing"}, []string{"code"}, pgx.CopyFromRows([][]any{{code}}))
			return err
		},
		"a savepoint": func(tx pgx.Tx, code string) error {
			sp, err := tx.Begin(t.Context())
			if err != nil {
				return err
			}
			_, err = sp.Exec(t.Context(), fail, code)
			return err
		},
	}
	for way, swallow := range ways {
		for code, want := range map[string]error{"40001": dedup.ErrSerialization, "40P01": dedup.ErrSerialization, "23505": dedup.ErrTxAborted} {
			t.Run(way+"/"+code, func(t *testing.T) {
				tx := begin(t, s, claimOf(rand()))
				ptx := txOf(t, tx)
				for _, sql := range []string{
					`CREATE FUNCTION pg_temp.fail(code text) RETURNS int LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'failed' USING ERRCODE = code; END$$`,
					`CREATE TEMP TABLE failing (code text CHECK (pg_temp.fail(code) = 1))`,
				} {
					if _, err := ptx.Exec(t.Context(), sql); err != nil {
						t.Fatal(err)
					}
				}
				var pe *pgconn.PgError
				if err := swallow(ptx, code); !errors.As(err, &pe) || pe.Code != code {
					t.Fatalf("the work got %v, want %s", err, code)
				}
				if _, err := ptx.Exec(t.Context(), "SELECT 1"); err == nil { // 25P02, of no interest
					t.Fatal("the transaction is not aborted")
				}
				err := tx.Commit(t.Context(), done("x"))
				wantOutcome(t, err, want)
				if !errors.As(err, &pe) || pe.Code != code {
					t.Errorf("Commit = %v, which does not say why", err)
				}
			})
		}
	}
}

func TestSerializationInEngine(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			pool := newPool(t)
			s, _ := newStore(t, pool, pgxstore.Options{Isolation: level})
			account := newEffects(t, pool)
			exec(t, pool, "ALTER TABLE "+account+" ADD n int NOT NULL DEFAULT 0")
			exec(t, pool, "INSERT INTO "+account+" VALUES ('balance')")
			e := &dedup.Engine{Store: s, Mode: dedup.Transaction, Retries: 1000}
			const workers, each = 4, 5
			results := make(chan error, workers)
			for w := range workers {
				go func() {
					var err error
					for i := range each {
						k := dedup.Key{Scope: "s", ID: string(rune('a'+w)) + string(rune('0'+i))}
						_, derr := e.Do(t.Context(), dedup.Request{Key: k}, func(ctx context.Context) (dedup.Answer, error) {
							tx := pgxstore.Tx(ctx)
							var n int
							if err := tx.QueryRow(ctx, "SELECT n FROM "+account).Scan(&n); err != nil {
								return dedup.Answer{Response: dedup.Response{Code: 500}}, nil
							}
							tx.Exec(ctx, "UPDATE "+account+" SET n = $1", n+1) //nolint:errcheck // swallowed, as some do
							return dedup.Answer{Response: dedup.Response{Code: 200}}, nil
						})
						err = errors.Join(err, derr)
					}
					results <- err
				}()
			}
			for range workers {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
			if n := count(t, pool, "SELECT n FROM "+account); n != workers*each {
				t.Errorf("%d effects, want %d", n, workers*each)
			}
		})
	}
}
