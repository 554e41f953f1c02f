package dedup

import (
	"context"
	"sync/atomic"
)

// run is what the context of a piece of work knows about it.
type run struct {
	key     Key
	attempt int
	mode    Mode
	free    atomic.Bool
}

type runKey struct{}

func runFrom(ctx context.Context) *run {
	r, _ := ctx.Value(runKey{}).(*run)
	return r
}

// KeyFrom returns the key of the operation that ctx belongs to, and false
// outside of any.
func KeyFrom(ctx context.Context) (Key, bool) {
	if r := runFrom(ctx); r != nil {
		return r.key, true
	}
	return Key{}, false
}

// Attempt returns which run of its operation ctx belongs to: 1 for the first,
// more after an earlier run was abandoned, 0 outside of any operation.
func Attempt(ctx context.Context) int {
	if r := runFrom(ctx); r != nil {
		return r.attempt
	}
	return 0
}

// NotExecuted says that the work did nothing that must not be repeated: its
// answer goes out but is not kept, and the key is free for another try. In
// transaction mode that is [Rollback]. Outside of an operation it does nothing.
//
// Say it only if it is certain. A call whose answer was lost may have had its
// effect.
func NotExecuted(ctx context.Context) {
	if r := runFrom(ctx); r != nil {
		r.free.Store(true)
	}
}

// Rollback says that what the work wrote through its transaction is to be
// dropped: its answer goes out but is not kept, and the key is free. It takes
// effect when the work returns.
//
// It returns [ErrNoTransaction] and changes nothing in lease mode and outside
// of an operation, since there nothing can be taken back.
func Rollback(ctx context.Context) error {
	r := runFrom(ctx)
	if r == nil || r.mode != Transaction {
		return ErrNoTransaction
	}
	r.free.Store(true)
	return nil
}
