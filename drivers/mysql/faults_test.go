package mysqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
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
	if res.State != want {
		t.Fatalf("Begin is %v, want %v", res.State, want)
	}
	return tx
}

// MySQL resolves a deadlock by rolling one whole transaction back. A handler
// that swallows the error goes on outside of any, and what it then writes must
// not be committed without claim and answer.
func TestDeadlockSwallowed(t *testing.T) {
	for name, pool := range map[string]func(*testing.T) *sql.DB{"Open": open, "plain": plain} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, pool(t), sqlstore.Options{})
			f.exec(t, "INSERT INTO "+f.effectsTable()+" VALUES ('x'), ('y')")
			f.exec(t, "CREATE TABLE "+f.table+"_weight (n INT)")
			t.Cleanup(func() { f.exec(t, "DROP TABLE "+f.table+"_weight") })

			tx := begin(t, f, claimOf("a"), dedup.Won)
			work := sqlstore.Tx(tx.Context(t.Context()))
			other, err := f.db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			defer other.Rollback()
			// The heavier transaction is not chosen as the victim.
			for range 50 {
				if _, err := other.Exec("INSERT INTO " + f.table + "_weight VALUES (1)"); err != nil {
					t.Fatal(err)
				}
			}
			lock := func(tx *sql.Tx, n string) error {
				var s string
				return tx.QueryRow("SELECT n FROM "+f.effectsTable()+" WHERE n = ? FOR UPDATE", n).Scan(&s)
			}
			if err := errors.Join(lock(work, "x"), lock(other, "y")); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			var errWork, errOther error
			wg.Go(func() { errWork = lock(work, "y") })
			wg.Go(func() { errOther = lock(other, "x") })
			wg.Wait()
			if mysqldb.Classify(errWork) != sqlstore.Serialization || errOther != nil {
				t.Fatalf("the work's transaction got %v, the other %v; want a deadlock in the first", errWork, errOther)
			}
			if err := other.Rollback(); err != nil {
				t.Fatal(err)
			}
			if _, err := work.Exec("INSERT INTO " + f.effectsTable() + " VALUES ('after the deadlock')"); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(t.Context(), done); !errors.Is(err, dedup.ErrTxAborted) {
				t.Errorf("Commit = %v, want ErrTxAborted", err)
			}
			if got := f.effects(t); len(got) != 2 {
				t.Errorf("effects are %q: what was written after the deadlock was committed", got)
			}
			if err := begin(t, f, claimOf("a"), dedup.Won).Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Connections go back to the pool as they came.
func TestConnectionRestored(t *testing.T) {
	db := open(t)
	f := newFixture(t, db, sqlstore.Options{})
	// What follows is all on one connection, Begin included.
	db.SetMaxOpenConns(1)
	ends := map[string]func(dedup.Tx) error{
		"commit":   func(tx dedup.Tx) error { return tx.Commit(t.Context(), done) },
		"rollback": func(tx dedup.Tx) error { return tx.Rollback(t.Context()) },
		"ended": func(tx dedup.Tx) error {
			err := sqlstore.Tx(tx.Context(t.Context())).Rollback()
			if cerr := tx.Commit(t.Context(), done); !errors.Is(cerr, dedup.ErrTxEnded) {
				return errors.Join(err, cerr, errors.New("want ErrTxEnded"))
			}
			return err
		},
	}
	for name, end := range ends {
		if err := end(begin(t, f, claimOf(name), dedup.Won)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var auto, held int
		if err := db.QueryRow("SELECT @@autocommit, (SELECT @idempotency_lock <=> 1)").Scan(&auto, &held); err != nil {
			t.Fatal(err)
		}
		if auto != 1 {
			t.Errorf("%s: autocommit is off on a connection of the pool", name)
		}
	}
	// Another session can have the locks.
	second := newStore(t, open(t), f.table)
	for name, want := range map[string]dedup.State{"commit": dedup.Completed, "rollback": dedup.Won, "ended": dedup.Won} {
		if tx := begin(t, second, claimOf(name), want); tx != nil {
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

func newStore(t *testing.T, db *sql.DB, table string) *sqlstore.Store {
	t.Helper()
	s, err := mysqldb.NewStore(db, sqlstore.Options{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Only a duplicate key is a duplicate.
func TestDataErrorIsNoDuplicate(t *testing.T) {
	f := newFixture(t, open(t), sqlstore.Options{})
	f.exec(t, "ALTER TABLE "+f.table+" ADD CONSTRAINT no_f CHECK (fingerprint <> 'f')")
	if res, err := f.Claim(t.Context(), claimOf("a")); err == nil {
		t.Errorf("Claim is %v, want an error: the row was refused", res.State)
	}
	if tx, res, err := f.Begin(t.Context(), claimOf("a")); err == nil || tx != nil {
		t.Errorf("Begin is %v, want an error: the row was refused", res.State)
	}
}

// A session's time zone must not matter.
func TestTimeZones(t *testing.T) {
	db := plain(t)
	f := newFixture(t, db, sqlstore.Options{})
	east, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := east.ExecContext(t.Context(), "SET time_zone = '+13:00'"); err != nil {
		t.Fatal(err)
	}
	east.Close()
	db.SetMaxOpenConns(1) // the connection just closed is the idle one
	db.SetMaxIdleConns(1)
	c := claimOf("a")
	if _, err := f.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	rec, err := newStore(t, open(t), f.table).Get(t.Context(), c.Key)
	if err != nil || rec.LeaseLeft <= 0 || rec.LeaseLeft > time.Minute || time.Since(rec.CreatedAt).Abs() > time.Hour {
		t.Errorf("Get = %+v, %v, want a lease of a minute, from now", rec, err)
	}
}

func TestLockTimeoutIsBusy(t *testing.T) {
	db := open(t)
	f := newFixture(t, db, sqlstore.Options{})
	c := claimOf("a")
	if _, err := f.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	holder, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback()
	if _, err := holder.Exec("UPDATE " + f.table + " SET attempt = 7"); err != nil {
		t.Fatal(err)
	}
	impatient, err := mysqldb.Open(dsn() + "?innodb_lock_wait_timeout=0")
	if err != nil {
		t.Fatal(err)
	}
	defer impatient.Close()
	if err := newStore(t, impatient, f.table).Renew(t.Context(), c.Key, c.Token, time.Minute); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Renew = %v, want ErrBusy", err)
	}
}

func TestMigrate(t *testing.T) {
	db := open(t)
	f := newFixture(t, db, sqlstore.Options{})
	f.exec(t, "DROP TABLE "+f.table)
	var wg sync.WaitGroup
	for range 8 { // nodes that start at once
		wg.Go(func() {
			s, err := mysqldb.NewStore(db, sqlstore.Options{Table: f.table})
			if err == nil {
				err = s.Migrate(context.WithoutCancel(t.Context()))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, err := f.Claim(t.Context(), claimOf("a")); err != nil {
		t.Error(err)
	}
}

func TestOpenSettings(t *testing.T) {
	db := open(t)
	var level string
	err := db.QueryRow("SELECT @@tx_isolation").Scan(&level) // MariaDB
	if err != nil {
		err = db.QueryRow("SELECT @@transaction_isolation").Scan(&level)
	}
	if err != nil || level != "READ-COMMITTED" {
		t.Errorf("isolation is %q, %v", level, err)
	}
	if _, err := db.Exec("SELECT 1; SELECT 2"); err == nil {
		t.Error("two statements in one were accepted")
	}
	if _, err := mysqldb.Open("no dsn"); err == nil {
		t.Error("Open accepted nonsense")
	}
}
