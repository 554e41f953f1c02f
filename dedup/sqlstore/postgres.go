package sqlstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	_ "embed"
	"encoding/binary"
	"fmt"

	"github.com/effectonce/idempotency/dedup"
)

//go:embed schema_postgres.sql
var schemaPostgres string

type postgres struct{}

func (postgres) queries(t table) queries {
	x := syntax{
		table: t.quoted(`"`),
		// now() stands still in a transaction, and would start a lease before it.
		now:     `clock_timestamp()`,
		after:   `clock_timestamp() + {n}::bigint * interval '1 microsecond'`,
		instant: `{c}`,
	}
	q := x.common()
	q.schema = schemaFor(schemaPostgres, t, `"`)
	q.exists = fmt.Sprintf(`SELECT to_regclass('%s') IS NOT NULL`, t.quoted(`"`))
	q.migrateLock = fmt.Sprintf(`SELECT pg_advisory_xact_lock(%d)`, lockNumber("migrate", t.schema, t.name))

	// Both statements see the table as it was when they began, so the second
	// SELECT never finds the inserted row. DO NOTHING, since DO UPDATE would
	// lock the row, and write, only to look at it.
	q.insert = x.statement(`WITH won AS (
		INSERT INTO {table} (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
		VALUES ($1, $2, $3, $4, 1, 1, {after $5}, {now}, {after $6})
		ON CONFLICT (scope, id_key) DO NOTHING RETURNING *)
		SELECT {columns}, true FROM won
		UNION ALL
		SELECT {columns}, false FROM {table} WHERE scope = $1 AND id_key = $2`)

	// An INSERT waits for the transaction that has inserted the same key, so
	// that is asked first, by a lock; MATERIALIZED keeps it to once.
	q.insertTx = x.statement(`WITH lock AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($7) AS ours),
		won AS (
		INSERT INTO {table} (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
		SELECT $1::text, $2::text, $3::bytea, $4::bytea, 1, 1, {after $5}, {now}, {after $6} FROM lock WHERE ours
		ON CONFLICT (scope, id_key) DO NOTHING RETURNING *)
		SELECT {columns}, fresh, ours FROM lock LEFT JOIN (
			SELECT *, true AS fresh FROM won
			UNION ALL
			SELECT *, false FROM {table} WHERE scope = $1 AND id_key = $2) r ON true`)

	// The clock is read once, so that the index can be used. Rows that another
	// node is about to remove, or somebody to renew, are left to them.
	q.purge = x.statement(`DELETE FROM {table} WHERE ctid = ANY (ARRAY (SELECT ctid FROM {table}
		WHERE status <> 3 AND expires_at <= (SELECT {now})
		AND NOT (status = 1 AND lease_until > (SELECT {now}))
		ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))`)
	return q
}

func (postgres) key(k dedup.Key) (scope, id any) { return k.Scope, k.ID }

// ask takes one statement, replay or not.
func (postgres) ask(ctx context.Context, q querier, c *claim) (row, error) {
	r := row{free: true}
	if q.tx == nil {
		err := q.query(ctx, q.s.q.insert, append(r.dest(), &r.fresh), c.args...)
		if isNoRows(err) {
			return row{}, errAgain // there was one, not committed yet when we began
		}
		return r, err
	}
	var fresh sql.NullBool
	err := q.query(ctx, q.s.q.insertTx, append(r.dest(), &fresh, &r.free), c.with(q.s.lockNumber(c.Key))...)
	switch {
	case err != nil:
		return row{}, err
	case fresh.Valid:
		r.fresh = fresh.Bool
		return r, nil
	case !r.free:
		return row{}, errTaken
	}
	return row{}, errAgain
}

func (postgres) write(context.Context, *Store) (func(), error) { return func() {}, nil }

func (postgres) enter(_ context.Context, s *Store, _ dedup.Key) (hold, error) {
	return hold{beginner: s.db, allow: func() {}, leave: func(bool) {}}, nil
}

// durable: Postgres shows a commit to nobody before it is on disk.
func (postgres) durable(context.Context, *Store, dedup.Key, row) error { return nil }

// settled waits for the lock of the lost transaction, which the server lets go
// once that is committed or rolled back, and then looks.
func (postgres) settled(ctx context.Context, s *Store, k dedup.Key) (row, error) {
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return row{}, err
	}
	defer tx.Rollback() //nolint:errcheck // nothing was written
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1)`, s.lockNumber(k)); err != nil {
		return row{}, err
	}
	return querier{s: s, tx: tx}.get(ctx, k.Scope, k.ID)
}

func (postgres) purge(ctx context.Context, s *Store, n int) (int, error) {
	removed, err := querier{s: s}.exec(ctx, s.q.purge, int64(n))
	return int(removed), err
}

func (s *Store) lockNumber(k dedup.Key) int64 { return lockNumber(s.fullName, k.Scope, k.ID) }

// lockNumber hashes parts to the number of an advisory lock. Two keys with one
// number are only ever told "in progress" for each other's sake.
func lockNumber(parts ...string) int64 {
	h := digest(parts...)
	return int64(binary.BigEndian.Uint64(h[:8]))
}

// digest hashes parts with their lengths, so that ("ab", "c") is not ("a", "bc").
func digest(parts ...string) [sha256.Size]byte {
	var b []byte
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	return sha256.Sum256(b)
}
