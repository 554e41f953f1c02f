package pgxstore_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/idempotency/dedup"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

func TestNoTransaction(t *testing.T) {
	t.Parallel()
	if tx := pgxstore.Tx(t.Context()); tx != nil {
		t.Errorf("Tx = %v outside of transaction mode, want nil", tx)
	}
	if _, ok := pgxstore.LookupTx(t.Context()); ok {
		t.Error("LookupTx found a transaction outside of transaction mode")
	}
}

func TestWorkMayNotEnd(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	c := claimOf("c")
	tx := begin(t, s, c)
	ptx := txOf(t, tx)
	effect(t, tx, effects, "c")
	if err := ptx.Commit(t.Context()); !errors.Is(err, pgxstore.ErrNotYours) {
		t.Errorf("Commit = %v, want ErrNotYours", err)
	}
	if err := ptx.Rollback(t.Context()); !errors.Is(err, pgxstore.ErrNotYours) {
		t.Errorf("Rollback = %v, want ErrNotYours", err)
	}
	wantOutcome(t, tx.Commit(t.Context(), done("x")), nil)
	wantRow(t, s, pool, c, effects, true)
}

func TestSavepoints(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	tx := begin(t, s, claimOf("c"))
	insert := func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(t.Context(), "INSERT INTO "+effects+" VALUES ($1)", name)
		return err
	}
	sub := func(parent pgx.Tx) pgx.Tx {
		t.Helper()
		sp, err := parent.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return sp
	}
	noErr := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	ptx := txOf(t, tx)
	kept := sub(ptx)
	noErr(insert(kept, "kept"))
	noErr(kept.Commit(t.Context()))
	if err := kept.Commit(t.Context()); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("a second Commit of a savepoint = %v, want ErrTxClosed", err)
	}
	if err := insert(kept, "x"); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("Exec after the savepoint = %v, want ErrTxClosed", err)
	}

	// A failure in a savepoint that is rolled back leaves the rest as it was.
	dropped := sub(ptx)
	noErr(insert(dropped, "dropped"))
	inner := sub(dropped)
	if insert(inner, "kept") == nil {
		t.Error("the unique violation was not refused")
	}
	noErr(inner.Rollback(t.Context()))
	noErr(insert(dropped, "dropped too"))
	noErr(dropped.Rollback(t.Context()))
	noErr(insert(ptx, "last"))
	noErr(pgx.BeginFunc(t.Context(), ptx, func(tx pgx.Tx) error { return insert(tx, "by BeginFunc") }))

	wantOutcome(t, tx.Commit(t.Context(), done("x")), nil)
	rows, err := pool.Query(t.Context(), "SELECT name FROM "+effects+" ORDER BY name")
	noErr(err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	noErr(err)
	if len(names) != 3 || names[0] != "by BeginFunc" || names[1] != "kept" || names[2] != "last" {
		t.Errorf("effects are %q", names)
	}
}

// A goroutine that outlives the work must not get at a connection that somebody
// else has by now.
func TestClosedAfterTheWork(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	ends := map[string]func(dedup.Tx) error{
		"Commit":   func(tx dedup.Tx) error { return tx.Commit(t.Context(), done("x")) },
		"Rollback": func(tx dedup.Tx) error { return tx.Rollback(t.Context()) },
	}
	for name, end := range ends {
		tx := begin(t, s, claimOf(name))
		ptx := txOf(t, tx)
		sp, err := ptx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := end(tx); err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		uses := map[string]func(pgx.Tx) error{
			"Exec":     func(tx pgx.Tx) error { _, err := tx.Exec(ctx, "SELECT 1"); return err },
			"Query":    func(tx pgx.Tx) error { _, err := tx.Query(ctx, "SELECT 1"); return err },
			"QueryRow": func(tx pgx.Tx) error { return tx.QueryRow(ctx, "SELECT 1").Scan(new(int)) },
			"Prepare":  func(tx pgx.Tx) error { _, err := tx.Prepare(ctx, "p", "SELECT 1"); return err },
			"Begin":    func(tx pgx.Tx) error { _, err := tx.Begin(ctx); return err },
			"Commit":   func(tx pgx.Tx) error { return tx.Commit(ctx) },
			"Rollback": func(tx pgx.Tx) error { return tx.Rollback(ctx) },
			"CopyFrom": func(tx pgx.Tx) error {
				_, err := tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"c"}, pgx.CopyFromRows(nil))
				return err
			},
			"SendBatch": func(tx pgx.Tx) error {
				b := &pgx.Batch{}
				b.Queue("SELECT 1")
				return tx.SendBatch(ctx, b).Close()
			},
		}
		for use, f := range uses {
			for kind, tx := range map[string]pgx.Tx{"transaction": ptx, "savepoint": sp} {
				if err := f(tx); !errors.Is(err, pgx.ErrTxClosed) {
					t.Errorf("%s of the %s after %s = %v, want ErrTxClosed", use, kind, name, err)
				}
			}
		}
		rows, _ := ptx.Query(ctx, "SELECT 1")
		if rows.Next() || !errors.Is(rows.Err(), pgx.ErrTxClosed) {
			t.Errorf("Rows after %s: %v, want none and ErrTxClosed", name, rows.Err())
		}
		for again, end := range ends {
			if err := end(tx); !errors.Is(err, dedup.ErrTxEnded) {
				t.Errorf("%s after %s = %v, want ErrTxEnded", again, name, err)
			}
		}
	}
}

func TestRowsLeftOpen(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	c := claimOf("open")
	for range 2 {
		tx := begin(t, s, c)
		effect(t, tx, effects, "open")
		if _, err := txOf(t, tx).Query(t.Context(), "SELECT generate_series(1, 1000)"); err != nil {
			t.Fatal(err)
		}
		wantOutcome(t, tx.Commit(t.Context(), done("x")), dedup.ErrTxAborted)
		for { // the server has to see that the connection is gone
			tx, res, err := s.Begin(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if res.State == dedup.Won {
				if err := tx.Rollback(t.Context()); err != nil {
					t.Error(err)
				}
				break
			}
		}
		wantRow(t, s, pool, c, effects, false)
	}
}

func TestLargeObjects(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	tx := begin(t, s, claimOf("lo"))
	ptx := txOf(t, tx)
	los := ptx.LargeObjects()
	oid, err := los.Create(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := count(t, pool, "SELECT count(*) FROM pg_largeobject_metadata WHERE oid = $1", oid); n != 0 {
		t.Error("the large object is there although all was rolled back")
	}
}

func TestContextKeepsTransactionOfEngine(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, _ := newStore(t, pool, pgxstore.Options{})
	effects := newEffects(t, pool)
	e := &dedup.Engine{Store: s, Mode: dedup.Transaction}
	runs := 0
	do := func() dedup.Outcome {
		t.Helper()
		out, err := e.Do(t.Context(), dedup.Request{Key: dedup.Key{Scope: "s", ID: "k"}}, func(ctx context.Context) (dedup.Answer, error) {
			runs++
			_, err := pgxstore.Tx(ctx).Exec(ctx, "INSERT INTO "+effects+" VALUES ('once')")
			return dedup.Answer{Response: dedup.Response{Code: 201, Body: []byte("created")}}, err
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if out := do(); out.State != dedup.Won || !out.Stored {
		t.Errorf("the first is %+v", out)
	}
	if out := do(); out.State != dedup.Completed || string(out.Response.Body) != "created" {
		t.Errorf("the second is %+v", out)
	}
	if n := count(t, pool, "SELECT count(*) FROM "+effects); n != 1 || runs != 1 {
		t.Errorf("%d effects by %d runs, want one", n, runs)
	}
}
