package outbox

import (
	"context"
	"crypto/rand"
	"time"
)

// Token fences a claim: whatever is written back about a message is written only
// where the message still has the claim's token.
type Token [16]byte

// NewToken returns a random token.
func NewToken() Token {
	var t Token
	_, _ = rand.Read(t[:]) // never fails: see crypto/rand
	return t
}

// Claim is messages leased to one relay.
type Claim struct {
	Token    Token
	Messages []Message // by Seq
}

// Store is where a relay has its messages from. Package outboxtest has the tests
// that an implementation must pass. Its methods are safe for concurrent use, in
// this process and others. Times are by the database's clock.
type Store interface {
	// Claim leases at most limit messages. Of each key it takes the first ones
	// that are not published yet, without a gap; or none, if the first is
	// leased, waits for its next try, or is poison that holds its key back.
	// Messages that are claimed by others at the same time are passed over, not
	// waited for. No messages is no error.
	Claim(ctx context.Context, limit int, lease time.Duration) (Claim, error)

	// Renew has the lease of these messages last from now on, and returns how
	// many still have the token.
	Renew(ctx context.Context, token Token, seqs []int64, lease time.Duration) (int, error)

	// Settle writes back what came of messages and ends their lease. All of it
	// is written or nothing. It returns how many still had the token; nothing
	// is written of others.
	Settle(ctx context.Context, token Token, outcomes []Outcome) (int, error)

	// Purge removes at most limit messages whose time of retention is over, and
	// returns how many. It never removes one that is not published.
	Purge(ctx context.Context, limit int) (int, error)

	// Wakeups gets a value when there may be messages to claim. It may be nil.
	Wakeups() <-chan struct{}
}

// Fate is what becomes of a claimed message.
type Fate uint8

// The fates.
const (
	Published  Fate = iota + 1 // the broker has it
	Released                   // not tried, or not reached: available after the delay, no attempt spent
	Failed                     // available after the delay, an attempt spent
	Blocked                    // poison: it stays first of its key, which waits for an operator
	DeadLetter                 // poison: put aside, its key goes on
)

// String returns the fate's name.
func (f Fate) String() string {
	if int(f) < len(fates) {
		return fates[f]
	}
	return "unknown"
}

var fates = [...]string{"unknown", "published", "released", "failed", "blocked", "dead letter"}

// Outcome is what came of one message.
type Outcome struct {
	Seq   int64
	Fate  Fate
	Delay time.Duration // of Released and Failed
	Err   string        // of Failed, Blocked and DeadLetter
}
