package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
)

// queries are the statements of one store. Arguments are written $1, $2, …
// whatever the dialect; the order is that of the comments.
type queries struct {
	schema      string // statements between ";"
	exists      string // fails, or gives false, where there is no table
	migrateLock string // lets one node at a time migrate, until the transaction ends; may be empty

	insert   *statement // claimArgs
	insertTx *statement // claimArgs, and the dialect's lock
	get      *statement // key
	reclaim  *statement // claimArgs, old token: takes an expired row
	takeover *statement // claimArgs, old token: takes an abandoned row
	renew    *statement // key, token, lease
	complete *statement // key, token, code, header, body, ttl, status
	release  *statement // key, token
	resolve  *statement // key, token, code, header, body, ttl
	free     *statement // key
	purge    *statement // limit

	lockRow   *statement // key; MySQL only
	touch     *statement // key, token; MySQL only
	purgeRows string     // keys follow; MySQL only
}

// syntax is what the common statements need to know of a dialect.
type syntax struct {
	table   string // quoted
	now     string // an instant, by the database's clock
	after   string // an instant, {n} microseconds from now
	instant string // reads the column {c} as micros can scan it
	stamp   string // what else is set with an outcome; may be empty
}

// common returns the statements that differ in syntax only.
func (x syntax) common() queries {
	const (
		// An expired row is absent to everybody.
		expired = `expires_at <= {now} AND (status = 2 OR status = 1 AND lease_until <= {now})`
		present = `(expires_at > {now} OR status = 3 OR status = 1 AND lease_until > {now})`
		doubt   = `(status = 3 OR status = 1 AND lease_until <= {now} AND expires_at > {now})`
		mine    = ` WHERE scope = $1 AND id_key = $2 AND token = $3 AND `
	)
	return queries{
		get: x.statement(`SELECT {columns} FROM {table} WHERE scope = $1 AND id_key = $2`),
		reclaim: x.statement(`UPDATE {table} SET token = $3, fingerprint = $4, status = 1, attempt = 1,
			lease_until = {after $5}, created_at = {now}, expires_at = {after $6}, code = 0, header = NULL, body = NULL
			WHERE scope = $1 AND id_key = $2 AND token = $7 AND ` + expired),
		takeover: x.statement(`UPDATE {table} SET token = $3, attempt = attempt + 1,
			lease_until = {after $5}, expires_at = {after $6}
			WHERE scope = $1 AND id_key = $2 AND token = $7 AND fingerprint = $4
			AND status = 1 AND lease_until <= {now} AND expires_at > {now}`),
		renew: x.statement(`UPDATE {table} SET lease_until = {after $4}` + mine + `status = 1 AND ` + present),
		// status comes last: MySQL assigns from left to right.
		complete: x.statement(`UPDATE {table} SET {stamp}expires_at = {after $7},
			code = CASE WHEN status = 1 THEN $4 ELSE code END,
			header = CASE WHEN status = 1 THEN $5 ELSE header END,
			body = CASE WHEN status = 1 THEN $6 ELSE body END,
			status = CASE WHEN status = 1 THEN $8 ELSE status END` + mine + present),
		release: x.statement(`DELETE FROM {table}` + mine + `status = 1 AND ` + present),
		resolve: x.statement(`UPDATE {table} SET {stamp}token = $3, status = 2, code = $4, header = $5, body = $6, expires_at = {after $7}
			WHERE scope = $1 AND id_key = $2 AND ` + doubt),
		free: x.statement(`DELETE FROM {table} WHERE scope = $1 AND id_key = $2 AND ` + doubt),
	}
}

// columns are read by row.scan, in this order.
const columns = `token, fingerprint, status, attempt, code, header, body, {c created_at}, {c expires_at}, {c lease_until}, {c {now}}`

func (x syntax) statement(text string) *statement {
	return &statement{text: x.expand(text)}
}

func (x syntax) expand(text string) string {
	text = strings.ReplaceAll(text, "{columns}", columns)
	text = strings.ReplaceAll(text, "{stamp}", x.stamp)
	text = strings.ReplaceAll(text, "{table}", x.table)
	text = strings.ReplaceAll(text, "{c {now}}", strings.ReplaceAll(x.instant, "{c}", x.now))
	text = strings.ReplaceAll(text, "{now}", x.now)
	for _, c := range []string{"created_at", "expires_at", "lease_until"} {
		text = strings.ReplaceAll(text, "{c "+c+"}", strings.ReplaceAll(x.instant, "{c}", c))
	}
	for _, n := range []string{"$4", "$5", "$6", "$7"} {
		text = strings.ReplaceAll(text, "{after "+n+"}", strings.ReplaceAll(x.after, "{n}", n))
	}
	return text
}

// statement is one query, with its preparation where the driver does not cache
// it.
type statement struct {
	text     string
	order    []int // which argument each placeholder takes; nil: as they come
	prepared atomic.Pointer[sql.Stmt]
}

// positional rewrites $1, $2, … to question marks.
func (st *statement) positional() {
	var b strings.Builder
	st.order = []int{}
	text := st.text
	for i := 0; i < len(text); i++ {
		if text[i] == '$' && i+1 < len(text) && '1' <= text[i+1] && text[i+1] <= '9' {
			st.order = append(st.order, int(text[i+1]-'1'))
			b.WriteByte('?')
			i++
			continue
		}
		b.WriteByte(text[i])
	}
	st.text = b.String()
}

func (st *statement) args(args []any) []any {
	if st.order == nil {
		return args
	}
	out := make([]any, len(st.order))
	for i, n := range st.order {
		out[i] = args[n]
	}
	return out
}

func (q *queries) all() []*statement {
	return []*statement{q.insert, q.insertTx, q.get, q.reclaim, q.takeover, q.renew, q.complete, q.release, q.resolve, q.free, q.purge, q.lockRow, q.touch}
}

// preparer prepares all statements once.
type preparer struct {
	wanted bool
	done   atomic.Bool
	mu     sync.Mutex
}

func (s *Store) prepare(ctx context.Context) error {
	p := &s.preparer
	if !p.wanted || p.done.Load() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done.Load() {
		return nil
	}
	for _, st := range s.q.all() {
		if st == nil || st.prepared.Load() != nil {
			continue
		}
		ps, err := s.db.PrepareContext(ctx, st.text)
		if err != nil {
			return err
		}
		st.prepared.Store(ps)
	}
	p.done.Store(true)
	return nil
}

// querier runs statements, in a transaction if tx is not nil.
type querier struct {
	s  *Store
	tx *sql.Tx
}

// exec returns the number of rows affected.
func (q querier) exec(ctx context.Context, st *statement, args ...any) (int64, error) {
	if q.tx == nil {
		if err := q.s.prepare(ctx); err != nil {
			return 0, err
		}
		done, err := q.s.dialect.write(ctx, q.s)
		if err != nil {
			return 0, err
		}
		defer done()
	}
	args = st.args(args)
	var res sql.Result
	var err error
	switch ps := st.prepared.Load(); {
	case ps != nil && q.tx != nil:
		res, err = q.tx.StmtContext(ctx, ps).ExecContext(ctx, args...)
	case ps != nil:
		res, err = ps.ExecContext(ctx, args...)
	case q.tx != nil:
		res, err = q.tx.ExecContext(ctx, st.text, args...)
	default:
		res, err = q.s.db.ExecContext(ctx, st.text, args...)
	}
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// query scans the one row of a statement into dest; sql.ErrNoRows if there is
// none. It reads to the end, unlike sql.Row, since only there it shows whether
// a statement that writes has been committed.
func (q querier) query(ctx context.Context, st *statement, dest []any, args ...any) (err error) {
	if q.tx == nil {
		if err := q.s.prepare(ctx); err != nil {
			return err
		}
	}
	args = st.args(args)
	var rows *sql.Rows
	switch ps := st.prepared.Load(); {
	case ps != nil && q.tx != nil:
		rows, err = q.tx.StmtContext(ctx, ps).QueryContext(ctx, args...)
	case ps != nil:
		rows, err = ps.QueryContext(ctx, args...)
	case q.tx != nil:
		rows, err = q.tx.QueryContext(ctx, st.text, args...)
	default:
		rows, err = q.s.db.QueryContext(ctx, st.text, args...)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	found := rows.Next()
	if found {
		if err := rows.Scan(dest...); err != nil {
			return err
		}
		for rows.Next() {
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if !found {
		return sql.ErrNoRows
	}
	return nil
}

// get reads a row, expired or not; sql.ErrNoRows if there is none.
func (q querier) get(ctx context.Context, scope, id any) (row, error) {
	var r row
	err := q.query(ctx, q.s.q.get, r.dest(), scope, id)
	return r, err
}
