package mysqldb_test

import (
	"context"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
)

// InnoDB shows a commit to others before it is on disk. Whoever hands on an
// outcome that is young must have committed something after it; here, by a
// microsecond less in the row.
func TestOutcomeOutlastsCrash(t *testing.T) {
	t.Parallel()
	f := newFixture(t, open(t), sqlstore.Options{})
	var synced bool
	if err := f.db.QueryRow(`SELECT @@log_bin = 1 AND @@sync_binlog = 1`).Scan(&synced); err != nil {
		t.Fatal(err)
	}
	c := claimOf("a")
	if _, err := f.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := f.Complete(t.Context(), c.Key, c.Token, done); err != nil {
		t.Fatal(err)
	}
	stamp := func() (us int64) {
		t.Helper()
		q := "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', lease_until) FROM " + f.table + " WHERE id_key = ?"
		if err := f.db.QueryRow(q, []byte(c.Key.ID)).Scan(&us); err != nil {
			t.Fatal(err)
		}
		return us
	}
	reads := map[string]func(context.Context, dedup.Claim) error{
		"Claim": func(ctx context.Context, again dedup.Claim) error {
			res, err := f.Claim(ctx, again)
			if err == nil && res.State != dedup.Completed {
				t.Errorf("Claim is %v", res.State)
			}
			return err
		},
		"Begin": func(ctx context.Context, again dedup.Claim) error {
			_, res, err := f.Begin(ctx, again)
			if err == nil && res.State != dedup.Completed {
				t.Errorf("Begin is %v", res.State)
			}
			return err
		},
		"Get": func(ctx context.Context, again dedup.Claim) error {
			_, err := f.Get(ctx, again.Key)
			return err
		},
	}
	for _, young := range []bool{true, false} {
		if !young {
			f.exec(t, "UPDATE "+f.table+" SET lease_until = UTC_TIMESTAMP(6) - INTERVAL 2 MINUTE WHERE id_key = ?", []byte(c.Key.ID))
		}
		for name, read := range reads {
			want := stamp()
			if young && !synced {
				want--
			}
			again := c
			again.Token = dedup.NewToken()
			if err := read(t.Context(), again); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if got := stamp(); got != want {
				t.Errorf("%s, young %t: the row's time is %d, want %d", name, young, got, want)
			}
		}
	}
}
