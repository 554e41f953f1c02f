package storetest

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var watchTests = []test{
	{"Watch", watch},
	{"WatchStops", watchStops},
}

func (e *env) watcher() dedup.Watcher {
	w, ok := e.s.(dedup.Watcher)
	if !ok {
		e.t.Skip("the store is no dedup.Watcher")
	}
	return w
}

// Words may be lost, so one that comes late is no failure; none at all in many
// tries is.
func watch(e *env) {
	w := e.watcher()
	ends := map[string]func(dedup.Key, dedup.Token) error{
		"completed": func(k dedup.Key, t dedup.Token) error { return e.s.Complete(e.ctx, k, t, done("x")) },
		"released":  func(k dedup.Key, t dedup.Token) error { return e.s.Release(e.ctx, k, t) },
	}
	for name, end := range ends {
		told := false
		for i := 0; i < 5 && !told; i++ {
			k := e.other(fmt.Sprint("-", name, i))
			token := e.won(k)
			first, stopFirst, err := w.Watch(e.ctx, k)
			e.ok(err, "Watch", "a key may be watched")
			second, stopSecond, err := w.Watch(e.ctx, k)
			e.ok(err, "Watch", "a key may be watched by several")
			e.ok(end(k, token), "the end of the run", "the holder may end it")
			told = readable(first) && readable(second)
			stopFirst()
			stopSecond()
		}
		if !told {
			e.t.Errorf("no word of a row that was %s: the channel becomes readable some time after", name)
		}
	}
}

func readable(c <-chan struct{}) bool {
	t := time.NewTimer(patience / 12)
	defer t.Stop()
	select {
	case <-c:
		return true
	case <-t.C:
		return false
	}
}

func watchStops(e *env) {
	w := e.watcher()
	token := e.won(e.key)
	_, stop, err := w.Watch(e.ctx, e.key)
	e.ok(err, "Watch", "a key may be watched")
	stop()
	stop() // as with context.CancelFunc
	other, stopOther, err := w.Watch(e.ctx, e.key)
	e.ok(err, "Watch", "a key may be watched again")
	defer stopOther()
	e.ok(e.s.Complete(e.ctx, e.key, token, done("x")), "Complete", "a watched row is completed as any other")
	if !readable(other) {
		e.t.Log("word was lost, which is allowed")
	}
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, stop, err := w.Watch(ctx, e.key); err == nil {
		stop()
	}
}
