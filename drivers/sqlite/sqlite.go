// Package sqlitedb opens SQLite databases, by modernc.org/sqlite and so without
// cgo, with the settings that package sqlstore does best with.
//
//	db, err := sqlitedb.Open("app.db")
//	store, err := sqlitedb.NewStore(db, sqlstore.Options{})
//	err = store.Migrate(ctx)
package sqlitedb

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/effectonce/idempotency/dedup/sqlstore"
)

// maxConns bounds the memory of the connections' caches. Only one connection
// can write at a time; the others read.
const maxConns = 16

// Open opens the database in the file at path, which is made if there is none.
// Its settings:
//
//   - journal_mode is WAL, so that readers, replays among them, don't wait for
//     a writer;
//   - synchronous is FULL, so that what was committed survives a power cut;
//   - busy_timeout is 5 seconds, for writers in other processes, and for those
//     in this one that don't go through a store;
//   - foreign_keys is on;
//   - a transaction takes the write lock when it begins (BEGIN IMMEDIATE),
//     since one that reads first and then writes can't wait for the lock.
//     Begin one that only reads with [sql.TxOptions].ReadOnly.
//
// Further pragmas, such as "synchronous(NORMAL)", override these; they are run
// as SQL, so they must not come from outside. An in-memory database is refused,
// since each connection would have one of its own; dedup/memstore is in memory.
//
// Don't open one file twice in a process, and don't put it on a network file
// system.
func Open(path string, pragmas ...string) (*sql.DB, error) {
	if path == "" || strings.Contains(path, ":memory:") {
		return nil, errors.New("sqlitedb: want the path of a file, since a database in memory would be another one for each connection")
	}
	q := url.Values{"_txlock": {"immediate"}}
	for _, p := range []string{"busy_timeout(5000)", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)"} {
		if !slices.ContainsFunc(pragmas, func(o string) bool { return name(o) == name(p) }) {
			q.Add("_pragma", p)
		}
	}
	for _, p := range pragmas {
		q.Add("_pragma", p)
	}
	// SQLite decodes a URI's path, so that a name may have "?" or "%" in it.
	dsn := url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", dsn.String())
	if err != nil {
		return nil, fmt.Errorf("sqlitedb: %w", err)
	}
	db.SetMaxOpenConns(maxConns)
	db.SetMaxIdleConns(maxConns)
	return db, nil
}

// name returns the name of a pragma that is written "name(value)" or "name=value".
func name(pragma string) string {
	if i := strings.IndexAny(pragma, "(="); i >= 0 {
		pragma = pragma[:i]
	}
	return strings.ToLower(strings.TrimSpace(pragma))
}

// NewStore is [sqlstore.New] for a database of [Open].
func NewStore(db *sql.DB, opts sqlstore.Options) (*sqlstore.Store, error) {
	if opts.Classify == nil {
		opts.Classify = Classify
	}
	if opts.Guard == nil {
		opts.Guard = Guard
	}
	return sqlstore.New(db, sqlstore.SQLite, opts)
}

// Classify tells the errors of modernc.org/sqlite apart, for
// [sqlstore.Options]. See https://www.sqlite.org/rescode.html.
func Classify(err error) sqlstore.Class {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return sqlstore.Other
	}
	if e.Code() == sqlite3.SQLITE_BUSY_SNAPSHOT {
		return sqlstore.Serialization // read first, and written by another since
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return sqlstore.Busy
	case sqlite3.SQLITE_CONSTRAINT:
		return sqlstore.Conflict
	}
	return sqlstore.Other
}

// Guard makes a connection of modernc.org/sqlite commit nothing while refuse
// returns true, for [sqlstore.Options]. It takes the connection's only commit
// hook.
func Guard(driverConn any, refuse func() bool) error {
	c, ok := driverConn.(sqlite.HookRegisterer)
	if !ok {
		return fmt.Errorf("sqlitedb: %T has no commit hook", driverConn)
	}
	if refuse == nil {
		c.RegisterCommitHook(nil)
		return nil
	}
	c.RegisterCommitHook(func() int32 {
		if refuse() {
			return 1
		}
		return 0
	})
	return nil
}
