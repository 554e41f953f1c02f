package dedup

import (
	"context"
	"sync"
	"time"
)

// heartbeat renews a run's lease for as long as the run lasts. It is a timer
// rather than a goroutine, since most work ends before the first beat.
type heartbeat struct {
	e      *Engine
	ctx    context.Context // of the work; its values, not its end
	key    Key
	token  Token
	lease  time.Duration
	limit  time.Time // no beats from here on
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
	lost    bool
	until   time.Time          // by our clock, never later than the store's lease end
	abort   context.CancelFunc // of the renewal under way, or nil
	beats   sync.WaitGroup
}

func (e *Engine) startHeartbeat(ctx context.Context, cancel context.CancelCauseFunc, c Claim, claimed, limit time.Time) *heartbeat {
	h := &heartbeat{
		e: e, ctx: ctx, cancel: cancel,
		key: c.Key, token: c.Token, lease: c.Lease,
		limit: limit, until: claimed.Add(c.Lease),
	}
	h.mu.Lock()
	h.timer = time.AfterFunc(h.lease/3, h.beat)
	h.mu.Unlock()
	return h
}

func (h *heartbeat) beat() {
	h.mu.Lock()
	if h.stopped {
		h.mu.Unlock()
		return
	}
	began := time.Now()
	if !began.Before(h.limit) {
		h.mu.Unlock()
		return // the work is over its limit: let the lease run out
	}
	// A renewal that takes longer than the lease lasts has failed.
	ctx, cancel := context.WithDeadline(context.WithoutCancel(h.ctx), h.until)
	h.abort = cancel
	h.beats.Add(1)
	defer h.beats.Done()
	h.mu.Unlock()

	err := h.e.Store.Renew(ctx, h.key, h.token, h.lease)
	cancel()

	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return
	}
	next := h.lease / 3
	switch {
	case err == nil:
		h.until = began.Add(h.lease)
	case isLeaseLost(err) || !time.Now().Before(h.until):
		// Either we were told, or we can't know any more. Two runs at once
		// must not happen, so this one ends in both cases.
		h.lost = true
		h.cancel(ErrLeaseLost)
		h.e.observe(h.ctx, began, Event{Kind: EventLeaseLost, Key: h.key, Err: err})
		h.e.warn(h.ctx, "lease lost while the work was running", h.key)
		return
	default:
		h.e.storeFailed(h.ctx, began, "Renew", h.key, err)
		next = min(h.lease/10, time.Until(h.until))
	}
	h.timer.Reset(next)
}

// stop ends the beats, also one under way, and waits for it.
func (h *heartbeat) stop() {
	h.mu.Lock()
	h.stopped = true
	h.timer.Stop()
	if h.abort != nil {
		h.abort()
	}
	h.mu.Unlock()
	h.beats.Wait()
}

func (h *heartbeat) isLost() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost
}
