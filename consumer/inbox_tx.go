package consumer

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/effectonce/idempotency/dedup"
)

// session is one transaction of an [Inbox] and what is held beside it.
type session struct {
	in    *Inbox
	tx    *sql.Tx
	st    statements
	conn  *sql.Conn // MySQL: whose session holds the locks
	locks []string
}

func (in *Inbox) begin(ctx context.Context) (*session, error) {
	s := &session{in: in, st: in.Dialect.statements(in.table())}
	var err error
	if in.Dialect != MySQL {
		s.tx, err = in.DB.BeginTx(ctx, in.TxOptions)
		return s, wrap("begin", err)
	}
	if s.conn, err = in.DB.Conn(ctx); err != nil {
		return nil, wrap("begin", err)
	}
	if s.tx, err = s.conn.BeginTx(ctx, in.TxOptions); err != nil {
		s.conn.Close()
		return nil, wrap("begin", err)
	}
	return s, nil
}

// end gives everything back. After commit there is nothing to roll back.
func (s *session) end(ctx context.Context) {
	_ = s.tx.Rollback()
	if s.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	for _, name := range s.locks {
		if _, err := s.conn.ExecContext(ctx, `DO RELEASE_LOCK('`+name+`')`); err != nil {
			// A pooled connection would go on holding it: close it for good.
			_ = s.conn.Raw(func(any) error { return driver.ErrBadConn })
			break
		}
	}
	s.conn.Close()
}

// mark marks the events that are new. Their results have no status yet; those
// of the others say what is known about them. first is where each id occurs
// first.
func (s *session) mark(ctx context.Context, ids []string) (results []Result, first []int, err error) {
	results, first = make([]Result, len(ids)), make([]int, len(ids))
	seen := make(map[string]int, len(ids))
	for i, id := range ids {
		if _, ok := seen[id]; !ok {
			seen[id] = i
		}
		first[i] = seen[id]
	}
	if s.in.Dialect == Postgres && len(ids) > 1 {
		return results, first, s.markMany(ctx, ids, first, results)
	}
	for i, id := range ids {
		if first[i] < i {
			continue
		}
		fresh, err := s.markOne(ctx, id)
		switch {
		case errors.Is(err, ErrBusy):
			results[i] = busy(ErrBusy)
		case err != nil:
			return nil, nil, err
		case !fresh:
			results[i] = Result{Status: Done, Duplicate: true}
		}
	}
	return results, first, nil
}

func (s *session) markOne(ctx context.Context, id string) (bool, error) {
	if s.in.Dialect == MySQL {
		name := lockName(s.in.table(), s.in.Group, id)
		var got sql.NullInt64
		if err := s.tx.QueryRowContext(ctx, `SELECT GET_LOCK('`+name+`', 0)`).Scan(&got); err != nil {
			return false, wrap("lock", err)
		}
		if got.Int64 != 1 {
			return false, ErrBusy
		}
		s.locks = append(s.locks, name)
	}
	return s.in.markOne(ctx, s.tx, s.key(id))
}

func (s *session) key(id string) dedup.Key { return dedup.Key{Scope: s.in.Group, ID: ID(id)} }

// markMany marks all events with one statement.
func (s *session) markMany(ctx context.Context, ids []string, first []int, results []Result) error {
	type event [2]string // lock, id
	var asked []event
	var at []int
	for i, id := range ids {
		if first[i] == i {
			asked = append(asked, event{strconv.FormatInt(Lock(s.in.Table, s.in.Group, id), 10), ID(id)})
			at = append(at, i)
		}
	}
	arg, err := json.Marshal(asked)
	if err != nil {
		return wrap("mark", err)
	}
	rows, err := s.tx.QueryContext(ctx, s.st.markMany, s.in.Group, string(arg))
	if err != nil {
		return wrap("mark", err)
	}
	defer rows.Close()
	for rows.Next() {
		var pos int
		var got, fresh bool
		if err := rows.Scan(&pos, &got, &fresh); err != nil {
			return wrap("mark", err)
		}
		switch i := at[pos]; {
		case !got:
			results[i] = busy(ErrBusy)
		case !fresh:
			results[i] = Result{Status: Done, Duplicate: true}
		}
	}
	return wrap("mark", rows.Err())
}

const savepoint = "consumer_event"

// run runs the handler of one event. An error means that the transaction as a
// whole is lost.
func (s *session) run(ctx context.Context, id string, fn Handler, savepoints bool) (Result, error) {
	if savepoints {
		if _, err := s.tx.ExecContext(ctx, `SAVEPOINT `+savepoint); err != nil {
			return Result{}, wrap("savepoint", err)
		}
	}
	err := fn(context.WithValue(OperationContext(ctx, s.in.Group, id), txKey{}, s.tx))
	if !savepoints {
		if err != nil {
			return failed(err), err // rolled back by end
		}
		return Result{Status: Done}, nil
	}
	end := `RELEASE SAVEPOINT ` + savepoint
	if err != nil {
		end = `ROLLBACK TO SAVEPOINT ` + savepoint
	}
	if _, serr := s.tx.ExecContext(ctx, end); serr != nil {
		if err != nil {
			return failed(err), wrap("savepoint", fmt.Errorf("%w (after the handler failed: %s)", ended(ctx, serr), err.Error()))
		}
		return Result{}, wrap("savepoint", ended(ctx, serr))
	}
	if err == nil {
		return Result{Status: Done}, nil
	}
	key := s.key(id)
	if _, uerr := s.tx.ExecContext(ctx, s.st.unmark, s.in.arg(key.Scope), s.in.arg(key.ID)); uerr != nil {
		return failed(err), wrap("unmark", uerr)
	}
	return failed(err), nil
}

// commit commits the marks together with what the handlers wrote.
func (s *session) commit(ctx context.Context, ids []string, results []Result) error {
	if s.in.Dialect == MySQL {
		// A deadlock makes MySQL roll back and go on without a transaction. If
		// a handler took no notice, the marks are gone: don't commit the rest.
		for i, id := range ids {
			if results[i].Status != Done || results[i].Duplicate {
				continue
			}
			key, n := s.key(id), 0
			if err := s.tx.QueryRowContext(ctx, inline(s.st.marked, key.Scope, key.ID)).Scan(&n); err != nil {
				return wrap("commit", ended(ctx, err))
			}
			if n != 1 {
				return errRolledBack
			}
			break // one tells for all
		}
	}
	return wrap("commit", ended(ctx, s.tx.Commit()))
}

// ended names the error of a transaction that was ended already: with ctx, or by
// the handler.
func ended(ctx context.Context, err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w: %w", dedup.ErrTxEnded, err)
	}
	return err
}
