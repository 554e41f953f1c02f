package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/effectonce/idempotency/dedup"
)

// Class says what kind of error a driver returned.
type Class uint8

// The classes that a Store treats apart from all others.
const (
	// Other is everything else: a lost connection, a missing table.
	Other Class = iota

	// Conflict: a constraint was violated. With MySQL it must stand for a
	// duplicate key alone, error 1062.
	Conflict

	// Serialization: the transaction lost a race and was rolled back whole, or
	// can only be; running it again may succeed.
	Serialization

	// Busy: a lock or a connection was not to be had in time; the statement did
	// nothing.
	Busy

	// Aborted: the statement was refused, since an earlier one had failed and
	// left the transaction fit for a rollback only.
	Aborted
)

// classifyPostgres goes by the five-character SQLSTATE, which both pgx and
// lib/pq offer by a method.
// https://www.postgresql.org/docs/current/errcodes-appendix.html
func classifyPostgres(err error) Class {
	var e interface{ SQLState() string }
	if !errors.As(err, &e) {
		return Other
	}
	switch state := e.SQLState(); state {
	case "40001", "40P01": // serialization_failure, deadlock_detected
		return Serialization
	case "55P03", "53300": // lock_not_available, too_many_connections
		return Busy
	case "25P02": // in_failed_sql_transaction
		return Aborted
	default:
		if len(state) == 5 && state[:2] == "23" { // integrity_constraint_violation
			return Conflict
		}
	}
	return Other
}

// classifySQLite goes by the extended result code, if the driver offers it by a
// method, as modernc.org/sqlite does. https://www.sqlite.org/rescode.html
func classifySQLite(err error) Class {
	var e interface{ Code() int }
	if !errors.As(err, &e) {
		return Other
	}
	const busySnapshot = 5 | 2<<8
	switch code := e.Code(); {
	case code == busySnapshot: // read first, and written by another since
		return Serialization
	case code&0xff == 5, code&0xff == 6: // SQLITE_BUSY, SQLITE_LOCKED
		return Busy
	case code&0xff == 19: // SQLITE_CONSTRAINT
		return Conflict
	}
	return Other
}

// wrap turns a driver's error into one of this package, for a call outside of a
// transaction, or one that began a transaction in vain.
func (s *Store) wrap(call string, err error) error {
	if err == nil {
		return nil
	}
	if !errors.Is(err, dedup.ErrBusy) && !isContext(err) {
		switch s.classify(err) {
		case Busy:
			err = fmt.Errorf("%w: %w", dedup.ErrBusy, err)
		case Serialization:
			err = fmt.Errorf("%w: %w", dedup.ErrSerialization, err)
		}
	}
	return fmt.Errorf("sqlstore: %s: %w", call, err)
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// again runs f until it loses no race against another transaction. It is for
// single statements, which are rolled back whole when they do: under REPEATABLE
// READ and SERIALIZABLE, and by deadlocks in MySQL.
func (s *Store) again(ctx context.Context, f func() error) error {
	var err error
	for range maxTries {
		if err = f(); err == nil || s.classify(err) != Serialization || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// maxTries bounds how often a call starts over because of others. A key that
// changes hands this often in the course of one call is not one key's traffic.
const maxTries = 20

func isNoRows(err error) bool { return errors.Is(err, sql.ErrNoRows) }
