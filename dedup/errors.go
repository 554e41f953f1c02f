package dedup

import "errors"

// Errors of stores. A store may wrap them; test with [errors.Is]. Any other
// error of a store means that it could not be asked, or that its answer was
// lost: whether the call took effect is then unknown.
var (
	// ErrInvalidKey: the key cannot be stored. See [Key.Validate].
	ErrInvalidKey = errors.New("dedup: invalid key")

	// ErrLeaseLost: the caller's token is not the row's current one, or the
	// row is gone. Somebody else may be running the operation by now.
	ErrLeaseLost = errors.New("dedup: lease lost")

	// ErrNotFound: there is no row, or only an expired one.
	ErrNotFound = errors.New("dedup: no such key")

	// ErrNotResolvable: the row is finished, or its lease is still alive, so
	// there is nothing for an operator to decide.
	ErrNotResolvable = errors.New("dedup: the key's outcome is not in doubt")

	// ErrBusy: the store is there but could not serve the call now (lock
	// timeout, SQLITE_BUSY). Nothing was written.
	ErrBusy = errors.New("dedup: store is busy")

	// ErrSerialization: the transaction lost a race against another one and
	// was rolled back whole. Running all of it again may succeed.
	ErrSerialization = errors.New("dedup: transaction lost a race")

	// ErrTxAborted: a statement of the work failed and left the transaction
	// unable to commit. It was rolled back whole.
	ErrTxAborted = errors.New("dedup: transaction was aborted by the work")

	// ErrTxEnded: the work committed or rolled back the transaction itself, so
	// what became of its writes is unknown.
	ErrTxEnded = errors.New("dedup: transaction was ended by the work")

	// ErrNotCommitted: the connection was lost while committing, and reading
	// the row again shows that nothing was committed.
	ErrNotCommitted = errors.New("dedup: transaction was not committed")
)

// Errors of [Engine.Do] beside those of the store.
var (
	// ErrNotStored: the work ran but its answer could not be stored, so it must
	// not be given out. It wraps the store's error.
	ErrNotStored = errors.New("dedup: the answer could not be stored")

	// ErrNoTransaction: [Rollback] was called where there is no transaction.
	ErrNoTransaction = errors.New("dedup: not in transaction mode")

	// ErrConfig: a field of the engine cannot work. Nothing was claimed.
	ErrConfig = errors.New("dedup: invalid configuration")
)
