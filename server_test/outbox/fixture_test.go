package outbox_test

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"

	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
	"github.com/effectonce/idempotency/outbox"
	"github.com/effectonce/idempotency/outbox/outboxtest"
)

// database says where an outbox is, in a form that can be handed to another
// process.
type database struct {
	Kind, Addr, Table string
}

var kinds = []string{"sqlite", "postgres", "mysql"}

func (d database) open() (*outbox.Outbox, error) {
	box := &outbox.Outbox{Table: d.Table}
	var err error
	switch d.Kind {
	case "sqlite":
		box.Dialect = outbox.SQLite
		box.DB, err = sqlitedb.Open(d.Addr)
	case "postgres", "pgx":
		box.Dialect = outbox.Postgres
		box.DB, err = sql.Open("pgx", d.Addr)
	case "mysql":
		box.Dialect = outbox.MySQL
		box.DB, err = mysqldb.Open(d.Addr)
	default:
		err = fmt.Errorf("no such kind: %q", d.Kind)
	}
	return box, err
}

// newDatabase returns a database with an empty outbox, dropped after the test. A
// service that isn't there skips the test, or fails it where CI=true.
func newDatabase(t *testing.T, kind string) (database, *outbox.Outbox) {
	t.Helper()
	d := database{Kind: kind, Table: "outbox_" + strings.ReplaceAll(outbox.NewID(), "-", "")}
	switch kind {
	case "sqlite":
		d.Addr = filepath.Join(t.TempDir(), "test.db")
	case "postgres", "pgx":
		d.Addr = cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
	case "mysql":
		d.Addr = cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test")
	}
	box, err := d.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { box.DB.Close() })
	if err := box.DB.PingContext(t.Context()); err != nil {
		missing(t, kind, err)
	}
	if err := box.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = box.DB.ExecContext(context.Background(), "DROP TABLE IF EXISTS "+d.Table) })
	return d, box
}

func missing(t *testing.T, what string, err error) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("no %s: %v", what, err)
	}
	t.Skipf("no %s: %v", what, err)
}

// forEach runs a test on each kind of database.
func forEach(t *testing.T, test func(t *testing.T, d database, box *outbox.Outbox)) {
	forEachSerial(t, func(t *testing.T, d database, box *outbox.Outbox) {
		t.Parallel()
		test(t, d, box)
	})
}

// forEachSerial does the same one after the other.
func forEachSerial(t *testing.T, test func(t *testing.T, d database, box *outbox.Outbox)) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			d, box := newDatabase(t, kind)
			test(t, d, box)
		})
	}
}

func enqueue(ctx context.Context, box *outbox.Outbox, msgs ...outbox.Message) error {
	return box.InTx(ctx, func(ctx context.Context, tx *sql.Tx) error { return box.Enqueue(ctx, tx, msgs...) })
}

// past is an instant that is long over.
var past = map[outbox.Dialect]string{outbox.Postgres: `'2000-01-01'`, outbox.MySQL: `'2000-01-01'`, outbox.SQLite: `0`}

// expire moves the stored times, since tests don't sleep.
func expire(ctx context.Context, box *outbox.Outbox) error {
	_, err := box.DB.ExecContext(ctx, `UPDATE `+box.Table+` SET available_at = `+past[box.Dialect]+` WHERE state IN (0, 3)`)
	return err
}

func TestStores(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/keep=%t", kind, keep), func(t *testing.T) {
				t.Parallel()
				outboxtest.Run(t, func(t *testing.T) outboxtest.Fixture {
					_, box := newDatabase(t, kind)
					if keep {
						box.Retention = 24 * 3600e9
					}
					return outboxtest.Fixture{
						Store:   box,
						Enqueue: func(ctx context.Context, msgs ...outbox.Message) error { return enqueue(ctx, box, msgs...) },
						Expire:  func(ctx context.Context) error { return expire(ctx, box) },
					}
				})
			})
		}
	}
}
