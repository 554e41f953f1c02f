package outbox

import (
	"context"
	"errors"
)

// Publisher hands messages to a broker.
type Publisher interface {
	// Publish returns an error for each message, at its position, or nil if all
	// were published. Nil at a position means that the broker has the message
	// for good; a broker that says "I had this one already" has it. It returns
	// only when the outcome of each is known, also when ctx has ended.
	//
	// It marks errors with [ErrUnreachable], [ErrPermanent] and [ErrNotTried],
	// by wrapping them.
	//
	// No two messages of a call have the same key, unless the publisher is
	// [Ordered].
	Publish(ctx context.Context, msgs []Message) []error
}

// Ordered is a Publisher that can take several messages of one key in a call. It
// publishes them in the order they have there, and after the first of a key that
// fails it publishes none of the key: their errors are [ErrNotTried].
type Ordered interface {
	Publisher
	KeepsOrder()
}

// PublisherFunc makes a Publisher of a function that publishes one message.
type PublisherFunc func(ctx context.Context, m Message) error

// Publish implements [Publisher], one message at a time.
func (f PublisherFunc) Publish(ctx context.Context, msgs []Message) []error {
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		errs[i] = f(ctx, m)
	}
	return errs
}

// What a Publisher's errors can be.
var (
	// ErrUnreachable says that the broker could not be reached, or did not
	// answer. It costs the message no attempt, however often.
	ErrUnreachable = errors.New("outbox: broker unreachable")
	// ErrPermanent says that no further attempt will do better, as with a
	// message that is too large.
	ErrPermanent = errors.New("outbox: message refused for good")
	// ErrNotTried says that the message was not sent, since one before it
	// failed.
	ErrNotTried = errors.New("outbox: not tried, since a message before it failed")
)
