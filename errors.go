package idempotency

import (
	"errors"
	"strconv"
	"strings"
)

// Error is what a request that got no response ended with. [http.Client] wraps
// it in a [url.Error]; use [errors.As]. errors.Is sees through it, to
// [context.Canceled] for one.
//
// [http.Client] has one exception: what its own Timeout ends gets an error of
// its own, with nothing inside. Who needs the key then uses a context with a
// deadline instead, or [WithKey] from the start.
type Error struct {
	// Key is the operation's key, "" if it has none. Sending the request again
	// with it, see [WithKey], goes on with the same operation.
	Key string

	// Attempts is how often the request was sent, or tried to be.
	Attempts int

	// Ambiguous says that the server may have acted: some attempt was lost
	// after it may have been sent. If false, certainly nothing was done.
	Ambiguous bool

	// Err is why the last attempt failed, and where it matters why there was
	// no further one: [ErrBodyNotRepeatable], [ErrBudgetSpent].
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("idempotency: ")
	if e.Attempts > 1 {
		b.WriteString("after " + strconv.Itoa(e.Attempts) + " attempts: ")
	}
	b.WriteString(e.Err.Error())
	if e.Ambiguous {
		b.WriteString(" (the server may have acted)")
	}
	return b.String()
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether the last attempt ran out of time, as [net.Error] has
// it.
func (e *Error) Timeout() bool {
	var t interface{ Timeout() bool }
	return errors.As(e.Err, &t) && t.Timeout()
}

// Errors in the Err of an [Error].
var (
	// ErrBodyNotRepeatable: the request's body has no GetBody and is larger
	// than MaxBufferedBody, so it could be sent only once.
	ErrBodyNotRepeatable = errors.New("not retried: the body has no GetBody and is larger than MaxBufferedBody")

	// ErrBudgetSpent: there have been too many retries lately; see [Budget].
	ErrBudgetSpent = errors.New("not retried: the retry budget is spent")

	// ErrAttemptTimeout: the attempt took longer than AttemptTimeout. It is not
	// context.DeadlineExceeded, since the caller's context has not ended.
	ErrAttemptTimeout error = attemptTimeout{}

	// ErrConfig: a field of the Transport cannot work. Nothing was sent.
	ErrConfig = errors.New("idempotency: invalid configuration")
)

type attemptTimeout struct{}

func (attemptTimeout) Error() string { return "the attempt timed out" }
func (attemptTimeout) Timeout() bool { return true }
