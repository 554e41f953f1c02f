package pgxstore

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
)

// batchTimeout bounds a batch, which ends with no caller's context. After it,
// its calls are made one by one.
const batchTimeout = 10 * time.Second

// call is one statement about one key.
type call struct {
	key   dedup.Key
	size  int // bytes that it sends, about
	sql   string
	args  []any
	token *[]byte // where the token goes that the statement may return; nil if it returns none

	n int64 // rows affected, where none are returned

	// Of a call that waits for a lane:
	turn  chan turn // told once
	batch *batch    // that has taken it; guarded by lanes.mu
}

// turn is what a waiting call is told.
type turn uint8

const (
	turnLead  turn = iota // it has a lane; send what waits
	turnDone              // it was sent
	turnAlone             // it was not, or in vain: send it yourself
)

// send makes the call, as a commit of its own.
func (c *call) send(ctx context.Context, pool *pgxpool.Pool) error {
	if c.token == nil {
		tag, err := pool.Exec(ctx, c.sql, c.args...)
		c.n = tag.RowsAffected()
		return err
	}
	return c.scan(pool.QueryRow(ctx, c.sql, c.args...))
}

func (c *call) scan(r pgx.Row) error {
	err := r.Scan(c.token)
	if errors.Is(err, pgx.ErrNoRows) {
		*c.token, err = nil, nil
	}
	return err
}

func (c *call) queue(b *pgx.Batch) {
	q := b.Queue(c.sql, c.args...)
	if c.token != nil {
		q.QueryRow(c.scan)
		return
	}
	q.Exec(func(tag pgconn.CommandTag) error {
		c.n = tag.RowsAffected()
		return nil
	})
}

// own makes c independent of the caller's slices, for a caller that leaves a
// call behind in a batch may write to them.
func (c *call) own() {
	for i, a := range c.args {
		if b, ok := a.([]byte); ok {
			c.args[i] = slices.Clone(b)
		}
	}
}

// lanes lets a few calls go to the database side by side, each as its own
// commit. Those that find all lanes taken wait, and when a lane becomes free
// they share it: the first of them sends all that wait by then, in one round
// trip and one commit. So a call that is alone is not delayed by anything, and
// the more there are the cheaper each becomes.
//
// Nobody works here but the callers, so there is nothing to stop.
type lanes struct {
	pool  *pgxpool.Pool
	width int // lanes
	rows  int // most calls in a batch
	bytes int // most bytes in a batch, unless one call alone has more

	mu      sync.Mutex
	inside  int     // callers
	taken   int     // lanes
	waiting []*call // not empty only while lanes are taken
}

// do makes the call c. An error is that of c alone. If ctx ends meanwhile, the
// call may have been made or not.
func (l *lanes) do(ctx context.Context, c *call) error {
	defer l.exit()
	l.mu.Lock()
	l.inside++
	if l.taken < l.open() && len(l.waiting) == 0 {
		l.taken++
		l.mu.Unlock()
		defer l.pass()
		return c.send(ctx, l.pool)
	}
	c.own()
	c.turn = make(chan turn, 1)
	l.waiting = append(l.waiting, c)
	l.mu.Unlock()

	var t turn
	select {
	case t = <-c.turn:
	case <-ctx.Done():
		l.leave(c)
		return ctx.Err()
	}
	switch t {
	case turnLead:
		defer l.pass()
		return l.lead(ctx, c)
	case turnAlone:
		return c.send(ctx, l.pool)
	}
	return nil
}

func (l *lanes) exit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside--
}

// open is how many lanes there are to use: half of them in a crowd, where fewer
// commits at a time, with more in each, get more done.
func (l *lanes) open() int {
	if l.inside > l.width {
		return (l.width + 1) / 2
	}
	return l.width
}

// pass gives the caller's lane to whoever waits longest.
func (l *lanes) pass() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 || l.taken > l.open() {
		l.taken--
		return
	}
	next := l.waiting[0]
	l.waiting[0] = nil
	l.waiting = l.waiting[1:]
	next.turn <- turnLead
}

// leave takes c out, whose caller waits no longer.
func (l *lanes) leave(c *call) {
	l.mu.Lock()
	if i := slices.Index(l.waiting, c); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		l.mu.Unlock()
		return
	}
	b := c.batch
	l.mu.Unlock()
	if b != nil {
		b.leave()
		return
	}
	if t := <-c.turn; t == turnLead { // told at the same moment
		l.pass()
	}
}

// batch is a number of calls on their way together.
type batch struct {
	calls  []*call
	here   atomic.Int32 // callers that still wait
	cancel context.CancelFunc
}

// leave stops a batch that nobody waits for any more.
func (b *batch) leave() {
	if b.here.Add(-1) == 0 {
		b.cancel()
	}
}

// lead sends first, and what waits with it.
func (l *lanes) lead(ctx context.Context, first *call) error {
	bctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
	defer cancel()
	b := l.gather(first, cancel)
	if len(b.calls) == 1 {
		return first.send(ctx, l.pool)
	}
	stop := context.AfterFunc(ctx, b.leave)
	defer stop()

	told := turnDone
	if b.send(bctx, l.pool) != nil {
		told = turnAlone // the error is one call's, or whoever's: each shall have its own
	}
	for _, c := range b.calls {
		if c != first {
			c.turn <- told
		}
	}
	if told == turnAlone {
		return first.send(ctx, l.pool)
	}
	return nil
}

// gather takes from the queue what fits into a batch with first.
func (l *lanes) gather(first *call, cancel context.CancelFunc) *batch {
	b := &batch{calls: []*call{first}, cancel: cancel}
	size := first.size
	l.mu.Lock()
	defer l.mu.Unlock()
	first.batch = b
	for len(l.waiting) > 0 && len(b.calls) < l.rows && size+l.waiting[0].size <= l.bytes {
		c := l.waiting[0]
		l.waiting[0] = nil
		l.waiting = l.waiting[1:]
		c.batch = b
		b.calls = append(b.calls, c)
		size += c.size
	}
	b.here.Store(int32(len(b.calls)))
	return b
}

// send makes all calls in one transaction, or none. They go in the order of
// their keys, as in every other batch, so two batches never wait for each
// other.
func (b *batch) send(ctx context.Context, pool *pgxpool.Pool) error {
	sorted := slices.Clone(b.calls)
	slices.SortFunc(sorted, func(x, y *call) int {
		return cmp.Or(cmp.Compare(x.key.Scope, y.key.Scope), cmp.Compare(x.key.ID, y.key.ID))
	})
	pb := &pgx.Batch{}
	for _, c := range sorted {
		c.queue(pb)
	}
	return pool.SendBatch(ctx, pb).Close()
}
