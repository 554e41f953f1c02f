package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	_ "embed"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

//go:embed schema_mysql.sql
var schemaMySQL string

type mysql struct {
	mu       sync.Mutex
	database string // locks belong to the server, so their names need it

	logged atomic.Int32 // does the binary log make a commit durable? 0: not asked yet
}

// How the server makes commits durable.
const (
	logUnknown = iota
	logNone    // there is no binary log, or it is not on disk with each commit
	logSynced
)

// durableAfter is the age from which on an outcome is on disk: no commit takes
// as long.
const durableAfter = time.Minute

func (*mysql) queries(t table) queries {
	x := syntax{
		table: t.quoted("`"),
		// In UTC, so that no session's time zone and no summer time matters.
		now:     `UTC_TIMESTAMP(6)`,
		after:   `UTC_TIMESTAMP(6) + INTERVAL {n} MICROSECOND`,
		instant: `TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {c})`,
		stamp:   `lease_until = {now}, `, // see durable
	}
	q := x.common()
	q.schema = schemaFor(schemaMySQL, t, "`")
	q.exists = x.expand(`SELECT NOT EXISTS (SELECT 1 FROM {table} WHERE 1 = 0)`)
	const into = `INSERT INTO {table} (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at) `
	// Not INSERT IGNORE, which takes any bad value for a duplicate.
	q.insert = x.statement(into + `VALUES ($1, $2, $3, $4, 1, 1, {after $5}, {now}, {after $6})`)
	q.insertTx = x.statement(into + `SELECT $1, $2, $3, $4, 1, 1, {after $5}, {now}, {after $6} FROM DUAL WHERE @idempotency_lock = 1`)
	q.lockRow = x.statement(`SELECT {columns} FROM {table} WHERE scope = $1 AND id_key = $2 FOR UPDATE`)
	q.touch = x.statement(`UPDATE {table} SET lease_until = lease_until - INTERVAL 1 MICROSECOND WHERE scope = $1 AND id_key = $2 AND token = $3`)
	q.purge = x.statement(`SELECT scope, id_key FROM {table} WHERE status = $1 AND expires_at <= {now}
		AND (status = 2 OR lease_until <= {now}) ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED`)
	q.purgeRows = x.expand(`DELETE FROM {table} WHERE `)
	for _, st := range q.all() {
		if st != nil {
			st.positional()
		}
	}
	return q
}

// key returns bytes: a string would be converted to the connection's character
// set.
func (*mysql) key(k dedup.Key) (scope, id any) { return []byte(k.Scope), []byte(k.ID) }

// ask inserts, and reads only where there was a row: the first request takes
// one statement and a replay takes two, since MySQL can't do both in one.
func (*mysql) ask(ctx context.Context, q querier, c *claim) (row, error) {
	st := q.s.q.insert
	if q.tx != nil {
		st = q.s.q.insertTx
	}
	n, err := q.exec(ctx, st, c.args...)
	if err == nil && n > 0 {
		return c.wonRow(), nil // an INSERT counts alike whatever clientFoundRows says
	}
	locked := err != nil
	if err != nil && q.s.classify(err) != Conflict {
		return row{}, err
	}
	r, err := q.get(ctx, c.scope, c.id)
	switch {
	case isNoRows(err) && locked:
		return row{}, errAgain
	case isNoRows(err):
		return row{}, errTaken
	}
	r.free = locked
	return r, err
}

func (*mysql) write(context.Context, *Store) (func(), error) { return func() {}, nil }

// enter asks for the lock on a connection that the transaction will then be on.
//
// It also turns autocommit off. When MySQL resolves a deadlock it rolls the
// whole transaction back, and a work that goes on regardless would have every
// later statement committed by itself. So they make another transaction,
// which is rolled back when the claim is found missing from it.
func (d *mysql) enter(ctx context.Context, s *Store, k dedup.Key) (hold, error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return hold{}, err
	}
	name, err := d.lockName(ctx, conn, s, k)
	if err == nil {
		// The name is hexadecimal, so the statement needs no argument and takes
		// one round trip.
		_, err = conn.ExecContext(ctx, `SET autocommit = 0, @idempotency_lock = GET_LOCK('`+name+`', 0)`)
	}
	if err != nil {
		discard(conn)
		return hold{}, err
	}
	leave := func(clean bool) {
		if clean {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			// Nothing is open that this could commit.
			_, err := conn.ExecContext(ctx, `SET @idempotency_lock = RELEASE_LOCK('`+name+`'), autocommit = 1`)
			if err == nil {
				conn.Close() //nolint:errcheck // it goes back to the pool
				return
			}
		}
		discard(conn)
	}
	return hold{beginner: conn, allow: func() {}, leave: leave}, nil
}

// discard closes a connection for good, with what it may still hold.
func discard(conn *sql.Conn) {
	conn.Raw(func(any) error { return driver.ErrBadConn }) //nolint:errcheck // it is what was asked for
	conn.Close()                                           //nolint:errcheck // it is closed already
}

// lockName is at most 64 characters, and MySQL does not tell upper case from
// lower in it.
func (d *mysql) lockName(ctx context.Context, conn *sql.Conn, s *Store, k dedup.Key) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.database == "" {
		var database sql.NullString
		if err := conn.QueryRowContext(ctx, `SELECT DATABASE()`).Scan(&database); err != nil {
			return "", err
		}
		d.database = "/" + database.String
	}
	sum := digest(d.database, s.fullName, k.Scope, k.ID)
	return "idem" + hex.EncodeToString(sum[:24]), nil
}

// durable commits a change of the row. InnoDB shows a commit to others before
// its log is on disk, and a crash in between forgets it: who was told "done"
// would have been told of an effect that is then gone. A later commit has its
// log behind the first one's, so that when it is on disk both are. With a
// binary log there is no need, since that is on disk before InnoDB commits.
//
// A completion sets lease_until to its own time, by which old rows are told and
// left alone.
func (d *mysql) durable(ctx context.Context, s *Store, k dedup.Key, r row) error {
	if !r.young() {
		return nil
	}
	if d.logged.Load() == logUnknown {
		var synced bool
		if err := s.db.QueryRowContext(ctx, `SELECT @@log_bin = 1 AND @@sync_binlog = 1`).Scan(&synced); err != nil {
			return err
		}
		d.logged.Store(logNone)
		if synced {
			d.logged.Store(logSynced)
		}
	}
	if d.logged.Load() == logSynced {
		return nil
	}
	scope, id := d.key(k)
	n, err := querier{s: s}.exec(ctx, s.q.touch, scope, id, r.token)
	if err == nil && n == 0 {
		err = fmt.Errorf("%w: the row has gone again", dedup.ErrBusy)
	}
	return err
}

// settled waits for the row itself: a transaction that is under way still has
// it locked.
func (d *mysql) settled(ctx context.Context, s *Store, k dedup.Key) (row, error) {
	var r row
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return r, err
	}
	defer tx.Rollback() //nolint:errcheck // nothing was written
	scope, id := d.key(k)
	err = querier{s: s, tx: tx}.query(ctx, s.q.lockRow, r.dest(), scope, id)
	return r, err
}

// purge locks what it can get, by the index, and removes that by its keys.
// Waiting for nothing, it can't be part of a deadlock.
func (d *mysql) purge(ctx context.Context, s *Store, n int) (int, error) {
	if err := s.prepare(ctx); err != nil {
		return 0, err
	}
	// REPEATABLE READ would lock the gaps too, and keep inserts out of them.
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, err
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	var keys []any
	for _, status := range []dedup.Status{dedup.StatusCompleted, dedup.StatusInProgress} {
		found, err := d.expired(ctx, s, tx, status, n-len(keys)/2)
		if err != nil {
			return 0, err
		}
		keys = append(keys, found...)
	}
	if len(keys) == 0 {
		return 0, nil
	}
	where := strings.Repeat(` OR scope = ? AND id_key = ?`, len(keys)/2)[len(` OR `):]
	res, err := tx.ExecContext(ctx, s.q.purgeRows+where, keys...)
	if err != nil {
		return 0, err
	}
	removed, err := res.RowsAffected()
	if err != nil {
		return 0, err
	}
	return int(removed), tx.Commit()
}

// expired locks at most n expired rows and returns the parts of their keys.
func (*mysql) expired(ctx context.Context, s *Store, tx *sql.Tx, status dedup.Status, n int) ([]any, error) {
	rows, err := tx.StmtContext(ctx, s.q.purge.prepared.Load()).QueryContext(ctx, int64(status), int64(n))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var keys []any
	for rows.Next() {
		var scope, id []byte
		if err := rows.Scan(&scope, &id); err != nil {
			return nil, err
		}
		keys = append(keys, scope, id)
	}
	return keys, rows.Err()
}
