package dedup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"time"
)

// EventKind says what an [Event] tells of.
type EventKind uint8

// The kinds of events.
const (
	EventClaimed       EventKind = iota + 1 // a claim was answered; State says how
	EventRan                                // the work returned or panicked
	EventStored                             // the outcome was stored (committed)
	EventFreed                              // the key was left free for another try
	EventLeaseLost                          // the run's lease was lost; its answer is dropped
	EventStoreError                         // a call of the store failed
	EventTxRetry                            // a transaction lost a race and runs again
	EventOutcomeLost                        // the work ran, and what became of it is not stored
	EventMarkedUnknown                      // an abandoned row was marked unknown
)

// String returns the kind's name.
func (k EventKind) String() string {
	names := [...]string{"invalid", "claimed", "ran", "stored", "freed", "lease lost", "store error",
		"transaction retried", "outcome lost", "marked unknown"}
	if int(k) < len(names) {
		return names[k]
	}
	return names[0]
}

// Event is one step in the life of an operation.
type Event struct {
	Kind     EventKind
	Key      Key
	State    State         // EventClaimed
	Attempt  int           // where a run is concerned
	Duration time.Duration // of the store's call or of the work
	Err      error
}

// LogValue keeps idempotency keys out of logs, where they could be read and
// replayed: it shows the scope and the first bytes of the id's SHA-256.
func (k Key) LogValue() slog.Value {
	sum := sha256.Sum256([]byte(k.ID))
	return slog.GroupValue(
		slog.String("scope", k.Scope),
		slog.String("id_sha256", hex.EncodeToString(sum[:6])),
	)
}

// began returns the time for a later event's duration; zero, and so free of
// cost, where nobody listens.
func (e *Engine) began() time.Time {
	if e.Observer == nil {
		return time.Time{}
	}
	return time.Now()
}

func (e *Engine) observe(ctx context.Context, began time.Time, ev Event) {
	if e.Observer == nil {
		return
	}
	ev.Duration = time.Since(began)
	e.Observer(ctx, ev)
}

// storeFailed reports an error of the store that the engine copes with.
func (e *Engine) storeFailed(ctx context.Context, began time.Time, call string, key Key, err error) {
	e.observe(ctx, began, Event{Kind: EventStoreError, Key: key, Err: err})
	e.warn(ctx, "store call failed", key, slog.String("call", call), slog.Any("err", err))
}

func (e *Engine) warn(ctx context.Context, msg string, key Key, attrs ...slog.Attr) {
	if e.Logger == nil {
		return
	}
	e.Logger.LogAttrs(ctx, slog.LevelWarn, "dedup: "+msg, append(attrs, slog.Any("key", key))...)
}
