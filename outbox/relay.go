package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Poison says what happens to a message whose attempts are spent.
type Poison uint8

const (
	// BlockKey has the message's key wait for an operator (Requeue or Discard),
	// so that nothing of it is published out of order. A message without a key
	// is put aside.
	BlockKey Poison = iota
	// PutAside lets the message's key go on without it.
	PutAside
)

// Options are those of a [Relay]. The zero value works.
type Options struct {
	Batch       int           // messages claimed at a time (500 if 0)
	Lease       time.Duration // how long a relay that died keeps its messages from others (30 s if 0); renewed at a third
	Poll        time.Duration // how often to look without being woken (1 s if 0)
	Grace       time.Duration // how long a stop waits for what is being published (10 s if 0)
	MaxAttempts int           // after which a message is poison (10 if 0; negative: never)
	Poison      Poison

	// Backoff is the wait before attempt n+1 of a message, n being at least 1.
	// If nil, it doubles from 1 s to 5 min, of which a random half is taken off.
	Backoff func(n int) time.Duration

	// Unreachable is how long the relay pauses when the broker can't be
	// reached; it doubles up to eight times that (1 s if 0).
	Unreachable time.Duration

	PurgeEvery time.Duration // how often to purge (1 min if 0; negative: never)
	PurgeBatch int           // messages purged at a time (1,000 if 0)

	// Logger gets a line for each failure; nil for none. Payloads, keys and
	// headers are never logged.
	Logger *slog.Logger

	// Observe is told of each settled outcome; nil for nobody. It must be quick,
	// and safe for concurrent use.
	Observe func(m Message, fate Fate, err error)
}

// Relay publishes what a store has.
type Relay struct {
	store Store
	pub   Publisher
	opts  Options
}

// New returns a relay, or an error that Is [ErrConfig].
func New(store Store, pub Publisher, opts Options) (*Relay, error) {
	switch {
	case store == nil:
		return nil, fmt.Errorf("%w: the store is nil", ErrConfig)
	case pub == nil:
		return nil, fmt.Errorf("%w: the publisher is nil", ErrConfig)
	case opts.Batch < 0 || opts.PurgeBatch < 0:
		return nil, fmt.Errorf("%w: neither Batch nor PurgeBatch may be negative", ErrConfig)
	case opts.Batch > 10000:
		return nil, fmt.Errorf("%w: Batch is above 10,000", ErrConfig)
	case opts.Lease < 0 || opts.Poll < 0 || opts.Grace < 0 || opts.Unreachable < 0:
		return nil, fmt.Errorf("%w: none of Lease, Poll, Grace and Unreachable may be negative", ErrConfig)
	case opts.Lease > 0 && opts.Lease < 10*time.Millisecond:
		return nil, fmt.Errorf("%w: Lease is below 10 ms", ErrConfig)
	case opts.Poison > PutAside:
		return nil, fmt.Errorf("%w: no such Poison: %d", ErrConfig, opts.Poison)
	}
	setDefault(&opts.Batch, 500)
	setDefault(&opts.Lease, 30*time.Second)
	setDefault(&opts.Poll, time.Second)
	setDefault(&opts.Grace, 10*time.Second)
	setDefault(&opts.MaxAttempts, 10)
	setDefault(&opts.Unreachable, time.Second)
	setDefault(&opts.PurgeEvery, time.Minute)
	setDefault(&opts.PurgeBatch, 1000)
	if opts.Backoff == nil {
		opts.Backoff = defaultBackoff
	}
	return &Relay{store, pub, opts}, nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func defaultBackoff(n int) time.Duration { return jitter(doubled(time.Second, n-1, 5*time.Minute)) }

func doubled(d time.Duration, times int, most time.Duration) time.Duration {
	for ; times > 0 && d < most; times-- {
		d *= 2
	}
	return min(d, most)
}

// jitter takes a random half off, so that relays don't come back together.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// Run publishes until ctx ends. Then it claims nothing more, waits up to Grace
// for what is being published, settles it, and returns nil; what it had claimed
// and not begun is free for other relays at once.
//
// It goes on through failures of the database and the broker. Relays may run on
// any number of nodes, and Run several times at once, for more throughput.
func (r *Relay) Run(ctx context.Context) error {
	failed, unreached := 0, 0
	purge := time.Now().Add(rand.N(max(r.opts.PurgeEvery, 1))) // nodes that start together don't purge together
	for ctx.Err() == nil {
		if r.opts.PurgeEvery > 0 && !time.Now().Before(purge) {
			purge = time.Now().Add(r.purge(ctx))
		}
		start := time.Now()
		claim, err := r.store.Claim(ctx, r.opts.Batch, r.opts.Lease)
		switch {
		case ctx.Err() != nil && err != nil:
			return nil
		case err != nil:
			r.log(ctx, "claim", err)
			failed++
			wait(ctx, jitter(doubled(100*time.Millisecond, failed-1, 10*time.Second)), nil)
			continue
		}
		failed = 0
		if len(claim.Messages) == 0 {
			wait(ctx, r.opts.Poll, r.store.Wakeups())
			continue
		}
		if newRun(r, claim, start).publish(ctx) {
			unreached = 0
			continue
		}
		unreached++
		wait(ctx, jitter(doubled(r.opts.Unreachable, unreached-1, 8*r.opts.Unreachable)), nil)
	}
	return nil
}

// purge removes a batch, and returns when to do so again.
func (r *Relay) purge(ctx context.Context) time.Duration {
	n, err := r.store.Purge(ctx, r.opts.PurgeBatch)
	if err != nil && ctx.Err() == nil {
		r.log(ctx, "purge", err)
	}
	if n == r.opts.PurgeBatch {
		return 0 // there is more, but messages come first
	}
	return r.opts.PurgeEvery
}

// wait returns after d, or a wake-up, or when ctx ends.
func wait(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-wake:
	case <-t.C:
	}
}

func (r *Relay) log(ctx context.Context, what string, err error) {
	if r.opts.Logger != nil {
		r.opts.Logger.LogAttrs(ctx, slog.LevelWarn, "outbox: "+what+" failed", slog.Any("err", err))
	}
}
