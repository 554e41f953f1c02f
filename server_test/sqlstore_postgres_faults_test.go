package server_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
)

func sqlstoreClaim(id string) dedup.Claim {
	return dedup.Claim{
		Key: dedup.Key{Scope: "s", ID: id}, Fingerprint: []byte("f"), Token: dedup.NewToken(),
		Lease: time.Minute, TTL: time.Hour,
	}
}

func sqlstoreDone() dedup.Completion {
	return dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 201, Body: []byte("ok")}, TTL: time.Hour}
}

func sqlstoreBegin(t *testing.T, s dedup.TxStore, c dedup.Claim, want dedup.State) dedup.Tx {
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

// Others use the server too, so a quiet moment is waited for: a replay that
// wrote would move the log each time.
func TestSQLStorePostgresReplayWritesNothing(t *testing.T) {
	f := newPgStore(t, sqlstorePgOpen(t), sqlstore.Options{})
	c := sqlstoreClaim("a")
	if _, err := f.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := f.Complete(t.Context(), c.Key, c.Token, sqlstoreDone()); err != nil {
		t.Fatal(err)
	}
	position := func() (s string) {
		if err := f.db.QueryRow(`SELECT pg_current_wal_insert_lsn()`).Scan(&s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	replays := map[string]func() (dedup.State, error){
		"Claim": func() (dedup.State, error) {
			res, err := f.Claim(t.Context(), sqlstoreClaim("a"))
			return res.State, err
		},
		"Begin": func() (dedup.State, error) {
			_, res, err := f.Begin(t.Context(), sqlstoreClaim("a"))
			return res.State, err
		},
	}
	for name, replay := range replays {
		quiet := false
		for n := 0; n < 5000 && !quiet; n++ {
			before := position()
			if state, err := replay(); err != nil || state != dedup.Completed {
				t.Fatalf("%s is %v, %v, want completed", name, state, err)
			}
			quiet = position() == before
		}
		if !quiet {
			t.Errorf("%s of a completed key has moved the write-ahead log each time", name)
		}
	}
}

// lossyConnector makes COMMIT fail: after it was done, or instead of it.
type lossyConnector struct {
	driver.Connector
	lose *atomic.Value // "", "after" or "before"
}

type lossyConn struct {
	*stdlib.Conn
	lose *atomic.Value
}

type lossyTx struct {
	driver.Tx
	c lossyConn
}

var errCut = errors.New("connection was cut")

func (c lossyConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return lossyConn{conn.(*stdlib.Conn), c.lose}, nil
}

func (c lossyConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.Conn.BeginTx(ctx, opts)
	return lossyTx{tx, c}, err
}

func (t lossyTx) Commit() error {
	switch t.c.lose.Load() {
	case "after":
		if err := t.Tx.Commit(); err != nil {
			return err
		}
		_ = t.c.Conn.Close()
		return errCut
	case "before":
		_ = t.c.Conn.Close()
		return errCut
	}
	return t.Tx.Commit()
}

func TestSQLStorePostgresCommitLost(t *testing.T) {
	sqlstorePgOpen(t)
	var lose atomic.Value
	lose.Store("")
	cfg, err := pgx.ParseConfig(sqlstorePgURL())
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(lossyConnector{stdlib.GetConnector(*cfg), &lose})
	t.Cleanup(func() { db.Close() })
	f := newPgStore(t, db, sqlstore.Options{})

	for when, want := range map[string]struct {
		err     error
		state   dedup.State
		effects int
	}{
		"after":  {nil, dedup.Completed, 1},
		"before": {dedup.ErrNotCommitted, dedup.Won, 0},
	} {
		tx := sqlstoreBegin(t, f, sqlstoreClaim(when), dedup.Won)
		if _, err := sqlstore.Tx(tx.Context(t.Context())).Exec(`INSERT INTO `+f.effectsTable()+` VALUES ($1)`, when); err != nil {
			t.Fatal(err)
		}
		lose.Store(when)
		err := tx.Commit(t.Context(), sqlstoreDone())
		lose.Store("")
		if !errors.Is(err, want.err) {
			t.Errorf("cut %s COMMIT: Commit = %v, want %v", when, err, want.err)
		}
		tx, res, err := f.Begin(t.Context(), sqlstoreClaim(when))
		if err != nil || res.State != want.state {
			t.Errorf("cut %s COMMIT: next Begin is %v, %v, want %v", when, res.State, err, want.state)
		}
		if tx != nil {
			_ = tx.Rollback(t.Context())
		}
		n := len(sqlstoreStrings(t, f.db, `SELECT n FROM `+f.effectsTable()+` WHERE n = '`+when+`'`))
		if n != want.effects {
			t.Errorf("cut %s COMMIT: %d effects, want %d", when, n, want.effects)
		}
	}
}

// The outcome of a COMMIT that nobody can read is not made up.
func TestSQLStorePostgresCommitUnknown(t *testing.T) {
	sqlstorePgOpen(t)
	var lose atomic.Value
	lose.Store("")
	cfg, err := pgx.ParseConfig(sqlstorePgURL())
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(lossyConnector{stdlib.GetConnector(*cfg), &lose})
	f := newPgStore(t, sqlstorePgOpen(t), sqlstore.Options{})
	s, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: f.table})
	if err != nil {
		t.Fatal(err)
	}
	tx := sqlstoreBegin(t, s, sqlstoreClaim("a"), dedup.Won)
	lose.Store("after")
	db.Close() // no new connection; the open one goes on
	err = tx.Commit(t.Context(), sqlstoreDone())
	if err == nil || errors.Is(err, dedup.ErrNotCommitted) || !errors.Is(err, errCut) {
		t.Errorf("Commit = %v, want an error that says nothing of the outcome", err)
	}
}

func TestSQLStorePostgresDeferredConstraint(t *testing.T) {
	f := newPgStore(t, sqlstorePgOpen(t), sqlstore.Options{})
	f.exec(t, `CREATE TABLE `+f.schema+`.refs (n text REFERENCES `+f.effectsTable()+` DEFERRABLE INITIALLY DEFERRED)`)
	tx := sqlstoreBegin(t, f, sqlstoreClaim("a"), dedup.Won)
	if _, err := sqlstore.Tx(tx.Context(t.Context())).Exec(`INSERT INTO ` + f.schema + `.refs VALUES ('none')`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context(), sqlstoreDone()); !errors.Is(err, dedup.ErrTxAborted) {
		t.Errorf("Commit = %v, want ErrTxAborted", err)
	}
	_ = sqlstoreBegin(t, f, sqlstoreClaim("a"), dedup.Won).Rollback(t.Context())
}

// A serialization failure at COMMIT (write skew) is told as such.
func TestSQLStorePostgresSerialization(t *testing.T) {
	f := newPgStore(t, sqlstorePgOpen(t), sqlstore.Options{Isolation: sql.LevelSerializable})
	var txs []dedup.Tx
	for _, id := range []string{"a", "b"} {
		tx := sqlstoreBegin(t, f, sqlstoreClaim(id), dedup.Won)
		var n int
		if err := sqlstore.Tx(tx.Context(t.Context())).QueryRow(`SELECT count(*) FROM ` + f.effectsTable()).Scan(&n); err != nil {
			t.Fatal(err)
		}
		txs = append(txs, tx)
	}
	for i, tx := range txs {
		if _, err := sqlstore.Tx(tx.Context(t.Context())).Exec(`INSERT INTO `+f.effectsTable()+` VALUES ($1)`, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	var errs []error
	for _, tx := range txs {
		errs = append(errs, tx.Commit(t.Context(), sqlstoreDone()))
	}
	if joined := errors.Join(errs...); !errors.Is(joined, dedup.ErrSerialization) {
		t.Errorf("commits = %v, want one that is ErrSerialization", errs)
	}
	if n := len(sqlstoreStrings(t, f.db, `SELECT n FROM `+f.effectsTable())); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
}

func TestSQLStorePostgresLockTimeoutIsBusy(t *testing.T) {
	f := newPgStore(t, sqlstorePgOpen(t), sqlstore.Options{})
	c := sqlstoreClaim("a")
	if _, err := f.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	cfg, err := pgx.ParseConfig(sqlstorePgURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["lock_timeout"] = "10ms"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	s, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: f.table})
	if err != nil {
		t.Fatal(err)
	}
	holder, err := f.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback()
	if _, err := holder.Exec(`SELECT FROM ` + f.table + ` FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	if err := s.Renew(t.Context(), c.Key, c.Token, time.Minute); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Renew = %v, want ErrBusy", err)
	}
}

func TestSQLStorePostgresMigrate(t *testing.T) {
	db := sqlstorePgOpen(t)
	schema := sqlstorePgSchema(t, db)
	var wg sync.WaitGroup
	for range 8 { // nodes that start at once
		wg.Go(func() {
			s, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{Table: schema + ".Order"}) // a reserved word
			if err == nil {
				err = s.Migrate(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	want := []string{"Order_expires", "Order_pkey"}
	got := sqlstoreStrings(t, db, `SELECT indexname FROM pg_indexes WHERE schemaname = '`+schema+`' ORDER BY 1`)
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("indexes are %v, want %v", got, want)
	}
}

// A node without the right to create tables starts where the table is there.
func TestSQLStorePostgresMigrateUnprivileged(t *testing.T) {
	db := sqlstorePgOpen(t)
	f := newPgStore(t, db, sqlstore.Options{})
	role := "r" + f.schema
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { f.exec(t, `DROP OWNED BY `+role); f.exec(t, `DROP ROLE `+role) })
	f.exec(t, `GRANT USAGE ON SCHEMA `+f.schema+` TO `+role)
	f.exec(t, `GRANT SELECT ON `+f.table+` TO `+role)
	cfg, err := pgx.ParseConfig(sqlstorePgURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["role"] = role
	weak := stdlib.OpenDB(*cfg)
	defer weak.Close()
	s, err := sqlstore.New(weak, sqlstore.Postgres, sqlstore.Options{Table: f.table})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Error(err)
	}
}
