package server_test

import (
	"cmp"
	"database/sql"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/etag"
	"github.com/effectonce/idempotency/etag/sqlwrite"
)

// accounts is a table of a real database, with the statements that repeat well.
type accounts struct {
	db        *sql.DB
	table     string
	dollar    bool   // parameters are $1, $2 and not ?
	conflict  string // ends an INSERT of what may be there
	duplicate func(error) bool
}

// q writes a statement in the database's dialect; @ is the table.
func (a *accounts) q(query string, args ...any) sqlwrite.Query {
	var b strings.Builder
	n := 0
	for _, r := range query {
		switch {
		case r == '@':
			b.WriteString(a.table)
		case r == '?' && a.dollar:
			n++
			b.WriteString("$" + strconv.Itoa(n))
		default:
			b.WriteRune(r)
		}
	}
	return sqlwrite.Query{SQL: b.String(), Args: args}
}

func (a *accounts) insert(id string, email any) sqlwrite.Query {
	return a.q(`INSERT INTO @ (id, email, version) VALUES (?, ?, 1)`+a.conflict, id, email)
}

// set doesn't change the version, so that MySQL may count no row.
func (a *accounts) set(id, email string) sqlwrite.Query {
	return a.q(`UPDATE @ SET email = ? WHERE id = ?`, email, id)
}

func (a *accounts) change(t *testing.T, db sqlwrite.DB, id, email string, version int64) error {
	return sqlwrite.Versioned(t.Context(), db,
		a.q(`UPDATE @ SET email = ?, version = version + 1 WHERE id = ? AND version = ?`, email, id, version),
		a.q(`SELECT version FROM @ WHERE id = ?`, id))
}

func (a *accounts) remove(t *testing.T, id string, version int64) error {
	return sqlwrite.Versioned(t.Context(), a.db,
		a.q(`DELETE FROM @ WHERE id = ? AND version = ?`, id, version),
		a.q(`SELECT version FROM @ WHERE id = ?`, id))
}

// want checks the row; version 0 means that there is none.
func (a *accounts) want(t *testing.T, id, email string, version int64) {
	t.Helper()
	q := a.q(`SELECT email, version FROM @ WHERE id = ?`, id)
	var gotEmail string
	var gotVersion int64
	err := a.db.QueryRowContext(t.Context(), q.SQL, q.Args...).Scan(&gotEmail, &gotVersion)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		t.Fatal(err)
	}
	if gotEmail != email || gotVersion != version {
		t.Errorf("row %s: %q at version %d, want %q at %d", id, gotEmail, gotVersion, email, version)
	}
}

// byDesignOpen opens a database and makes a table that is dropped at the end.
func byDesignOpen(t *testing.T, driver, dsn, setting string, a accounts) *accounts {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if err := db.PingContext(t.Context()); err != nil {
		if os.Getenv("CI") == "true" || setting == "" {
			t.Fatalf("no database (%s): %v", setting, err)
		}
		t.Skipf("no database (%s): %v", setting, err)
	}
	a.db, a.table = db, "bydesign_"+dedup.NewToken().String()
	if _, err := db.Exec(`CREATE TABLE ` + a.table + ` (id varchar(64) PRIMARY KEY, email varchar(64) NOT NULL, version bigint NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Exec(`DROP TABLE ` + a.table); err != nil {
			t.Error(err)
		}
	})
	return &a
}

func byDesignMySQL(t *testing.T, clientFoundRows bool) *accounts {
	t.Helper()
	cfg, err := mysql.ParseDSN(cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ClientFoundRows = clientFoundRows
	return byDesignOpen(t, "mysql", cfg.FormatDSN(), "IDEMPOTENCY_MYSQL_DSN", accounts{duplicate: func(err error) bool {
		e, ok := errors.AsType[*mysql.MySQLError](err)
		return ok && e.Number == 1062
	}})
}

// TestByDesign: operations that need no key, since doing them twice is doing
// them once. Each is done twice, and by many at once.
func TestByDesign(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*testing.T) *accounts{
		"Postgres": func(t *testing.T) *accounts {
			url := cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
			return byDesignOpen(t, "pgx", url, "IDEMPOTENCY_POSTGRES_URL", accounts{dollar: true, conflict: ` ON CONFLICT (id) DO NOTHING`})
		},
		"MariaDB":                      func(t *testing.T) *accounts { return byDesignMySQL(t, false) },
		"MariaDB with clientFoundRows": func(t *testing.T) *accounts { return byDesignMySQL(t, true) },
		"SQLite": func(t *testing.T) *accounts {
			dsn := "file:" + filepath.Join(t.TempDir(), "t.db") + "?_txlock=immediate&_pragma=busy_timeout(20000)&_pragma=journal_mode(WAL)"
			return byDesignOpen(t, "sqlite", dsn, "", accounts{conflict: ` ON CONFLICT (id) DO NOTHING`})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := open(t)
			t.Run("InsertOnce", a.insertOnce)
			t.Run("BadDataIsNotThereAlready", a.badData)
			t.Run("SetTwice", a.setTwice)
			t.Run("StaleWriterRefused", a.staleWriter)
			t.Run("EnsureAbsent", a.ensureAbsent)
			t.Run("OneWriterOfEachVersion", a.oneWriterOfEachVersion)
			t.Run("InATransaction", a.inATransaction)
			t.Run("OverHTTP", a.overHTTP)
		})
	}
}

func (a *accounts) insertOnce(t *testing.T) {
	for _, want := range []bool{true, false} {
		inserted, err := sqlwrite.Insert(t.Context(), a.db, a.insert("once", "first@example.com"), a.duplicate)
		if err != nil || inserted != want {
			t.Errorf("inserted %v, %v; want %v", inserted, err, want)
		}
	}
	if inserted, err := sqlwrite.Insert(t.Context(), a.db, a.insert("once", "other@example.com"), a.duplicate); err != nil || inserted {
		t.Errorf("inserted %v, %v over the row that was there", inserted, err)
	}
	a.want(t, "once", "first@example.com", 1)

	var won atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			inserted, err := sqlwrite.Insert(t.Context(), a.db, a.insert("raced", "x@example.com"), a.duplicate)
			if err != nil {
				t.Error(err)
			}
			if inserted {
				won.Add(1)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d inserted one row", won.Load())
	}
}

func (a *accounts) badData(t *testing.T) {
	if inserted, err := sqlwrite.Insert(t.Context(), a.db, a.insert("bad", nil), a.duplicate); err == nil {
		t.Errorf("NULL where none may be: inserted %v, no error", inserted)
	}
	a.want(t, "bad", "", 0)
}

func (a *accounts) setTwice(t *testing.T) {
	for _, want := range []bool{true, false, false} {
		inserted, err := sqlwrite.Upsert(t.Context(), a.db, a.insert("set", "a@example.com"), a.duplicate, a.set("set", "a@example.com"))
		if err != nil || inserted != want {
			t.Errorf("inserted %v, %v; want %v", inserted, err, want)
		}
		a.want(t, "set", "a@example.com", 1)
	}
	if inserted, err := sqlwrite.Upsert(t.Context(), a.db, a.insert("set", "b@example.com"), a.duplicate, a.set("set", "b@example.com")); err != nil || inserted {
		t.Errorf("inserted %v, %v", inserted, err)
	}
	a.want(t, "set", "b@example.com", 1)
}

func (a *accounts) staleWriter(t *testing.T) {
	if _, err := sqlwrite.Insert(t.Context(), a.db, a.insert("stale", "a@example.com"), a.duplicate); err != nil {
		t.Fatal(err)
	}
	// To what it is: it counts as a write all the same.
	if err := a.change(t, a.db, "stale", "a@example.com", 1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var stale *sqlwrite.StaleError
		if err := a.change(t, a.db, "stale", "late@example.com", 1); !errors.Is(err, sqlwrite.ErrStale) || !errors.As(err, &stale) || stale.Current != 2 {
			t.Errorf("error %v, want stale at version 2", err)
		}
		a.want(t, "stale", "a@example.com", 2)
		if err := a.change(t, a.db, "nobody", "x@example.com", 1); !errors.Is(err, sqlwrite.ErrGone) {
			t.Errorf("error %v, want gone", err)
		}
	}
}

func (a *accounts) ensureAbsent(t *testing.T) {
	if _, err := sqlwrite.Insert(t.Context(), a.db, a.insert("absent", "a@example.com"), a.duplicate); err != nil {
		t.Fatal(err)
	}
	if err := a.remove(t, "absent", 7); !errors.Is(err, sqlwrite.ErrStale) {
		t.Errorf("error %v, want stale", err)
	}
	a.want(t, "absent", "a@example.com", 1)
	for _, want := range []error{nil, sqlwrite.ErrGone} {
		if err := a.remove(t, "absent", 1); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
		a.want(t, "absent", "", 0)
	}
}

func (a *accounts) oneWriterOfEachVersion(t *testing.T) {
	if _, err := sqlwrite.Insert(t.Context(), a.db, a.insert("turns", "0"), a.duplicate); err != nil {
		t.Fatal(err)
	}
	const versions, writers = 5, 8
	for v := int64(1); v <= versions; v++ {
		var won atomic.Int32
		var wg sync.WaitGroup
		for range writers {
			wg.Go(func() {
				switch err := a.change(t, a.db, "turns", strconv.FormatInt(v, 10), v); {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, sqlwrite.ErrStale):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d wrote version %d", won.Load(), v)
		}
	}
	a.want(t, "turns", strconv.Itoa(versions), versions+1)
}

// A row that is there leaves the transaction usable, and a rollback undoes all.
func (a *accounts) inATransaction(t *testing.T) {
	if _, err := sqlwrite.Insert(t.Context(), a.db, a.insert("tx", "a@example.com"), a.duplicate); err != nil {
		t.Fatal(err)
	}
	for _, commit := range []bool{false, true} {
		tx, err := a.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if inserted, err := sqlwrite.Insert(t.Context(), tx, a.insert("tx", "b@example.com"), a.duplicate); err != nil || inserted {
			t.Fatalf("inserted %v, %v", inserted, err)
		}
		if err := a.change(t, tx, "tx", "c@example.com", 1); err != nil {
			t.Fatal(err)
		}
		if !commit {
			if err := tx.Rollback(); err != nil {
				t.Fatal(err)
			}
			a.want(t, "tx", "a@example.com", 1)
			continue
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		a.want(t, "tx", "c@example.com", 2)
	}
}

// overHTTP has two writers who both passed the check: the write refuses one.
func (a *accounts) overHTTP(t *testing.T) {
	if _, err := sqlwrite.Insert(t.Context(), a.db, a.insert("http", "a@example.com"), a.duplicate); err != nil {
		t.Fatal(err)
	}
	var checked sync.WaitGroup
	checked.Add(2)
	lookup := func(r *http.Request) (etag.State, error) {
		q := a.q(`SELECT version FROM @ WHERE id = 'http'`)
		var v int64
		if err := a.db.QueryRowContext(r.Context(), q.SQL).Scan(&v); err != nil {
			return etag.State{}, err
		}
		return etag.State{Exists: true, Tag: etag.FromVersion(v)}, nil
	}
	s := httptest.NewServer(etag.Require(etag.Check(lookup, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		checked.Done()
		checked.Wait()
		state, _ := etag.Checked(r.Context())
		v, _ := state.Tag.Version()
		if err := a.change(t, a.db, "http", "b@example.com", v); err != nil {
			if !errors.Is(err, sqlwrite.ErrStale) {
				t.Error(err)
			}
			etag.WriteProblem(w, etag.Failed(err))
		}
	}))))
	defer s.Close()
	var written, refused atomic.Int32
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), "PUT", s.URL, nil)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("If-Match", `"1"`)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
			switch resp.StatusCode {
			case http.StatusOK:
				written.Add(1)
			case http.StatusPreconditionFailed:
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	if written.Load() != 1 || refused.Load() != 1 {
		t.Errorf("%d written, %d refused", written.Load(), refused.Load())
	}
	a.want(t, "http", "b@example.com", 2)
}

// TestByDesignMySQLRowCounts shows why sqlwrite.Insert takes error 1062 and not
// the rows that ON DUPLICATE KEY UPDATE counts: with clientFoundRows, a row that
// was there counts as an inserted one does.
func TestByDesignMySQLRowCounts(t *testing.T) {
	t.Parallel()
	for _, found := range []bool{false, true} {
		a := byDesignMySQL(t, found)
		want := []int64{1, 0} // inserted, there
		if found {
			want = []int64{1, 1}
		}
		q := a.q(`INSERT INTO @ (id, email, version) VALUES ('odku', 'a', 1) ON DUPLICATE KEY UPDATE id = id`)
		for _, want := range want {
			res, err := a.db.ExecContext(t.Context(), q.SQL)
			if err != nil {
				t.Fatal(err)
			}
			if n, err := res.RowsAffected(); err != nil || n != want {
				t.Errorf("clientFoundRows %v: %d rows, %v; want %d", found, n, err, want)
			}
		}
	}
}
