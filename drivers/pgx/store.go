package pgxstore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
)

// Defaults of [Options].
const (
	DefaultTable      = "idempotency_keys"
	DefaultLanes      = 8
	DefaultBatchRows  = 32
	DefaultBatchBytes = 1 << 20
)

// Options are the settings of a [Store]. The zero value works.
type Options struct {
	// Table is the table's name ("idempotency_keys" if empty), with a schema
	// before it if you like: ASCII letters, digits and _.
	Table string

	// Isolation is that of transactions in transaction mode; "" is the
	// database's default. All levels are safe; see [dedup.ErrSerialization] for
	// what repeatable read and serializable cost.
	Isolation pgx.TxIsoLevel

	// Lanes is how many claims and completions go to the database side by side
	// in lease mode, each as its own commit (8 if 0, and never more than the
	// pool's connections). What comes while all are taken waits for the next
	// that is free and goes in a batch with the others that wait, which costs
	// less of everything: commits, round trips, and connections.
	Lanes int

	// BatchRows and BatchBytes bound a batch (32 calls and 1 MiB if 0). With 1
	// for BatchRows there are no batches.
	BatchRows  int
	BatchBytes int
}

// Store is a dedup table in PostgreSQL. It is safe for concurrent use. Several
// stores, in any number of processes, may share a table.
type Store struct {
	pool   *pgxpool.Pool
	table  table
	sql    statements
	lanes  lanes
	guess  guess
	txOpts pgx.TxOptions
}

var _ dedup.TxStore = (*Store)(nil)

// New returns a Store on pool, which stays the caller's to close. It does not
// touch the database; see [Store.Migrate]. In transaction mode each piece of
// work holds one of the pool's connections.
func New(pool *pgxpool.Pool, opts Options) (*Store, error) {
	if pool == nil {
		return nil, errors.New("pgxstore: pool is nil")
	}
	if opts.Lanes < 0 || opts.BatchRows < 0 || opts.BatchBytes < 0 {
		return nil, errors.New("pgxstore: Lanes, BatchRows and BatchBytes must not be negative")
	}
	switch opts.Isolation {
	case "", pgx.ReadUncommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		return nil, fmt.Errorf("pgxstore: no such isolation level: %q", opts.Isolation)
	}
	t, err := parseTable(orDefault(opts.Table, DefaultTable))
	if err != nil {
		return nil, err
	}
	s := &Store{
		pool:   pool,
		table:  t,
		sql:    newStatements(t.quoted()),
		txOpts: pgx.TxOptions{IsoLevel: opts.Isolation},
	}
	s.lanes.pool = pool
	s.lanes.width = min(orDefault(opts.Lanes, DefaultLanes), int(pool.Config().MaxConns))
	s.lanes.rows = orDefault(opts.BatchRows, DefaultBatchRows)
	s.lanes.bytes = orDefault(opts.BatchBytes, DefaultBatchBytes)
	return s, nil
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// table is the name of a table, and of its schema if one was given.
type table struct{ schema, name string }

// maxTableLength leaves room for the index's suffix in the 63 bytes of an
// identifier.
const maxTableLength = 50

func parseTable(full string) (table, error) {
	t := table{name: full}
	if schema, name, ok := strings.Cut(full, "."); ok {
		t = table{schema, name}
		if !isIdentifier(schema) {
			return table{}, fmt.Errorf("pgxstore: table %q: invalid schema", full)
		}
	}
	if !isIdentifier(t.name) {
		return table{}, fmt.Errorf("pgxstore: table %q: want letters, digits and _, not a digit first, at most %d in all", full, maxTableLength)
	}
	return t, nil
}

func isIdentifier(s string) bool {
	for i, c := range []byte(s) {
		letter := c == '_' || 'a' <= c|0x20 && c|0x20 <= 'z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != "" && len(s) <= maxTableLength
}

func (t table) quoted() string {
	if t.schema == "" {
		return pgx.Identifier{t.name}.Sanitize()
	}
	return pgx.Identifier{t.schema, t.name}.Sanitize()
}

// full is the name as it was given.
func (t table) full() string {
	if t.schema == "" {
		return t.name
	}
	return t.schema + "." + t.name
}

// lockOf is the number of the advisory lock of a key.
func (s *Store) lockOf(k dedup.Key) int64 { return lockNumber(s.table.full(), k.Scope, k.ID) }

// lockNumber hashes parts with their lengths, so that ("ab", "c") is not
// ("a", "bc"). It must stay the same as in dedup/sqlstore, which may be in use
// on the same table.
func lockNumber(parts ...string) int64 {
	b := make([]byte, 0, 600)
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	sum := sha256.Sum256(b)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// Renew implements [dedup.Store].
func (s *Store) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	return s.fenced(ctx, "renew", s.sql.renew, key, token, interval(lease))
}

// Release implements [dedup.Store].
func (s *Store) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	return s.fenced(ctx, "release", s.sql.release, key, token)
}

// fenced runs a statement that only the holder of token may.
func (s *Store) fenced(ctx context.Context, name, sql string, key dedup.Key, token dedup.Token, args ...any) error {
	if err := key.Validate(); err != nil {
		return err
	}
	tag, err := s.pool.Exec(ctx, sql, append([]any{key.Scope, key.ID, token[:]}, args...)...)
	if err != nil {
		return wrap(name, err)
	}
	if tag.RowsAffected() == 0 {
		return dedup.ErrLeaseLost
	}
	return nil
}

// Complete implements [dedup.Store].
func (s *Store) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	if err := key.Validate(); err != nil {
		return err
	}
	if err := checkCompletion(c); err != nil {
		return err
	}
	call := call{
		key:  key,
		size: rowSize + len(c.Response.Header) + len(c.Response.Body),
		sql:  s.sql.complete,
		args: completionArgs(key, token, c),
	}
	if err := s.lanes.do(ctx, &call); err != nil {
		return wrap("complete", err)
	}
	if call.n == 0 {
		return dedup.ErrLeaseLost
	}
	return nil
}

// rowSize is about what a call sends beside the answer.
const rowSize = 256

func checkCompletion(c dedup.Completion) error {
	switch {
	case c.Status != dedup.StatusCompleted && c.Status != dedup.StatusUnknown:
		return fmt.Errorf("pgxstore: can't complete with status %d", c.Status)
	case c.TTL <= 0:
		return fmt.Errorf("pgxstore: TTL must be positive, and is %v", c.TTL)
	case c.Response.Code < math.MinInt32 || c.Response.Code > math.MaxInt32:
		return fmt.Errorf("pgxstore: code %d does not fit 32 bits", c.Response.Code)
	}
	return nil
}

func completionArgs(key dedup.Key, token dedup.Token, c dedup.Completion) []any {
	return []any{key.Scope, key.ID, token[:], int16(c.Status), int32(c.Response.Code),
		c.Response.Header, c.Response.Body, interval(c.TTL)}
}

// Get implements [dedup.Store].
func (s *Store) Get(ctx context.Context, key dedup.Key) (dedup.Record, error) {
	if err := key.Validate(); err != nil {
		return dedup.Record{}, err
	}
	var r row
	err := s.pool.QueryRow(ctx, s.sql.get, key.Scope, key.ID).Scan(r.fields()...)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && r.expired() {
		return dedup.Record{}, dedup.ErrNotFound
	}
	if err != nil {
		return dedup.Record{}, wrap("get", err)
	}
	return r.record(), nil
}

// Resolve implements [dedup.Store]. It changes the row's token, so that a run
// that is still going on after all can no longer complete it.
func (s *Store) Resolve(ctx context.Context, key dedup.Key, r *dedup.Response, ttl time.Duration) error {
	if err := key.Validate(); err != nil {
		return err
	}
	sql, args := s.sql.free, []any{key.Scope, key.ID}
	if r != nil {
		c := dedup.Completion{Status: dedup.StatusCompleted, Response: *r, TTL: ttl}
		if err := checkCompletion(c); err != nil {
			return err
		}
		token := dedup.NewToken()
		sql, args = s.sql.resolve, append(args, token[:], int32(r.Code), r.Header, r.Body, interval(ttl))
	}
	tag, err := s.pool.Exec(ctx, sql, args...)
	if err != nil {
		return wrap("resolve", err)
	}
	if tag.RowsAffected() > 0 {
		return nil
	}
	if _, err := s.Get(ctx, key); err != nil {
		return err
	}
	return dedup.ErrNotResolvable
}

// Purge implements [dedup.Store]. It works in batches of at most 1,000 rows,
// each a commit of its own, and passes over rows that are locked.
func (s *Store) Purge(ctx context.Context, limit int) (int, error) {
	total := 0
	for total < limit {
		batch := min(limit-total, maxPurge)
		tag, err := s.pool.Exec(ctx, s.sql.purge, batch)
		if err != nil {
			return total, wrap("purge", err)
		}
		n := int(tag.RowsAffected())
		total += n
		if n < batch {
			break
		}
	}
	return total, nil
}

const maxPurge = 1000
