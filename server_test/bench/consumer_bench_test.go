package bench

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	pgxinbox "github.com/effectonce/idempotency/drivers/pgx/inbox"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// BenchmarkConsumerInbox times one new event, a row of business included, in
// turns through a hand-written inbox (BEGIN, INSERT … ON CONFLICT DO NOTHING,
// the business row, COMMIT) and through ours on the same table, so that both
// meet the same machine. It reports the time of each and, as "ratio", how much
// of the hand-written one's rate ours has; 0.9 is the floor. Worker counts say
// how many events are under way at the same time.
func BenchmarkConsumerInbox(b *testing.B) {
	for _, db := range []struct {
		name string
		open func(b *testing.B) inboxPair
	}{
		{"postgres", func(b *testing.B) inboxPair { return sqlPair(b, consumer.Postgres, consumerPostgres(b)) }},
		{"pgx", pgxPair},
		{"mysql", func(b *testing.B) inboxPair { return sqlPair(b, consumer.MySQL, consumerMySQL(b)) }},
		{"sqlite", func(b *testing.B) inboxPair { return sqlPair(b, consumer.SQLite, consumerSQLite(b)) }},
	} {
		for _, workers := range []int{1, 4} {
			b.Run(fmt.Sprintf("%s/workers=%d", db.name, workers), func(b *testing.B) {
				db.open(b).run(b, workers)
			})
		}
	}
}

// inboxPair handles one new event each.
type inboxPair struct {
	byHand, ours func(ctx context.Context, id string) error
}

func (p inboxPair) run(b *testing.B, workers int) {
	const turn = 32 // events before it is the other one's turn
	var n atomic.Int64
	round := func(handle func(ctx context.Context, id string) error, events int) time.Duration {
		began := time.Now()
		var wg sync.WaitGroup
		left := atomic.Int64{}
		left.Store(int64(events))
		for range workers {
			wg.Go(func() {
				for left.Add(-1) >= 0 {
					if err := handle(b.Context(), fmt.Sprintf("event-%09d", n.Add(1))); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return time.Since(began)
	}
	round(p.byHand, turn) // connections and statements
	round(p.ours, turn)
	var byHand, ours time.Duration
	b.ResetTimer()
	for done, turns := 0, 0; done < b.N; turns++ {
		events := min(turn, b.N-done)
		if turns%2 == 0 {
			byHand += round(p.byHand, events)
			ours += round(p.ours, events)
		} else {
			ours += round(p.ours, events)
			byHand += round(p.byHand, events)
		}
		done += events
	}
	b.ReportMetric(0, "ns/op") // of both together: says nothing
	b.ReportMetric(float64(byHand.Microseconds())/float64(b.N), "byhand-µs/event")
	b.ReportMetric(float64(ours.Microseconds())/float64(b.N), "ours-µs/event")
	b.ReportMetric(float64(byHand)/float64(ours), "ratio")
}

func consumerPostgresURL() string {
	return cmp.Or(os.Getenv("IDEMPOTENCY_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/test?sslmode=disable")
}

func consumerUsable(b *testing.B, db *sql.DB, err error) *sql.DB {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8)
	if err := db.PingContext(b.Context()); err != nil {
		b.Skip(err)
	}
	return db
}

func consumerPostgres(b *testing.B) *sql.DB {
	db, err := sql.Open("pgx", consumerPostgresURL())
	return consumerUsable(b, db, err)
}

func consumerMySQL(b *testing.B) *sql.DB {
	db, err := mysqldb.Open(cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test"))
	return consumerUsable(b, db, err)
}

func consumerSQLite(b *testing.B) *sql.DB {
	db, err := sqlitedb.Open(filepath.Join(b.TempDir(), "bench.db"))
	return consumerUsable(b, db, err)
}

// sqlPair is over database/sql.
func sqlPair(b *testing.B, d consumer.Dialect, db *sql.DB) inboxPair {
	b.Helper()
	prefix := "cb" + dedup.NewToken().String()[:12]
	events, business := prefix+"_events", prefix+"_business"
	in := &consumer.Inbox{DB: db, Dialect: d, Group: "bench", Table: events}
	if err := in.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	if _, err := db.Exec(`CREATE TABLE ` + business + ` (event VARCHAR(255) NOT NULL PRIMARY KEY, amount INT NOT NULL)`); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		db.Exec(`DROP TABLE ` + events)
		db.Exec(`DROP TABLE ` + business)
	})
	mark := map[consumer.Dialect]string{
		consumer.Postgres: `INSERT INTO ` + events + ` (consumer_group, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		consumer.MySQL:    `INSERT INTO ` + events + ` (consumer_group, event_id, processed_at) VALUES (?, ?, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE event_id = event_id`,
		consumer.SQLite:   `INSERT INTO ` + events + ` (consumer_group, event_id, processed_at) VALUES (?, ?, unixepoch() * 1000) ON CONFLICT DO NOTHING`,
	}[d]
	insert := `INSERT INTO ` + business + ` VALUES (?, 1)`
	if d == consumer.Postgres {
		insert = `INSERT INTO ` + business + ` VALUES ($1, 1)`
	}
	return inboxPair{
		byHand: func(ctx context.Context, id string) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			res, err := tx.ExecContext(ctx, mark, "bench", id)
			if err != nil {
				return err
			}
			if n, err := res.RowsAffected(); err != nil || n != 1 {
				return fmt.Errorf("%d rows, %w", n, err)
			}
			if _, err := tx.ExecContext(ctx, insert, id); err != nil {
				return err
			}
			return tx.Commit()
		},
		ours: func(ctx context.Context, id string) error {
			return in.Handle(ctx, id, func(ctx context.Context) error {
				_, err := consumer.Tx(ctx).ExecContext(ctx, insert, id)
				return err
			}).Err
		},
	}
}

// pgxPair is over pgx.
func pgxPair(b *testing.B) inboxPair {
	b.Helper()
	cfg, err := pgxpool.ParseConfig(consumerPostgresURL())
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	if err := pool.Ping(b.Context()); err != nil {
		b.Skip(err)
	}
	prefix := "cb" + dedup.NewToken().String()[:12]
	events, business := prefix+"_events", prefix+"_business"
	in := &pgxinbox.Inbox{Pool: pool, Group: "bench", Table: events}
	if err := in.Migrate(b.Context()); err != nil {
		b.Fatal(err)
	}
	if _, err := pool.Exec(b.Context(), `CREATE TABLE `+business+` (event text PRIMARY KEY, amount int NOT NULL)`); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { pool.Exec(context.Background(), `DROP TABLE `+events+`, `+business) })
	mark := `INSERT INTO ` + events + ` (consumer_group, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`
	insert := `INSERT INTO ` + business + ` VALUES ($1, 1)`
	return inboxPair{
		byHand: func(ctx context.Context, id string) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				tag, err := tx.Exec(ctx, mark, "bench", id)
				if err != nil || tag.RowsAffected() != 1 {
					return fmt.Errorf("%d rows, %w", tag.RowsAffected(), err)
				}
				_, err = tx.Exec(ctx, insert, id)
				return err
			})
		},
		ours: func(ctx context.Context, id string) error {
			return in.Handle(ctx, id, func(ctx context.Context) error {
				_, err := pgxinbox.Tx(ctx).Exec(ctx, insert, id)
				return err
			}).Err
		},
	}
}
