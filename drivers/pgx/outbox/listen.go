package pgxoutbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/idempotency/outbox"
)

// Listen sends this process's wake-ups to others and takes theirs, until ctx
// ends; then it returns nil. It holds one connection, and reconnects when that is
// lost or does not answer any more. It goes on through all failures: what it
// misses, the relay finds when it polls.
//
// NOTIFY is sent outside of the business transactions, since the server commits
// transactions that NOTIFY one after another.
func (o *Outbox) Listen(ctx context.Context) error {
	if o.pool == nil {
		return fmt.Errorf("%w: the pool is nil", outbox.ErrConfig)
	}
	var both sync.WaitGroup
	both.Go(func() { o.notify(ctx) })
	both.Go(func() {
		for pause := time.Duration(0); ctx.Err() == nil; {
			if o.listen(ctx) {
				pause = 0
			}
			pause = min(2*pause+50*time.Millisecond, 10*time.Second)
			sleep(ctx, pause/2+rand.N(pause/2+1)) // nodes that lost one server don't come back together
		}
	})
	both.Wait()
	return nil
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// notify tells other nodes, at most every NotifyEvery, that there was a commit.
func (o *Outbox) notify(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.dirty:
		}
		tctx, cancel := context.WithTimeout(ctx, o.opts.PingTimeout)
		_, _ = o.pool.Exec(tctx, `SELECT pg_notify($1, '')`, o.opts.Channel) // if it fails, they poll
		cancel()
		sleep(ctx, o.opts.NotifyEvery)
	}
}

// listen listens on one connection until that fails. It returns whether it came
// to listening at all.
func (o *Outbox) listen(ctx context.Context) (listened bool) {
	tctx, cancel := context.WithTimeout(ctx, o.opts.PingTimeout)
	defer cancel()
	pooled, err := o.pool.Acquire(tctx)
	if err != nil {
		return false
	}
	// Not the pool's any more: nobody else is to get a connection that listens.
	conn := pooled.Hijack()
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		_ = conn.Close(cctx)
	}()
	if _, err := conn.Exec(tctx, `LISTEN `+pgx.Identifier{o.opts.Channel}.Sanitize()); err != nil {
		return false
	}
	o.Outbox.Wake() // for what was committed while nobody listened
	for {
		wctx, cancel := context.WithTimeout(ctx, o.opts.PingEvery)
		_, err := conn.WaitForNotification(wctx)
		quiet := errors.Is(wctx.Err(), context.DeadlineExceeded)
		cancel()
		switch {
		case err == nil:
			o.Outbox.Wake()
			continue
		case ctx.Err() != nil || !quiet || conn.IsClosed():
			return true
		}
		pctx, cancel := context.WithTimeout(ctx, o.opts.PingTimeout)
		err = conn.Ping(pctx)
		cancel()
		if err != nil {
			return true
		}
	}
}
