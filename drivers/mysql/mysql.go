// Package mysqldb opens MySQL and MariaDB databases, by go-sql-driver/mysql,
// with the settings that package sqlstore does best with.
//
//	db, err := mysqldb.Open("user:password@tcp(db:3306)/app")
//	store, err := mysqldb.NewStore(db, sqlstore.Options{})
//	err = store.Migrate(ctx)
package mysqldb

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/effectonce/idempotency/dedup/sqlstore"
)

// Open opens the database of a data source name as go-sql-driver/mysql takes
// it, with these settings, whatever the name says:
//
//   - transactions are READ COMMITTED unless they ask for another level:
//     REPEATABLE READ, MySQL's default, locks gaps between rows, by which
//     inserts of different keys can dead-lock;
//   - clientFoundRows, so that an UPDATE counts the rows that it found and not
//     only those that it changed;
//   - parseTime, with times in UTC;
//   - no multiStatements, by which an injected statement would do its worst.
//
// A Store also works on a pool that was opened otherwise.
func Open(dsn string) (*sql.DB, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("mysqldb: %w", err)
	}
	cfg.ClientFoundRows = true
	cfg.ParseTime = true
	cfg.Loc = time.UTC
	cfg.MultiStatements = false
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, fmt.Errorf("mysqldb: %w", err)
	}
	return sql.OpenDB(connector{c}), nil
}

// connector sets the level by a statement, since the variable is named
// tx_isolation in older MariaDB and transaction_isolation in MySQL.
type connector struct{ driver.Connector }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	_, err = conn.(driver.ExecerContext).ExecContext(ctx, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", nil)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// NewStore is [sqlstore.New] for MySQL and MariaDB.
func NewStore(db *sql.DB, opts sqlstore.Options) (*sqlstore.Store, error) {
	if opts.Classify == nil {
		opts.Classify = Classify
	}
	return sqlstore.New(db, sqlstore.MySQL, opts)
}

// Classify tells the server's errors apart, for [sqlstore.Options]. See
// https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html.
func Classify(err error) sqlstore.Class {
	var e *mysql.MySQLError
	if !errors.As(err, &e) {
		return sqlstore.Other
	}
	switch e.Number {
	case 1062: // ER_DUP_ENTRY
		return sqlstore.Conflict
	case 1213, // ER_LOCK_DEADLOCK, and Galera's certification failure
		1020, // ER_CHECKREAD: MariaDB's innodb_snapshot_isolation
		3101: // ER_TRANSACTION_ROLLBACK_DURING_COMMIT: group replication
		return sqlstore.Serialization
	case 1205, // ER_LOCK_WAIT_TIMEOUT
		3572,       // ER_LOCK_NOWAIT
		1040, 1203: // ER_CON_COUNT_ERROR, ER_TOO_MANY_USER_CONNECTIONS
		return sqlstore.Busy
	}
	return sqlstore.Other
}
