package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// settleEvery is how long outcomes are held back for a common write.
const settleEvery = time.Second

// errGrace is the cause of a publishing context's end when a stop took too long.
var errGrace = errors.New("outbox: the relay is stopping")

// run is what becomes of one claim.
type run struct {
	*Relay
	token   Token
	ordered bool

	// lanes are the messages that are not published yet: those of a key, in
	// order, or one without a key.
	lanes [][]Message

	reached bool // by any message: the broker answered
	results []result
	written time.Time // when results were last

	mu    sync.Mutex // held while the database is told something, so that a renewal knows what it renews
	open  map[int64]struct{}
	until time.Time // end of the lease, by our clock, from before it was asked for
}

// result is an outcome with what it is of.
type result struct {
	msg     Message
	outcome Outcome
	err     error
}

func newRun(r *Relay, c Claim, start time.Time) *run {
	n := &run{Relay: r, token: c.Token, written: time.Now(), open: make(map[int64]struct{}, len(c.Messages)), until: start.Add(r.opts.Lease)}
	_, n.ordered = r.pub.(Ordered)
	lane := make(map[string]int, len(c.Messages))
	for _, m := range c.Messages {
		n.open[m.Seq] = struct{}{}
		i, ok := lane[m.Key]
		if m.Key == "" || !ok {
			i = len(n.lanes)
			n.lanes = append(n.lanes, nil)
			lane[m.Key] = i
		}
		n.lanes[i] = append(n.lanes[i], m)
	}
	return n
}

// publish publishes all that it can, and settles everything. It returns false if
// the broker could not be reached.
func (n *run) publish(ctx context.Context) bool {
	pctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	stop := n.keep(ctx, pctx, cancel)
	tried := false
	for len(n.lanes) > 0 && ctx.Err() == nil && pctx.Err() == nil && n.leased() {
		tried = true
		n.wave(pctx)
		if len(n.lanes) > 0 && time.Since(n.written) >= settleEvery {
			n.settle(ctx)
		}
	}
	stop()
	for _, lane := range n.lanes {
		n.release(lane)
	}
	n.settle(ctx)
	return n.reached || !tried || pctx.Err() != nil
}

// leased says whether the messages are still ours, as far as we can know: a
// process that was held up must not go on where another relay took over.
func (n *run) leased() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Now().Before(n.until)
}

// wave publishes the first message of each lane; or all, if the publisher keeps
// the order.
func (n *run) wave(ctx context.Context) {
	var msgs []Message
	for i, lane := range n.lanes {
		if !n.ordered {
			msgs = append(msgs, lane[0])
			n.lanes[i] = lane[1:]
			continue
		}
		msgs = append(msgs, lane...)
		n.lanes[i] = nil
	}
	errs := n.call(ctx, msgs)
	bad := map[string]bool{}
	for i, m := range msgs {
		var err error
		if i < len(errs) {
			err = errs[i]
		}
		if err != nil && m.Key != "" && bad[m.Key] {
			err = errors.Join(ErrNotTried, err) // not to be counted: what it waits for failed
		}
		n.judge(ctx, m, err)
		bad[m.Key] = bad[m.Key] || err != nil
	}
	left := n.lanes[:0]
	for _, lane := range n.lanes {
		switch {
		case len(lane) == 0:
		case bad[lane[0].Key]:
			n.release(lane)
		default:
			left = append(left, lane)
		}
	}
	n.lanes = left
}

// call has the messages published. A publisher that panics says nothing of each:
// they are published again one by one, so that one message that can't be
// published takes no other along.
func (n *run) call(ctx context.Context, msgs []Message) (errs []error) {
	defer func() {
		p := recover()
		switch {
		case p == nil:
			if errs != nil && len(errs) != len(msgs) {
				err := fmt.Errorf("outbox: the publisher returned %d results for %d messages", len(errs), len(msgs))
				errs = make([]error, len(msgs))
				for i := range errs {
					errs[i] = err
				}
			}
		case len(msgs) == 1:
			errs = []error{fmt.Errorf("outbox: the publisher panicked: %v", p)}
		default:
			bad := map[string]bool{}
			errs = make([]error, len(msgs))
			for i := range msgs {
				if bad[msgs[i].Key] {
					errs[i] = ErrNotTried
					continue
				}
				if one := n.call(ctx, msgs[i:i+1]); one != nil {
					errs[i] = one[0]
				}
				bad[msgs[i].Key] = msgs[i].Key != "" && errs[i] != nil
			}
		}
	}()
	return n.pub.Publish(ctx, msgs)
}

// judge decides what becomes of a message.
func (n *run) judge(ctx context.Context, m Message, err error) {
	o := Outcome{Seq: m.Seq}
	switch {
	case err == nil:
		n.reached = true
		o.Fate = Published
	case errors.Is(err, ErrNotTried), ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))):
		o.Fate = Released
	case errors.Is(err, ErrUnreachable):
		// The delay is for the case that the broker answers for others.
		o.Fate, o.Delay = Released, n.opts.Unreachable
	default:
		n.reached = true
		o.Err = err.Error()
		poison := errors.Is(err, ErrPermanent) || n.opts.MaxAttempts > 0 && m.Attempt >= n.opts.MaxAttempts
		switch {
		case !poison:
			o.Fate, o.Delay = Failed, max(n.opts.Backoff(m.Attempt), 0)
		case n.opts.Poison == BlockKey && m.Key != "":
			o.Fate = Blocked
		default:
			o.Fate = DeadLetter
		}
	}
	n.results = append(n.results, result{m, o, err})
}

func (n *run) release(lane []Message) {
	for _, m := range lane {
		n.results = append(n.results, result{m, Outcome{Seq: m.Seq, Fate: Released}, ErrNotTried})
	}
}

// settle writes the outcomes back, and goes on trying as long as the lease lasts:
// what is not written is published again.
func (n *run) settle(ctx context.Context) {
	if len(n.results) == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	outcomes := make([]Outcome, len(n.results))
	for i, s := range n.results {
		outcomes[i] = s.outcome
		delete(n.open, s.outcome.Seq)
	}
	ctx = context.WithoutCancel(ctx)
	for try := 1; ; try++ {
		tctx, cancel := context.WithTimeout(ctx, max(time.Until(n.until), time.Second))
		held, err := n.store.Settle(tctx, n.token, outcomes)
		cancel()
		if err == nil {
			if held < len(outcomes) && try == 1 { // a try that failed may have been written
				n.log(ctx, "settle", fmt.Errorf("%w: of %d messages, %d were taken over", ErrLeaseLost, len(outcomes), len(outcomes)-held))
			}
			break
		}
		n.log(ctx, "settle", err)
		pause := jitter(doubled(50*time.Millisecond, try-1, 2*time.Second))
		if time.Until(n.until) < pause {
			break
		}
		wait(ctx, pause, nil)
	}
	for _, s := range n.results {
		n.observe(ctx, s)
	}
	n.results = n.results[:0]
	n.written = time.Now()
}

func (n *run) observe(ctx context.Context, s result) {
	if n.opts.Observe != nil {
		n.opts.Observe(s.msg, s.outcome.Fate, s.err)
	}
	if n.opts.Logger != nil && s.err != nil && !errors.Is(s.err, ErrNotTried) {
		level := slog.LevelWarn
		if s.outcome.Fate == Blocked || s.outcome.Fate == DeadLetter {
			level = slog.LevelError
		}
		n.opts.Logger.LogAttrs(ctx, level, "outbox: message not published", slog.String("id", s.msg.ID), slog.Int64("seq", s.msg.Seq),
			slog.String("fate", s.outcome.Fate.String()), slog.Int("attempt", s.msg.Attempt), slog.Any("err", s.err))
	}
}

// keep renews the lease until stop is called, and cancels the publishing when the
// lease is lost, or when the relay has been stopping for longer than Grace.
func (n *run) keep(ctx, pctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	done := make(chan struct{})
	quit, end := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(done)
		tick := time.NewTicker(n.opts.Lease / 3)
		defer tick.Stop()
		stopping := ctx.Done()
		var grace <-chan time.Time
		for {
			select {
			case <-quit.Done():
				return
			case <-stopping:
				stopping = nil
				t := time.NewTimer(n.opts.Grace)
				defer t.Stop()
				grace = t.C
			case <-grace:
				cancel(errGrace)
			case <-tick.C:
				if !n.renew(quit) {
					cancel(ErrLeaseLost)
					return
				}
			}
		}
	}()
	return func() { end(); <-done }
}

// renew returns false if the lease is lost, or must be taken for lost.
func (n *run) renew(ctx context.Context) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.open) == 0 {
		return true
	}
	seqs := make([]int64, 0, len(n.open))
	for s := range n.open {
		seqs = append(seqs, s)
	}
	start := time.Now()
	tctx, cancel := context.WithTimeout(ctx, n.opts.Lease/3)
	held, err := n.store.Renew(tctx, n.token, seqs, n.opts.Lease)
	cancel()
	switch {
	case err == nil:
		n.until = start.Add(n.opts.Lease)
		return held == len(seqs)
	case ctx.Err() != nil:
		return true // publishing is over
	}
	n.log(ctx, "renew", err)
	// The next try would come at the end of the lease, or after it.
	return time.Until(n.until) > n.opts.Lease/3
}
