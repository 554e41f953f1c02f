package dedup

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// Defaults of [Engine].
const (
	DefaultLease   = 30 * time.Second
	DefaultTTL     = 24 * time.Hour
	DefaultLimit   = 5 * time.Minute
	DefaultRetries = 5
)

// Mode says how claim, work and completion are committed.
type Mode uint8

// The modes. The package comment says how to choose.
const (
	Lease       Mode = iota // claim and completion are commits of their own
	Transaction             // all in one transaction; needs a [TxStore]
)

// Policy says what becomes of an operation whose run ended without an outcome:
// the process died, or could not store the answer, and the lease ran out.
type Policy uint8

// The policies.
const (
	// Fail marks the row unknown, and every request is told so until somebody
	// calls [Store.Resolve]. Nothing runs twice.
	Fail Policy = iota

	// Reexecute runs the work again, with [Attempt] greater than 1. Only for
	// work that is idempotent by design, or whose own calls carry derived keys.
	Reexecute

	// Recover calls [Engine.Recover] to find out what happened.
	Recover
)

// Engine runs operations once. Its fields must not change after the first call
// of Do; it must not be copied. Only Store is required.
type Engine struct {
	Store Store
	Mode  Mode

	// Lease is how long a run stays claimed without a sign of life (30 s if 0).
	// It is renewed at each third while the work runs.
	Lease time.Duration

	// TTL is how long an outcome is kept (24 h if 0).
	TTL time.Duration

	// Wait is how long Do waits for another's run of the same operation before
	// it reports InProgress (0: not at all).
	Wait time.Duration

	// Limit bounds one run of the work (5 min if 0): its context expires then
	// and its lease is no longer renewed.
	Limit time.Duration

	// Abandoned says what to do with a run that nobody finished.
	Abandoned Policy

	// Recover finds out what became of an abandoned operation and returns its
	// answer, or an error if it can't be known now; the next request asks again.
	// It runs under the claim like the work itself.
	Recover func(ctx context.Context, key Key, rec Record) (Response, error)

	// Retries is how often a transaction that lost a race is run again before
	// [ErrSerialization] is returned (5 if 0, none if negative).
	Retries int

	// Observer is told of every step, synchronously; nil for none.
	Observer func(ctx context.Context, e Event)

	// Logger gets a line for what an operator should look into; nil for none.
	Logger *slog.Logger

	waiters waiters
}

// Request says which operation is asked for.
type Request struct {
	Key Key

	// Fingerprint identifies what was asked, so that one key is not used for
	// two different requests. At most 64 bytes.
	Fingerprint []byte

	// Matches reports whether stored, made by an older way of computing
	// fingerprints, stands for this request too. nil: only equal bytes match.
	Matches func(stored []byte) bool
}

// Work does the operation. Its context does not end when the caller goes away;
// it ends after [Engine.Limit], or with cause [ErrLeaseLost].
//
// An error means that the work has no answer to keep. In transaction mode all
// is rolled back and the key is free. In lease mode it is not known what
// happened: the lease ends at once and the next request is handled by
// [Engine.Abandoned], unless the work called [NotExecuted].
//
// In transaction mode work may be called again, after a rollback.
type Work func(ctx context.Context) (Answer, error)

// Answer is the result of [Work].
type Answer struct {
	Response Response

	// Free says that nothing happened: the response is returned but not kept,
	// what the transaction wrote is rolled back, and the key is free again.
	Free bool
}

// Outcome is the result of [Engine.Do].
type Outcome struct {
	// State is [Won] (the work ran now), [Completed] (the stored answer of an
	// earlier run), [InProgress], [Mismatch] or [Unknown].
	State State

	// Response is the answer, for Won and Completed.
	Response Response

	// Stored says that Response will be the answer to every later request.
	// False for Won where the key was left free.
	Stored bool

	// Aborted says that the key is free, since the work left a transaction
	// behind that could not be committed. A Response that speaks of success is
	// then not true.
	Aborted bool

	// Attempt counts the runs that were started, for Won and Completed.
	Attempt int

	// RetryAfter is when to ask again, for InProgress.
	RetryAfter time.Duration
}

// Validate reports why e cannot work, as an error that wraps [ErrConfig]. Do
// checks it too.
func (e *Engine) Validate() error {
	if e.Store == nil {
		return fmt.Errorf("%w: Store is nil", ErrConfig)
	}
	if e.Lease < 0 || e.TTL < 0 || e.Wait < 0 || e.Limit < 0 {
		return fmt.Errorf("%w: Lease, TTL, Wait and Limit must not be negative", ErrConfig)
	}
	switch e.Mode {
	case Lease:
	case Transaction:
		if _, ok := e.Store.(TxStore); !ok {
			return fmt.Errorf("%w: %T has no transactions", ErrConfig, e.Store)
		}
	default:
		return fmt.Errorf("%w: no such mode: %d", ErrConfig, e.Mode)
	}
	switch e.Abandoned {
	case Fail, Reexecute:
	case Recover:
		if e.Recover == nil {
			return fmt.Errorf("%w: the policy is Recover, but the Recover function is nil", ErrConfig)
		}
	default:
		return fmt.Errorf("%w: no such policy: %d", ErrConfig, e.Abandoned)
	}
	return nil
}

// Do makes sure that the operation r.Key happens once. It runs work if nobody
// has, and otherwise reports what became of the earlier run.
//
// An error says that there is no answer now:
//   - [ErrConfig] or [ErrInvalidKey]: the call can't work; nothing ran.
//   - [ErrLeaseLost], [ErrNotStored], [ErrTxEnded]: work ran, but its answer
//     is not the operation's and must not be given out as such. Asking again
//     gives the definite answer.
//   - an error of work itself; see [Work].
//   - the context's error, while waiting for another's run.
//   - any other error is the store's: nothing ran. Ask again later.
func (e *Engine) Do(ctx context.Context, r Request, work Work) (Outcome, error) {
	if err := e.Validate(); err != nil {
		return Outcome{}, err
	}
	if err := r.Key.Validate(); err != nil {
		return Outcome{}, err
	}
	if len(r.Fingerprint) > MaxFingerprintLength {
		return Outcome{}, fmt.Errorf("%w: the fingerprint has %d bytes, the most is %d", ErrConfig, len(r.Fingerprint), MaxFingerprintLength)
	}
	c := Claim{
		Key:         r.Key,
		Fingerprint: r.Fingerprint,
		Token:       NewToken(),
		Lease:       orDefault(e.Lease, DefaultLease),
		TTL:         orDefault(e.TTL, DefaultTTL),
	}
	attempt := e.attemptLease
	if e.Mode == Transaction {
		attempt = e.attemptTx
	}
	var w *wait
	for {
		out, err := attempt(ctx, c, work)
		switch {
		case err != nil:
			return out.Outcome, err
		case out.State == Mismatch && r.Matches != nil && r.Matches(out.fingerprint):
			// The row was made by an older fingerprint of the same request.
			c.Fingerprint, r.Matches = out.fingerprint, nil
			continue
		case out.State != InProgress || e.Wait == 0:
			return out.Outcome, nil
		}
		if w == nil {
			w = e.startWait(ctx, r.Key)
			defer w.stop()
			continue // once more, since the run may have ended before we listened
		}
		if more, err := w.next(ctx); err != nil || !more {
			return out.Outcome, err
		}
	}
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}
