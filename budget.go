package idempotency

import (
	"fmt"
	"sync"
)

// Defaults of [Budget].
const (
	DefaultBudgetCapacity = 500
	DefaultRetryCost      = 5
	DefaultRetryRefund    = 1
)

// Budget keeps retries from becoming a storm while the other side is in
// trouble: a bucket of tokens that retries take from and that fills again as
// requests succeed. The zero value works. It is safe for concurrent use and
// must not be copied.
//
// With the defaults a hundred retries in a row are possible, and afterwards
// one for five requests that succeed at once.
type Budget struct {
	Capacity int // tokens when full (500 if 0)
	Cost     int // tokens that a retry takes (5 if 0)
	Refund   int // tokens that a success at the first attempt gives back (1 if 0)

	mu    sync.Mutex
	spent int
}

func orDefault(n, def int) int {
	if n == 0 {
		return def
	}
	return n
}

func (b *Budget) validate() error {
	if b != nil && (b.Capacity < 0 || b.Cost < 0 || b.Refund < 0) {
		return fmt.Errorf("%w: fields of a Budget must not be negative", ErrConfig)
	}
	return nil
}

// take takes the tokens for a retry and reports whether there were enough.
func (b *Budget) take() bool {
	if b == nil {
		return true
	}
	cost := orDefault(b.Cost, DefaultRetryCost)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spent+cost > orDefault(b.Capacity, DefaultBudgetCapacity) {
		return false
	}
	b.spent += cost
	return true
}

// succeeded gives tokens back: those of the retry that it took, or a little for
// a request that needed none.
func (b *Budget) succeeded(retried bool) {
	if b == nil {
		return
	}
	refund := orDefault(b.Refund, DefaultRetryRefund)
	if retried {
		refund = orDefault(b.Cost, DefaultRetryCost)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(0, b.spent-refund)
}
