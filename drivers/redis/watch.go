package redisstore

import (
	"context"
	"errors"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
)

// errClosed is what Watch returns after Close.
var errClosed = errors.New("redisstore: store is closed")

// watches holds those who wait in this process, and the one subscription that
// serves them all. Runs for which nobody waits are not published, since in a
// cluster every node hears every word.
type watches struct {
	client  redis.UniversalClient
	channel string

	mu     sync.Mutex
	closed bool
	pubsub *redis.PubSub // nil until the first Watch
	done   chan struct{} // closed when listen has returned
	set    map[string]map[chan struct{}]struct{}
}

// Watch implements [dedup.Watcher]. The first call subscribes, by a connection of
// its own that lasts until [Store.Close]. With ACLs the client's user needs the
// channel Prefix+"ended".
func (s *Store) Watch(ctx context.Context, key dedup.Key) (<-chan struct{}, func(), error) {
	row := s.RowName(key)
	c := make(chan struct{}, 1)
	if err := s.watches.add(row, c); err != nil {
		return nil, nil, err
	}
	stop := func() { s.watches.remove(row, c) }
	reply, err := s.run(ctx, watchScript, key)
	if err != nil {
		stop()
		return nil, nil, err
	}
	if reply == int64(0) { // the run ended before we came
		tell(c)
	}
	return c, stop, nil
}

// Close ends the subscription, if there is one, and what listens to it. Channels
// that Watch has returned are told. It leaves the client open. The store's other
// methods go on working.
func (s *Store) Close() error {
	w := &s.watches
	w.mu.Lock()
	pubsub, done := w.pubsub, w.done
	first := !w.closed
	w.closed = true
	w.mu.Unlock()
	if pubsub == nil {
		return nil
	}
	var err error
	if first {
		err = pubsub.Close()
	}
	<-done
	w.tellAll()
	return err
}

func (w *watches) add(row string, c chan struct{}) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return errClosed
	}
	if w.pubsub == nil {
		// Neither call waits for the server. What is published before the
		// subscription is in force is made good by its confirmation.
		w.pubsub = w.client.Subscribe(context.Background())
		w.done = make(chan struct{})
		go w.listen()
	}
	if w.set == nil {
		w.set = make(map[string]map[chan struct{}]struct{})
	}
	if w.set[row] == nil {
		w.set[row] = make(map[chan struct{}]struct{})
	}
	w.set[row][c] = struct{}{}
	return nil
}

func (w *watches) remove(row string, c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.set[row], c)
	if len(w.set[row]) == 0 {
		delete(w.set, row)
	}
}

// listen runs until the subscription is closed. It reads on until then, as
// go-redis's own goroutine would otherwise hang on its last message.
func (w *watches) listen() {
	defer close(w.done)
	messages := w.pubsub.ChannelWithSubscriptions()
	// An error shows as a connection that go-redis makes anew by itself.
	w.pubsub.Subscribe(context.Background(), w.channel) //nolint:errcheck // see above
	for m := range messages {
		switch m := m.(type) {
		case *redis.Subscription: // the first one, or after a lost connection
			w.tellAll()
		case *redis.Message:
			w.mu.Lock()
			for c := range w.set[m.Payload] {
				tell(c)
			}
			w.mu.Unlock()
		}
	}
}

func (w *watches) tellAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, set := range w.set {
		for c := range set {
			tell(c)
		}
	}
}

func tell(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // was told already
	}
}
