package sqlitedb_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
)

func claimOf(id string) dedup.Claim {
	return dedup.Claim{
		Key: dedup.Key{Scope: "s", ID: id}, Fingerprint: []byte("f"), Token: dedup.NewToken(),
		Lease: time.Minute, TTL: time.Hour,
	}
}

var done = dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 201, Body: []byte("ok")}, TTL: time.Hour}

func begin(t *testing.T, s dedup.TxStore, c dedup.Claim, want dedup.State) dedup.Tx {
	t.Helper()
	tx, res, err := s.Begin(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if res.State != want || (tx != nil) != (want == dedup.Won || want == dedup.Abandoned) {
		t.Fatalf("Begin = %v, %v, want %v", tx, res.State, want)
	}
	return tx
}

func effect(t *testing.T, tx dedup.Tx, n string) {
	t.Helper()
	if _, err := sqlstore.Tx(tx.Context(t.Context())).Exec(`INSERT INTO effects VALUES (?)`, n); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) count(t *testing.T) (n int) {
	t.Helper()
	if err := f.db.QueryRow(`SELECT count(*) FROM effects`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestCommitTogether(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx := begin(t, f, claimOf("a"), dedup.Won)
	effect(t, tx, "a")
	begin(t, f, claimOf("a"), dedup.InProgress)
	if err := tx.Commit(t.Context(), done); err != nil {
		t.Fatal(err)
	}
	begin(t, f, claimOf("a"), dedup.Completed)
	tx = begin(t, f, claimOf("b"), dedup.Won)
	effect(t, tx, "b")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := f.count(t); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
}

// Replays are answered while a handler holds the write lock.
func TestReplayBesideWriter(t *testing.T) {
	t.Parallel()
	f := open(t, filepath.Join(t.TempDir(), "test.db"), sqlstore.Options{BusyTimeout: time.Hour}, "busy_timeout(3600000)")
	tx := begin(t, f, claimOf("a"), dedup.Won)
	if err := tx.Commit(t.Context(), done); err != nil {
		t.Fatal(err)
	}
	tx = begin(t, f, claimOf("b"), dedup.Won)
	begin(t, f, claimOf("a"), dedup.Completed)
	if res, err := f.Claim(t.Context(), claimOf("a")); err != nil || res.State != dedup.Completed {
		t.Errorf("Claim = %v, %v, want completed", res.State, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestBusy(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	opts := sqlstore.Options{BusyTimeout: time.Millisecond}
	f := open(t, path, opts, "busy_timeout(1)")
	other := open(t, path, opts, "busy_timeout(1)") // stands for another process
	tx := begin(t, f, claimOf("a"), dedup.Won)
	for name, s := range map[string]*fixture{"same store": f, "another process": other} {
		if _, _, err := s.Begin(t.Context(), claimOf("b")); !errors.Is(err, dedup.ErrBusy) {
			t.Errorf("%s: Begin = %v, want ErrBusy", name, err)
		}
		if _, err := s.Claim(t.Context(), claimOf("b")); !errors.Is(err, dedup.ErrBusy) {
			t.Errorf("%s: Claim = %v, want ErrBusy", name, err)
		}
	}
	if _, _, err := other.Begin(t.Context(), claimOf("a")); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Begin of the same key in another process = %v, want ErrBusy", err)
	}
	if err := tx.Commit(t.Context(), done); err != nil {
		t.Fatal(err)
	}
	begin(t, other, claimOf("a"), dedup.Completed)
}

func TestWaitForTurnEndsWithContext(t *testing.T) {
	t.Parallel()
	f := open(t, filepath.Join(t.TempDir(), "test.db"), sqlstore.Options{BusyTimeout: time.Hour})
	tx := begin(t, f, claimOf("a"), dedup.Won)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error)
	go func() {
		_, _, err := f.Begin(ctx, claimOf("b"))
		errs <- err
	}()
	cancel()
	if err := <-errs; !errors.Is(err, context.Canceled) {
		t.Errorf("Begin = %v, want context.Canceled", err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := begin(t, f, claimOf("b"), dedup.Won).Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// What ctx is does not outlive Begin.
func TestContextOfBegin(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	tx, _, err := f.Begin(ctx, claimOf("a"))
	if err != nil {
		t.Fatal(err)
	}
	effect(t, tx, "1")
	cancel()
	effect(t, tx, "2")
	if err := tx.Commit(t.Context(), done); err != nil {
		t.Fatal(err)
	}
	if n := f.count(t); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}
}
