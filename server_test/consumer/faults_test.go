package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	pgxinbox "github.com/effectonce/idempotency/drivers/pgx/inbox"
)

var errHandler = errors.New("the handler failed")

// over runs a test on each kind of store.
func over(t *testing.T, kinds []string, test func(t *testing.T, f *fixture)) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(t, newFixture(t, kind))
		})
	}
}

func (f *fixture) wantEffects(t *testing.T, want map[string]int) {
	t.Helper()
	got := f.effects(t)
	for id, n := range want {
		if got[id] != n {
			t.Errorf("event %q had %d effects, want %d", id, got[id], n)
		}
	}
	for id, n := range got {
		if _, ok := want[id]; !ok {
			t.Errorf("event %q had %d effects, want none", id, n)
		}
	}
}

// A handler that failed, or panicked, has marked nothing: the redelivery runs.
func TestFailedIsNotMarked(t *testing.T) {
	over(t, allKinds, func(t *testing.T, f *fixture) {
		c := f.consumer("g")
		// Where there is a transaction, what was written is taken back.
		fail := func(ctx context.Context) error {
			if f.loaded != nil {
				must(t, f.write(ctx, "e1"))
			}
			return errHandler
		}
		r := c.Handle(t.Context(), "e1", fail)
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, errHandler) {
			t.Errorf("err %v", r.Err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			c.Handle(t.Context(), "e1", func(ctx context.Context) error {
				_ = fail(ctx)
				panic("down")
			})
		}()
		f.wantEffects(t, nil)
		wantStatus(t, c.Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}

// A finished duplicate is done, so that it is acknowledged, not put back for
// ever.
func TestFinishedDuplicateIsDone(t *testing.T) {
	over(t, allKinds, func(t *testing.T, f *fixture) {
		for i := range 4 {
			// Each time as another process would.
			r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") })
			wantStatus(t, r, consumer.Done)
			if r.Duplicate != (i > 0) {
				t.Errorf("delivery %d: %+v", i, r)
			}
		}
		wantStatus(t, f.consumer("other").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1-other") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1, "e1-other": 1})
	})
}

// Of copies at the same time one runs, and the others are told so at once.
func TestConcurrentCopies(t *testing.T) {
	over(t, allKinds, func(t *testing.T, f *fixture) {
		const copies = 6
		// SQLite writes one transaction at a time: there the others wait for
		// the first one's end.
		waits := f.Kind == "inbox/sqlite"
		var others sync.WaitGroup
		started := make(chan struct{})
		results := make([]consumer.Result, copies)
		for i := range copies {
			others.Go(func() {
				<-started
				results[i] = f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") })
			})
		}
		r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
			close(started)
			if !waits {
				others.Wait()
			}
			return f.write(ctx, "e1")
		})
		wantStatus(t, r, consumer.Done)
		others.Wait()
		for _, r := range results {
			if waits {
				wantStatus(t, r, consumer.Done)
				continue
			}
			wantStatus(t, r, consumer.Busy)
			if !errors.Is(r.Err, consumer.ErrBusy) || r.RetryAfter <= 0 {
				t.Errorf("busy: %+v", r)
			}
		}
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}

// Ids are compared byte for byte: a collation, a trailing space or a length
// must not take two events for one.
func TestIDsAreExact(t *testing.T) {
	over(t, allKinds, func(t *testing.T, f *fixture) {
		long := strings.Repeat("x", 300)
		ids := []string{"a", "A", "a ", " a", "ä", "a\u0308", "ａ", "0", "00", "a\x00", "\xff", "\xfe", long, long + "y", "🙂", "'; --", `\`}
		for _, id := range ids {
			r := f.consumer("g").Handle(t.Context(), id, func(context.Context) error { return nil })
			if r.Status != consumer.Done || r.Duplicate {
				t.Errorf("event %q: %+v", id, r)
			}
			r = f.consumer("g").Handle(t.Context(), id, func(context.Context) error { return errHandler })
			if r.Status != consumer.Done || !r.Duplicate {
				t.Errorf("event %q again: %+v", id, r)
			}
		}
		for _, group := range []string{"G", "g ", ""} {
			if r := f.consumer(group).Handle(t.Context(), "a", func(context.Context) error { return nil }); r.Status != consumer.Done || r.Duplicate {
				t.Errorf("group %q: %+v", group, r)
			}
		}
	})
}

// Each position of a batch has its own result: nothing is acknowledged that was
// not handed out, and a failure in the middle takes nothing else along.
func TestBatchIsPositional(t *testing.T) {
	over(t, allKinds, func(t *testing.T, f *fixture) {
		c := f.consumer("g")
		wantStatus(t, c.Handle(t.Context(), "old", func(context.Context) error { return nil }), consumer.Done)
		ids := []string{"a", "old", "bad", "a", "", "b", "bad", "c"}
		var ran []int
		run := func() []consumer.Result {
			return consumer.HandleBatch(t.Context(), c, ids, func(ctx context.Context, i int) error {
				ran = append(ran, i)
				if ids[i] == "bad" {
					if f.loaded != nil {
						must(t, f.write(ctx, "bad"))
						_ = f.exec(ctx, `SELECT * FROM there_is_no_such_table`)
					}
					return errHandler
				}
				return f.write(ctx, ids[i])
			})
		}
		want := "done dup failed dup-of-done noid done failed done"
		describe := func(rs []consumer.Result) string {
			var out []string
			for i, r := range rs {
				s := r.Status.String()
				switch {
				case errors.Is(r.Err, consumer.ErrNoID):
					s = "noid"
				case r.Status == consumer.Done && r.Duplicate && ids[i] == "a":
					s = "dup-of-done"
				case r.Status == consumer.Done && r.Duplicate:
					s = "dup"
				}
				out = append(out, s)
			}
			return strings.Join(out, " ")
		}
		if got := describe(run()); got != want {
			t.Errorf("results %s, want %s", got, want)
		}
		if fmt.Sprint(ran) != "[0 2 5 7]" {
			t.Errorf("ran %v", ran)
		}
		f.wantEffects(t, map[string]int{"a": 1, "b": 1, "c": 1})

		// The whole batch comes again: only what failed runs.
		ids[2], ids[6] = "bad", "good"
		ran = nil
		for i, r := range run() {
			switch ids[i] {
			case "":
			case "bad":
				wantStatus(t, r, consumer.Failed)
			default:
				wantStatus(t, r, consumer.Done)
			}
		}
		f.wantEffects(t, map[string]int{"a": 1, "b": 1, "c": 1, "good": 1})
		if fmt.Sprint(ran) != "[2 6]" {
			t.Errorf("the second time ran %v", ran)
		}
	})
}

// While one event of a batch is being handled elsewhere, that one is busy and
// the others are handled.
func TestBatchWithBusyEvent(t *testing.T) {
	over(t, []string{"inbox/postgres", "inbox/mysql", "lease/memory"}, func(t *testing.T, f *fixture) {
		r := f.consumer("g").Handle(t.Context(), "busy", func(ctx context.Context) error {
			ids := []string{"a", "busy", "b", "busy"}
			rs := consumer.HandleBatch(t.Context(), f.consumer("g"), ids, func(ctx context.Context, i int) error {
				return f.write(ctx, ids[i])
			})
			for i, want := range []consumer.Status{consumer.Done, consumer.Busy, consumer.Done, consumer.Busy} {
				wantStatus(t, rs[i], want)
			}
			return f.write(ctx, "busy")
		})
		wantStatus(t, r, consumer.Done)
		f.wantEffects(t, map[string]int{"a": 1, "b": 1, "busy": 1})
	})
}

// A batch of more than one transaction's worth.
func TestLargeBatch(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		ids := make([]string, 600)
		for i := range ids {
			ids[i] = fmt.Sprint(i)
		}
		for round := range 2 {
			rs := consumer.HandleBatch(t.Context(), f.consumer("g"), ids, func(ctx context.Context, i int) error {
				return f.write(ctx, ids[i])
			})
			for i, r := range rs {
				if r.Status != consumer.Done || r.Duplicate != (round == 1) {
					t.Fatalf("round %d, event %d: %+v", round, i, r)
				}
			}
		}
		if n := len(f.effects(t)); n != len(ids) {
			t.Errorf("%d effects, want %d", n, len(ids))
		}
	})
}

// Where the transaction can't be committed, none of its events is done, their
// second copies included.
func TestBatchThatIsNotCommitted(t *testing.T) {
	over(t, []string{"inbox/postgres", "inbox/mysql", "inbox/sqlite"}, func(t *testing.T, f *fixture) {
		wantStatus(t, f.consumer("g").Handle(t.Context(), "old", func(context.Context) error { return nil }), consumer.Done)
		ids := []string{"a", "a", "old", "ends", "never"}
		rs := consumer.HandleBatch(t.Context(), f.consumer("g"), ids, func(ctx context.Context, i int) error {
			if ids[i] == "ends" {
				return consumer.Tx(ctx).Rollback() // which it must not do
			}
			return f.write(ctx, ids[i])
		})
		for i, want := range []consumer.Status{consumer.Failed, consumer.Failed, consumer.Done, consumer.Failed, consumer.Busy} {
			wantStatus(t, rs[i], want)
		}
		if !errors.Is(rs[0].Err, dedup.ErrTxEnded) {
			t.Errorf("err %v", rs[0].Err)
		}
		f.wantEffects(t, nil)
	})
}

// A handler that ends its transaction itself is told from one that did its work.
func TestHandlerEndsTransaction(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
			if f.Kind != "inbox/pgx" {
				return consumer.Tx(ctx).Rollback()
			}
			tx := pgxinbox.Tx(ctx)
			for _, err := range []error{tx.Rollback(ctx), tx.Commit(ctx)} {
				if !errors.Is(err, pgxinbox.ErrNotYours) {
					t.Errorf("ended: %v", err)
				}
			}
			inner, err := tx.Begin(ctx) // a savepoint is the handler's
			must(t, err)
			must(t, inner.Rollback(ctx))
			return nil
		})
		if f.Kind == "inbox/pgx" {
			wantStatus(t, r, consumer.Done)
			return
		}
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, dedup.ErrTxEnded) {
			t.Errorf("err %v", r.Err)
		}
	})
}

// What the database rolled back is not done, though the handler took no notice.
func TestSwallowedDatabaseError(t *testing.T) {
	over(t, []string{"inbox/postgres", "inbox/pgx", "inbox/mysql"}, func(t *testing.T, f *fixture) {
		r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
			must(t, f.write(ctx, "e1"))
			if f.Kind == "inbox/mysql" {
				// What the server does after a deadlock; the statements after
				// it then commit one by one.
				return f.exec(ctx, `ROLLBACK`)
			}
			if f.exec(ctx, `SELECT 1/0`) == nil {
				t.Error("no error to swallow")
			}
			return nil
		})
		wantStatus(t, r, consumer.Failed)
		f.wantEffects(t, nil)
		wantStatus(t, f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}

// The connection dies in the middle of the handler: nothing is marked.
func TestConnectionLost(t *testing.T) {
	over(t, []string{"inbox/postgres", "inbox/pgx", "inbox/mysql"}, func(t *testing.T, f *fixture) {
		suicide := `SELECT pg_terminate_backend(pg_backend_pid())`
		if f.dialect == consumer.MySQL {
			suicide = `KILL CONNECTION_ID()`
		}
		r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
			must(t, f.write(ctx, "e1"))
			_ = f.exec(ctx, suicide)
			return nil // and takes no notice
		})
		wantStatus(t, r, consumer.Failed)
		f.wantEffects(t, nil)
		wantStatus(t, f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
		f.wantEffects(t, map[string]int{"e1": 1})
	})
}

// A caller who goes away takes the transaction with him.
func TestCallerGoesAway(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		ctx, cancel := context.WithCancel(t.Context())
		r := f.consumer("g").Handle(ctx, "e1", func(ctx context.Context) error {
			must(t, f.write(ctx, "e1"))
			cancel()
			return nil
		})
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, context.Canceled) {
			t.Errorf("err %v", r.Err)
		}
		f.wantEffects(t, nil)
		r = f.consumer("g").Handle(ctx, "e1", func(context.Context) error {
			t.Error("ran without a transaction")
			return nil
		})
		wantStatus(t, r, consumer.Busy)
		// No lock of the first try may be left.
		wantStatus(t, f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error { return f.write(ctx, "e1") }), consumer.Done)
	})
}

// Those who own their transactions mark in them.
func TestMarkInOwnTransaction(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		mark := func(commit bool) (bool, error) {
			if f.Kind == "inbox/pgx" {
				return markPgx(t, f, commit)
			}
			tx, err := f.db.BeginTx(t.Context(), nil)
			must(t, err)
			defer tx.Rollback()
			first, err := f.consumer("g").(*consumer.Inbox).Mark(t.Context(), tx, "e1")
			if commit {
				must(t, tx.Commit())
			}
			return first, err
		}
		for i, step := range []struct{ commit, first bool }{{false, true}, {true, true}, {true, false}} {
			if first, err := mark(step.commit); first != step.first || err != nil {
				t.Errorf("step %d: %v, %v", i, first, err)
			}
		}
	})
}

func markPgx(t *testing.T, f *fixture, commit bool) (first bool, err error) {
	t.Helper()
	tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{})
	must(t, err)
	defer tx.Rollback(t.Context())
	first, err = f.consumer("g").(*pgxinbox.Inbox).Mark(t.Context(), tx, "e1")
	if commit {
		must(t, tx.Commit(t.Context()))
	}
	return first, err
}

// database/sql and pgx on one table: each sees the other's marks, and those
// that are not committed yet.
func TestInboxesShareATable(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "inbox/pgx")
	std := &consumer.Inbox{DB: f.db, Group: "g", Table: f.table}
	r := f.consumer("g").Handle(t.Context(), "e1", func(ctx context.Context) error {
		wantStatus(t, std.Handle(ctx, "e1", nil), consumer.Busy)
		tx, err := f.db.BeginTx(ctx, nil)
		must(t, err)
		defer tx.Rollback()
		if _, err := std.Mark(ctx, tx, "e1"); !errors.Is(err, consumer.ErrBusy) {
			t.Errorf("Mark: %v", err)
		}
		return nil
	})
	wantStatus(t, r, consumer.Done)
	if r := std.Handle(t.Context(), "e1", nil); r.Status != consumer.Done || !r.Duplicate {
		t.Errorf("%+v", r)
	}
	r = std.Handle(t.Context(), "e2", func(ctx context.Context) error {
		wantStatus(t, f.consumer("g").Handle(ctx, "e2", nil), consumer.Busy)
		return nil
	})
	wantStatus(t, r, consumer.Done)
	if r := f.consumer("g").Handle(t.Context(), "e2", nil); r.Status != consumer.Done || !r.Duplicate {
		t.Errorf("%+v", r)
	}
}

// An unreachable database says nothing against the event.
func TestUnreachableIsBusy(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("pgx", "postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	must(t, err)
	defer db.Close()
	in := &consumer.Inbox{DB: db}
	r := in.Handle(t.Context(), "e1", func(context.Context) error {
		t.Error("ran without a transaction")
		return nil
	})
	wantStatus(t, r, consumer.Busy)
	if r.Err == nil || r.RetryAfter <= 0 {
		t.Errorf("%+v", r)
	}
	for _, r := range consumer.HandleBatch(t.Context(), in, []string{"a", "b"}, nil) {
		wantStatus(t, r, consumer.Busy)
	}
}

func TestInboxConfig(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("pgx", postgresURL())
	must(t, err)
	defer db.Close()
	for name, c := range map[string]consumer.Consumer{
		"no db":              &consumer.Inbox{},
		"dialect":            &consumer.Inbox{DB: db, Dialect: 9},
		"table":              &consumer.Inbox{DB: db, Table: "events; DROP TABLE x"},
		"long group":         &consumer.Inbox{DB: db, Group: strings.Repeat("g", 256)},
		"negative retention": &consumer.Inbox{DB: db, Retention: -1},
		"pgx: no pool":       &pgxinbox.Inbox{},
		"pgx: table":         &pgxinbox.Inbox{Table: "a.b.c"},
		"pgx: long group":    &pgxinbox.Inbox{Group: strings.Repeat("g", 256)},
	} {
		r := c.Handle(t.Context(), "e1", nil)
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, r.Err)
		}
	}
	wantStatus(t, (&pgxinbox.Inbox{}).Handle(t.Context(), "", nil), consumer.Failed)
}
