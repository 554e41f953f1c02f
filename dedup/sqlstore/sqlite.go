package sqlstore

import (
	"context"
	_ "embed"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

//go:embed schema_sqlite.sql
var schemaSQLite string

// sqlite lets one writer in at a time. SQLite would do so itself, but by
// polling, in no order, and without telling a duplicate from another key.
type sqlite struct {
	timeout time.Duration
	turn    chan struct{} // holds a token while somebody writes

	mu   sync.Mutex
	open map[dedup.Key]struct{} // claimed by an open transaction
}

func newSQLite(timeout time.Duration) *sqlite {
	return &sqlite{timeout: timeout, turn: make(chan struct{}, 1), open: map[dedup.Key]struct{}{}}
}

func (*sqlite) queries(t table) queries {
	x := syntax{
		table: t.quoted(`"`),
		// SQLite counts milliseconds. 'now' stands still within a statement.
		now:     `(CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)`,
		instant: `{c}`,
	}
	x.after = x.now + ` + {n}`
	q := x.common()
	q.schema = schemaFor(schemaSQLite, t, `"`)
	q.exists = x.expand(`SELECT NOT EXISTS (SELECT 1 FROM {table} WHERE 1 = 0)`)
	q.insert = x.statement(`INSERT INTO {table}
		(scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
		VALUES ($1, $2, $3, $4, 1, 1, {after $5}, {now}, {after $6})
		ON CONFLICT (scope, id_key) DO NOTHING
		RETURNING {columns}`)
	q.purge = x.statement(`DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table}
		WHERE status <> 3 AND expires_at <= {now} AND NOT (status = 1 AND lease_until > {now})
		ORDER BY expires_at LIMIT $1)`)
	for _, st := range q.all() {
		if st != nil {
			st.positional()
		}
	}
	return q
}

func (*sqlite) key(k dedup.Key) (scope, id any) { return k.Scope, k.ID }

// ask reads first, outside of a transaction: readers get by while another one
// writes, so a replay does not wait for a handler. In a transaction it writes
// first, so as to wait for the write lock and not to fail for having read
// before.
func (d *sqlite) ask(ctx context.Context, q querier, c *claim) (row, error) {
	if q.tx == nil {
		if r, err := q.get(ctx, c.scope, c.id); !isNoRows(err) {
			r.free = true
			return r, err
		}
	}
	r, err := d.insert(ctx, q, c)
	if !isNoRows(err) {
		return r, err
	}
	if q.tx == nil {
		return row{}, errAgain
	}
	r, err = q.get(ctx, c.scope, c.id)
	if isNoRows(err) {
		return row{}, errAgain
	}
	r.free = true
	return r, err
}

func (d *sqlite) insert(ctx context.Context, q querier, c *claim) (row, error) {
	if q.tx == nil {
		done, err := d.write(ctx, q.s)
		if err != nil {
			return row{}, err
		}
		defer done()
	}
	r := row{fresh: true, free: true}
	err := q.query(ctx, q.s.q.insert, r.dest(), c.args...)
	return r, err
}

func (d *sqlite) write(ctx context.Context, _ *Store) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case d.turn <- struct{}{}:
		return d.leave, nil
	default:
	}
	t := time.NewTimer(d.timeout)
	defer t.Stop()
	select {
	case d.turn <- struct{}{}:
		return d.leave, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-t.C:
		return nil, fmt.Errorf("%w: another transaction has been writing for %v", dedup.ErrBusy, d.timeout)
	}
}

func (d *sqlite) leave() { <-d.turn }

func (d *sqlite) enter(ctx context.Context, s *Store, k dedup.Key) (hold, error) {
	d.mu.Lock()
	_, taken := d.open[k]
	if !taken {
		d.open[k] = struct{}{}
	}
	d.mu.Unlock()
	if taken {
		return hold{}, errTaken
	}
	free := func() {
		d.mu.Lock()
		delete(d.open, k)
		d.mu.Unlock()
	}
	done, err := d.write(ctx, s)
	if err != nil {
		free()
		return hold{}, err
	}
	h := hold{beginner: s.db, allow: func() {}, leave: func(bool) { done(); free() }}
	if s.guard == nil {
		return h, nil
	}
	if h, err = s.guarded(ctx, h); err != nil {
		done()
		free()
	}
	return h, err
}

// guarded has h begin on a connection that commits nothing before h.allow.
func (s *Store) guarded(ctx context.Context, h hold) (hold, error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return hold{}, err
	}
	var allowed atomic.Bool
	err = conn.Raw(func(c any) error { return s.guard(c, func() bool { return !allowed.Load() }) })
	if err != nil {
		discard(conn)
		return hold{}, err
	}
	leave := func(clean bool) {
		if conn.Raw(func(c any) error { return s.guard(c, nil) }) != nil {
			discard(conn)
		}
		conn.Close() //nolint:errcheck // it goes back to the pool, or is closed already
		h.leave(clean)
	}
	return hold{beginner: conn, allow: func() { allowed.Store(true) }, leave: leave, guarded: true}, nil
}

// durable: SQLite shows a commit to nobody before it is on disk.
func (*sqlite) durable(context.Context, *Store, dedup.Key, row) error { return nil }

// settled needs no lock: a COMMIT within this process is over when it returns.
func (*sqlite) settled(ctx context.Context, s *Store, k dedup.Key) (row, error) {
	return querier{s: s}.get(ctx, k.Scope, k.ID)
}

func (*sqlite) purge(ctx context.Context, s *Store, n int) (int, error) {
	removed, err := querier{s: s}.exec(ctx, s.q.purge, int64(n))
	return int(removed), err
}

// peek answers replays without a transaction, which would have to wait for its
// turn.
func (*sqlite) peek(ctx context.Context, s *Store, c *claim) (dedup.Result, bool, error) {
	r, err := querier{s: s}.get(ctx, c.scope, c.id)
	if isNoRows(err) {
		return dedup.Result{}, false, nil
	}
	if err != nil {
		return dedup.Result{}, false, err
	}
	res, st := c.judge(&r, s)
	return res, st == nil && res.State != dedup.Won && res.State != dedup.Abandoned, nil
}
