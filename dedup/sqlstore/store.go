package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// DefaultBusyTimeout is [Options.BusyTimeout] if that is 0.
const DefaultBusyTimeout = 5 * time.Second

// Options are the settings of a [Store]. The zero value works, except that
// MySQL needs Classify.
type Options struct {
	// Table is the table's name ("idempotency_keys" if empty), with a schema
	// before it if you like, and not with SQLite. ASCII letters, digits and _.
	Table string

	// Classify tells a driver's errors apart. nil understands PostgreSQL's
	// pgx and lib/pq, and modernc.org/sqlite. For MySQL it is required, and
	// mysqldb.Classify of drivers/mysql fits.
	Classify func(error) Class

	// Isolation is that of transactions in transaction mode; 0 is the
	// database's default. All levels are safe; see [dedup.ErrSerialization] for
	// what REPEATABLE READ and SERIALIZABLE cost. SQLite has only one level.
	Isolation sql.IsolationLevel

	// BusyTimeout is how long a write waits for its turn with SQLite, where
	// this Store lets one transaction write at a time (5 s if 0).
	BusyTimeout time.Duration

	// Guard makes a connection of the driver's refuse to commit while refuse
	// returns true, or, if refuse is nil, makes it as it was before. With
	// SQLite, it keeps work that goes on after the database has rolled its
	// transaction back (for an interrupted statement, or a full disk) from
	// committing each further statement by itself. sqlitedb.NewStore of
	// drivers/sqlite brings one. nil: no guard. Others don't need it.
	Guard func(driverConn any, refuse func() bool) error

	// Prepare makes the Store prepare its statements, once for each connection,
	// for drivers that don't remember them by themselves: lib/pq. With MySQL
	// and SQLite it always does; with pgx it must not, which has its own cache,
	// and a mode for pgbouncer.
	Prepare bool
}

// Store is a dedup table in a SQL database. It is safe for concurrent use.
// Several stores, in any number of processes, may share a table.
type Store struct {
	db        *sql.DB
	dialect   dialect
	q         queries
	classify  func(error) Class
	guard     func(driverConn any, refuse func() bool) error
	isolation sql.IsolationLevel
	fullName  string // of the table, for names of locks
	preparer  preparer
}

var _ dedup.TxStore = (*Store)(nil)

// New returns a Store on db, which stays the caller's to close. It does not
// touch the database; see [Store.Migrate].
func New(db *sql.DB, d Dialect, opts Options) (*Store, error) {
	if db == nil {
		return nil, errors.New("sqlstore: db is nil")
	}
	if opts.BusyTimeout < 0 {
		return nil, errors.New("sqlstore: BusyTimeout must not be negative")
	}
	name := opts.Table
	if name == "" {
		name = DefaultTable
	}
	t, err := parseTable(d, name)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, classify: opts.Classify, guard: opts.Guard, isolation: opts.Isolation, fullName: name}
	s.preparer.wanted = opts.Prepare
	switch d {
	case Postgres:
		s.dialect = postgres{}
		if s.classify == nil {
			s.classify = classifyPostgres
		}
	case MySQL:
		if s.classify == nil {
			return nil, errors.New("sqlstore: MySQL needs Options.Classify, for which see drivers/mysql")
		}
		s.dialect = &mysql{}
		s.preparer.wanted = true
	case SQLite:
		timeout := opts.BusyTimeout
		if timeout == 0 {
			timeout = DefaultBusyTimeout
		}
		s.dialect = newSQLite(timeout)
		s.isolation = sql.LevelDefault
		s.preparer.wanted = true
		if s.classify == nil {
			s.classify = classifySQLite
		}
	default:
		return nil, fmt.Errorf("sqlstore: no such dialect: %d", uint8(d))
	}
	s.q = s.dialect.queries(t)
	return s, nil
}

// Claim implements [dedup.Store].
func (s *Store) Claim(ctx context.Context, dc dedup.Claim) (dedup.Result, error) {
	c, err := s.newClaim(dc)
	if err != nil {
		return dedup.Result{}, err
	}
	var res dedup.Result
	err = s.again(ctx, func() (err error) {
		if res, err = c.settle(ctx, querier{s: s}); err != nil {
			return err
		}
		return c.durable(ctx, s, res)
	})
	if err != nil {
		return dedup.Result{}, s.wrap("claim", err)
	}
	return res, nil
}

// Renew implements [dedup.Store].
func (s *Store) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	return s.fenced(ctx, "renew", s.q.renew, key, token, true, duration(lease))
}

// Complete implements [dedup.Store].
func (s *Store) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	if err := checkCompletion(c); err != nil {
		return err
	}
	return s.fenced(ctx, "complete", s.q.complete, key, token, false, completionArgs(c)...)
}

// Release implements [dedup.Store].
func (s *Store) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	return s.fenced(ctx, "release", s.q.release, key, token, true)
}

// fenced runs a statement that only the holder of token may.
func (s *Store) fenced(ctx context.Context, call string, st *statement, key dedup.Key, token dedup.Token, running bool, args ...any) error {
	if err := key.Validate(); err != nil {
		return err
	}
	scope, id := s.dialect.key(key)
	var n int64
	err := s.again(ctx, func() (err error) {
		n, err = querier{s: s}.exec(ctx, st, append([]any{scope, id, token[:]}, args...)...)
		return err
	})
	if err != nil {
		return s.wrap(call, err)
	}
	if n > 0 {
		return nil
	}
	// MySQL counts no row that it had not to change (without clientFoundRows),
	// so nothing follows from 0 alone.
	r, err := querier{s: s}.get(ctx, scope, id)
	switch {
	case isNoRows(err):
		return dedup.ErrLeaseLost
	case err != nil:
		return s.wrap(call, err)
	case !r.holds(token), r.expired(), running && !r.is(dedup.StatusInProgress), st == s.q.release:
		return dedup.ErrLeaseLost
	}
	return s.wrap(call, s.dialect.durable(ctx, s, key, r))
}

// Get implements [dedup.Store].
func (s *Store) Get(ctx context.Context, key dedup.Key) (dedup.Record, error) {
	if err := key.Validate(); err != nil {
		return dedup.Record{}, err
	}
	scope, id := s.dialect.key(key)
	r, err := querier{s: s}.get(ctx, scope, id)
	if isNoRows(err) || err == nil && r.expired() {
		return dedup.Record{}, dedup.ErrNotFound
	}
	if err == nil {
		err = s.dialect.durable(ctx, s, key, r)
	}
	if err != nil {
		return dedup.Record{}, s.wrap("get", err)
	}
	return r.record(), nil
}

// Resolve implements [dedup.Store]. It changes the row's token, so that a run
// that is still going on after all can no longer complete it.
func (s *Store) Resolve(ctx context.Context, key dedup.Key, r *dedup.Response, ttl time.Duration) error {
	if err := key.Validate(); err != nil {
		return err
	}
	scope, id := s.dialect.key(key)
	st, args := s.q.free, []any{scope, id}
	if r != nil {
		c := dedup.Completion{Status: dedup.StatusCompleted, Response: *r, TTL: ttl}
		if err := checkCompletion(c); err != nil {
			return err
		}
		token := dedup.NewToken()
		st, args = s.q.resolve, append(args, token[:], r.Code, r.Header, r.Body, duration(ttl))
	}
	var n int64
	err := s.again(ctx, func() (err error) {
		n, err = querier{s: s}.exec(ctx, st, args...)
		return err
	})
	if err != nil {
		return s.wrap("resolve", err)
	}
	if n > 0 {
		return nil
	}
	if _, err := s.Get(ctx, key); err != nil {
		return err
	}
	return dedup.ErrNotResolvable
}

// Purge implements [dedup.Store]. It works in batches of at most 1,000 rows,
// each in a transaction of its own.
func (s *Store) Purge(ctx context.Context, limit int) (int, error) {
	total := 0
	for total < limit {
		batch := min(limit-total, maxBatch)
		var n int
		err := s.again(ctx, func() (err error) {
			n, err = s.dialect.purge(ctx, s, batch)
			return err
		})
		total += n
		if err != nil {
			return total, s.wrap("purge", err)
		}
		if n < batch {
			break
		}
	}
	return total, nil
}

const maxBatch = 1000

func checkCompletion(c dedup.Completion) error {
	switch {
	case c.Status != dedup.StatusCompleted && c.Status != dedup.StatusUnknown:
		return fmt.Errorf("sqlstore: can't complete with status %d", c.Status)
	case c.TTL <= 0:
		return fmt.Errorf("sqlstore: TTL must be positive, and is %v", c.TTL)
	case c.Response.Code < math.MinInt32 || c.Response.Code > math.MaxInt32:
		return fmt.Errorf("sqlstore: code %d does not fit 32 bits", c.Response.Code)
	}
	return nil
}

// completionArgs follow key and token in queries.complete.
func completionArgs(c dedup.Completion) []any {
	return []any{c.Response.Code, c.Response.Header, c.Response.Body, duration(c.TTL), int64(c.Status)}
}
