package dedup

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// Waiters poll with growing pauses, so that a long wait costs the store little.
// A run that ends in this process, or that a [Watcher] tells of, is seen at
// once.
const (
	firstPoll = 20 * time.Millisecond
	lastPoll  = time.Second

	// The longest wait that a caller is asked for; runs are mostly short.
	maxRetryAfter = time.Second
	minRetryAfter = 50 * time.Millisecond
)

// waiters wakes those who wait in this process for a key's run to end.
type waiters struct {
	mu  sync.Mutex
	set map[Key]*waiterGroup
}

type waiterGroup struct {
	done chan struct{}
	n    int
}

func (w *waiters) join(key Key) *waiterGroup {
	w.mu.Lock()
	defer w.mu.Unlock()
	g := w.set[key]
	if g == nil {
		if w.set == nil {
			w.set = make(map[Key]*waiterGroup)
		}
		g = &waiterGroup{done: make(chan struct{})}
		w.set[key] = g
	}
	g.n++
	return g
}

func (w *waiters) leave(key Key, g *waiterGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	g.n--
	if g.n == 0 && w.set[key] == g {
		delete(w.set, key)
	}
}

// wake tells everybody who waits for key that its run has ended.
func (w *waiters) wake(key Key) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.set[key]; g != nil {
		delete(w.set, key)
		close(g.done)
	}
}

// wait is one caller's wait. It holds no connection.
type wait struct {
	e        *Engine
	key      Key
	group    *waiterGroup
	watched  <-chan struct{}
	unwatch  func()
	deadline time.Time
	poll     time.Duration
}

func (e *Engine) startWait(ctx context.Context, key Key) *wait {
	w := &wait{
		e:        e,
		key:      key,
		group:    e.waiters.join(key),
		deadline: time.Now().Add(e.Wait),
		poll:     firstPoll,
	}
	if s, ok := e.Store.(Watcher); ok {
		began := e.began()
		done, stop, err := s.Watch(ctx, key)
		if err != nil { // polling finds it too
			e.storeFailed(ctx, began, "Watch", key, err)
			return w
		}
		w.watched, w.unwatch = done, stop
	}
	return w
}

// next waits until it is worth claiming again. It returns false once the time
// is up.
func (w *wait) next(ctx context.Context) (bool, error) {
	left := time.Until(w.deadline)
	if left <= 0 {
		return false, nil
	}
	pause := w.poll/2 + rand.N(w.poll) // so that waiters don't poll in step
	w.poll = min(2*w.poll, lastPoll)
	t := time.NewTimer(min(pause, left))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false, context.Cause(ctx)
	case <-t.C:
	case <-w.group.done:
		// Another run may have begun meanwhile; wait for that one then.
		w.group = w.e.waiters.join(w.key)
		w.poll = firstPoll
	case _, ok := <-w.watched:
		if !ok {
			w.watched = nil
		}
		w.poll = firstPoll
	}
	return true, nil
}

func (w *wait) stop() {
	w.e.waiters.leave(w.key, w.group)
	if w.unwatch != nil {
		w.unwatch()
	}
}

// retryAfter is when to ask again about a run whose lease has left to go.
func retryAfter(left time.Duration) time.Duration {
	return min(max(left, minRetryAfter), maxRetryAfter)
}
