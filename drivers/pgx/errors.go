package pgxstore

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/idempotency/dedup"
)

// ErrNotYours is what the transaction of [Tx] answers to Commit and Rollback:
// both are up to the engine. Return from the work to commit, and call
// [dedup.Rollback] before that to drop what was written. For a part of the work
// that may fail, Begin makes a savepoint.
var ErrNotYours = errors.New("pgxstore: the transaction is the engine's to commit or roll back")

// SQLSTATEs, from PostgreSQL's appendix A.
const (
	codeSerialization     = "40001"
	codeCompletionUnknown = "40003"
	codeDeadlock          = "40P01"
	codeResolutionUnknown = "08007"
	codeAborted           = "25P02"
	codeUnique            = "23505"
	codeDuplicateObject   = "42710"
	codeDuplicateTable    = "42P07"
	codeLockTimeout       = "55P03"
	codeTooMany           = "53300"
	codeStarting          = "57P03"
)

// codeOf returns the SQLSTATE of the server's error in err, and "" if there is
// none.
func codeOf(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		return pe.Code
	}
	return ""
}

// refused reports whether err is a statement's failure that the server told us
// of, so that it is certain that it rolled back. A FATAL error is not: a
// shutdown may hit a commit that has taken effect.
func refused(err error) bool {
	var pe *pgconn.PgError
	if !errors.As(err, &pe) || pe.Code == codeCompletionUnknown || pe.Code == codeResolutionUnknown {
		return false
	}
	severity := pe.SeverityUnlocalized
	if severity == "" {
		severity = pe.Severity
	}
	return severity != "FATAL" && severity != "PANIC"
}

func lostRace(err error) bool {
	code := codeOf(err)
	return code == codeSerialization || code == codeDeadlock
}

// wrap names the call, and tells what wrote nothing apart from what may have.
func wrap(call string, err error) error {
	if err == nil {
		return nil
	}
	switch codeOf(err) {
	case codeLockTimeout, codeSerialization, codeDeadlock, codeTooMany, codeStarting:
		return fmt.Errorf("pgxstore: %s: %w: %w", call, dedup.ErrBusy, err)
	}
	return fmt.Errorf("pgxstore: %s: %w", call, err)
}
