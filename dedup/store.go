package dedup

import (
	"context"
	"time"
)

// Store keeps the dedup table. Implementations must be safe for concurrent use,
// also by several processes on the same table, and must take every time from
// one clock, the database's where there is one. Package storetest checks all of
// what is said here.
//
// An in-progress row is "live" until its lease ends and "abandoned" from then
// on. A row is "expired" once its TTL has passed, unless it is live or unknown;
// an expired row counts as absent everywhere.
type Store interface {
	// Claim asks for the right to run an operation. It is atomic: of any number
	// of concurrent calls for one absent key, exactly one gets [Won].
	//
	// The result's State is
	//   - [Won]: there was no row; now there is one that holds c.Token, in
	//     progress. Record.Attempt is 1. A call repeated with the token that
	//     the row holds already gets what the first one got, [Won], or
	//     [Abandoned] if it took the row over, for as long as the row is in
	//     progress.
	//   - [Mismatch]: the row was made with another fingerprint, whatever its
	//     status. Record.Fingerprint is the stored one.
	//   - [InProgress]: live. Record.LeaseLeft says for how long yet.
	//   - [Completed]: Record.Response is the stored answer.
	//   - [Unknown]: the row waits for [Store.Resolve].
	//   - [Abandoned]: the row was abandoned and now holds c.Token, with a new
	//     lease and Record.Attempt one higher. The caller must complete or
	//     release it like one it won.
	//
	// Only an error means that nothing is known about who holds the row.
	Claim(ctx context.Context, c Claim) (Result, error)

	// To Renew, Complete and Release an expired row is gone.

	// Renew makes the lease end after the given duration from now; 0 or less
	// ends it at once, so that the next claim finds the row abandoned.
	// [ErrLeaseLost] if token is not the row's current one or the row is no
	// longer in progress.
	Renew(ctx context.Context, key Key, token Token, lease time.Duration) error

	// Complete stores the outcome and starts the TTL. Repeated with the same
	// token it succeeds and changes nothing but the TTL. It succeeds also after
	// the lease has ended, so long as nobody took the row over.
	// [ErrLeaseLost] if token is not the row's current one.
	Complete(ctx context.Context, key Key, token Token, c Completion) error

	// Release removes an in-progress row, since nothing happened.
	// [ErrLeaseLost] if token is not the row's current one or the row is no
	// longer in progress.
	Release(ctx context.Context, key Key, token Token) error

	// Get returns the row as it is, with all fields of [Record].
	// [ErrNotFound] if there is none.
	Get(ctx context.Context, key Key) (Record, error)

	// Resolve ends the doubt about a row that is unknown or abandoned: with a
	// response the row becomes completed with it, for ttl; with nil it is
	// removed, so that the operation may run again. The token of the run that
	// left the row behind is no longer current, in both cases. [ErrNotFound] if
	// there is no row, [ErrNotResolvable] if it is completed or live.
	Resolve(ctx context.Context, key Key, r *Response, ttl time.Duration) error

	// Purge removes at most limit expired rows and returns how many it removed.
	// Fewer than limit means that there are no more for now. It never removes a
	// live or an unknown row, and may run on any number of nodes at once.
	Purge(ctx context.Context, limit int) (int, error)
}

// MaxFingerprintLength is the most bytes that a fingerprint may have.
const MaxFingerprintLength = 64

// Claim is what [Store.Claim] and [TxStore.Begin] take.
type Claim struct {
	Key         Key
	Fingerprint []byte        // identifies the request; compared byte for byte; at most MaxFingerprintLength
	Token       Token         // fresh and random for each run, see [NewToken]
	Lease       time.Duration // how long the row stays live without Renew; positive
	TTL         time.Duration // how long the row is kept; positive
}

// Result is the answer to a [Claim]. Record holds what the State's description
// at [Store.Claim] names; its other fields may be zero.
type Result struct {
	State  State
	Record Record
}

// State says how a claim ended.
type State uint8

// The states of a [Result] and of an [Outcome]. See [Store.Claim].
const (
	Won State = iota + 1
	InProgress
	Completed
	Mismatch
	Abandoned
	Unknown
)

// String returns the state's name in lower case.
func (s State) String() string {
	switch s {
	case Won:
		return "won"
	case InProgress:
		return "in progress"
	case Completed:
		return "completed"
	case Mismatch:
		return "mismatch"
	case Abandoned:
		return "abandoned"
	case Unknown:
		return "unknown"
	}
	return "invalid"
}

// Status is the state that a row is stored in. The numbers are part of the
// stored format.
type Status uint8

// The values of [Status].
const (
	StatusInProgress Status = 1
	StatusCompleted  Status = 2
	StatusUnknown    Status = 3
)

// String returns the status as the documentation spells it.
func (s Status) String() string {
	switch s {
	case StatusInProgress:
		return "in_progress"
	case StatusCompleted:
		return "completed"
	case StatusUnknown:
		return "unknown"
	}
	return "invalid"
}

// Record is one row of the dedup table.
type Record struct {
	Fingerprint []byte
	Status      Status
	Response    Response
	Attempt     int // how many runs were started, the current one included
	Token       Token
	LeaseLeft   time.Duration // by the store's clock, 0 unless live
	CreatedAt   time.Time     // by the store's clock
	ExpiresAt   time.Time     // by the store's clock
}

// Response is a stored answer. The store keeps it byte for byte and looks at
// none of it: what a nil or empty Header or Body means is up to the caller, and
// a store may return either for the other.
type Response struct {
	Code   int // an HTTP status, or whatever the caller counts by; fits 32 bits
	Header []byte
	Body   []byte
}

// Completion is what [Store.Complete] and [Tx.Commit] store.
type Completion struct {
	Status   Status // StatusCompleted or StatusUnknown
	Response Response
	TTL      time.Duration // how long from now the row is kept; positive
}

// TxStore is a [Store] that can make claim, work and completion one
// transaction.
type TxStore interface {
	Store

	// Begin starts a transaction and claims in it, with the results of
	// [Store.Claim]. For [Won] and [Abandoned] the Tx is open and must be ended
	// by Commit or Rollback; otherwise it is nil and nothing is held.
	//
	// A key that another open transaction has claimed is [InProgress], told at
	// once and without waiting for that transaction. [ErrBusy] and
	// [ErrSerialization] mean that nothing was claimed.
	Begin(ctx context.Context, c Claim) (Tx, Result, error)
}

// Tx is an open transaction that holds a claim.
type Tx interface {
	// Context returns ctx with the transaction in it, where the store's own
	// accessor (sqlstore.Tx for one) finds it.
	Context(ctx context.Context) context.Context

	// Commit stores the completion and commits. nil means that it is committed,
	// also where the connection was lost and that was learned by reading the
	// row again. [ErrSerialization], [ErrTxAborted] and [ErrNotCommitted] mean
	// that all was rolled back, [ErrTxEnded] that the work had ended the
	// transaction. After any other error the outcome is not known here; the
	// next claim will tell.
	Commit(ctx context.Context, c Completion) error

	// Rollback drops the claim and all writes of the work. It returns
	// [ErrTxEnded] if the work had ended the transaction. A connection that is
	// lost meanwhile is no error: the database rolls back by itself.
	Rollback(ctx context.Context) error
}

// Watcher is what a [Store] may offer beside: word from other processes that
// a key's run has ended, so that waiters need not wait for their next poll.
type Watcher interface {
	// Watch returns a channel that becomes readable, or is closed, some time
	// after the row of key was completed or released. Words may be lost or come
	// without cause; the waiter claims again to see. stop frees what Watch
	// holds and must be called; calling it twice does no harm.
	Watch(ctx context.Context, key Key) (done <-chan struct{}, stop func(), err error)
}
