package sqlitedb_test

import (
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// SQLite rolls the whole transaction back when a statement that writes is
// interrupted, the disk is full, or the statement says OR ROLLBACK. A handler
// that goes on regardless is outside of any transaction then, and what it writes
// must not be committed without claim and answer.
func TestSilentRollback(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx := begin(t, f, claimOf("a"), dedup.Won)
	effect(t, tx, "before")
	work := sqlstore.Tx(tx.Context(t.Context()))
	// The same as an interrupt or a full disk does, at a known moment.
	if _, err := work.Exec(`INSERT OR ROLLBACK INTO effects VALUES ('before')`); sqlitedb.Classify(err) != sqlstore.Conflict {
		t.Fatalf("got %v, want a unique violation", err)
	}
	if _, err := work.Exec(`INSERT INTO effects VALUES ('after')`); err == nil {
		t.Error("a write after the transaction was rolled back has succeeded, by itself")
	}
	if err := tx.Commit(t.Context(), done); !errors.Is(err, dedup.ErrTxAborted) {
		t.Errorf("Commit = %v, want ErrTxAborted", err)
	}
	if got := f.effects(t); len(got) != 0 {
		t.Errorf("effects are %q: what was written after the rollback was committed", got)
	}
	// The connection serves others as before.
	for range 20 {
		tx := begin(t, f, claimOf(dedup.NewToken().String()), dedup.Won)
		effect(t, tx, dedup.NewToken().String())
		if err := tx.Commit(t.Context(), done); err != nil {
			t.Fatal(err)
		}
		f.exec(t, `INSERT INTO effects VALUES (?)`, dedup.NewToken().String())
	}
}

// A work can't commit without claim and answer, nor be told apart from one that
// has done nothing.
func TestWorkEndsTransaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ends := map[string]func(*sql.Tx) error{
		"Commit":   (*sql.Tx).Commit,
		"COMMIT":   func(tx *sql.Tx) error { _, err := tx.Exec(`COMMIT`); return err },
		"Rollback": (*sql.Tx).Rollback,
		"ROLLBACK": func(tx *sql.Tx) error { _, err := tx.Exec(`ROLLBACK`); return err },
	}
	for name, end := range ends {
		for _, commit := range []bool{true, false} {
			tx := begin(t, f, claimOf(name), dedup.Won)
			effect(t, tx, name)
			err := end(sqlstore.Tx(tx.Context(t.Context())))
			if refused := err != nil; refused != strings.EqualFold(name, "commit") {
				t.Errorf("%s by the work: %v", name, err)
			}
			if commit {
				if err := tx.Commit(t.Context(), done); !errors.Is(err, dedup.ErrTxAborted) {
					t.Errorf("Commit after %s = %v, want ErrTxAborted", name, err)
				}
			} else if err := tx.Rollback(t.Context()); err != nil {
				t.Errorf("Rollback after %s = %v", name, err)
			}
			if got := f.effects(t); len(got) != 0 {
				t.Fatalf("effects after %s are %q", name, got)
			}
		}
	}
}
