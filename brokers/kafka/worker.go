package kafkabroker

import (
	"context"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// group is one membership: a worker for each partition that has records.
type group struct {
	h      *Handler
	ctx    context.Context
	client *kgo.Client

	mu      sync.Mutex
	workers map[partition]*worker
}

type partition struct {
	topic  string
	number int32
}

func (p partition) asMap() map[string][]int32 { return map[string][]int32{p.topic: {p.number}} }

func (g *group) worker(p partition) *worker {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.workers[p]
	if w == nil {
		w = &worker{g: g, p: p, more: make(chan struct{}, 1), done: make(chan struct{})}
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(g.ctx)
		g.workers[p] = w
		go w.run(ctx)
	}
	return w
}

// stop ends the workers of the partitions and waits for the records that they
// are at.
func (g *group) stop(partitions []partition) {
	var stopped []*worker
	g.mu.Lock()
	for _, p := range partitions {
		if w := g.workers[p]; w != nil {
			delete(g.workers, p)
			w.cancel()
			stopped = append(stopped, w)
		}
	}
	g.mu.Unlock()
	for _, w := range stopped {
		<-w.done
		// A partition may come back, and must not still be paused then.
		g.client.ResumeFetchPartitions(w.p.asMap())
	}
}

func partitionsOf(m map[string][]int32) []partition {
	var all []partition
	for topic, numbers := range m {
		for _, n := range numbers {
			all = append(all, partition{topic, n})
		}
	}
	return all
}

// revoked is called before partitions go to another member: what is done is
// committed, so that it need not find that out.
func (g *group) revoked(ctx context.Context, client *kgo.Client, m map[string][]int32) {
	g.stop(partitionsOf(m))
	g.commit(ctx, client)
}

// lost is called when another member may have them already.
func (g *group) lost(_ context.Context, _ *kgo.Client, m map[string][]int32) {
	g.stop(partitionsOf(m))
}

func (g *group) commit(ctx context.Context, client *kgo.Client) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	if err := client.CommitMarkedOffsets(ctx); err != nil {
		// The records come again and are found to be done.
		g.h.log(ctx, "commit failed", "", -1, -1, err)
	}
}

// end stops all workers and commits.
func (g *group) end() {
	g.mu.Lock()
	all := make([]partition, 0, len(g.workers))
	for p := range g.workers {
		all = append(all, p)
	}
	g.mu.Unlock()
	g.stop(all)
	g.commit(g.ctx, g.client)
}

// worker handles the records of one partition in order.
type worker struct {
	g      *group
	p      partition
	cancel context.CancelFunc
	more   chan struct{} // says that the queue is not empty
	done   chan struct{}

	mu     sync.Mutex
	queue  []*kgo.Record
	paused bool
}

func (w *worker) push(records []*kgo.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, records...)
	if len(w.queue) >= highWater && !w.paused {
		w.paused = true
		w.g.client.PauseFetchPartitions(w.p.asMap())
	}
	select {
	case w.more <- struct{}{}:
	default:
	}
}

func (w *worker) pop() *kgo.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.paused && len(w.queue) <= highWater/2 {
		w.paused = false
		w.g.client.ResumeFetchPartitions(w.p.asMap())
	}
	if len(w.queue) == 0 {
		return nil
	}
	r := w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	return r
}

func (w *worker) run(ctx context.Context) {
	defer close(w.done)
	defer w.cancel()
	for ctx.Err() == nil {
		r := w.pop()
		if r == nil {
			select {
			case <-ctx.Done():
			case <-w.more:
			}
			continue
		}
		if !w.g.h.handle(ctx, r) {
			return
		}
		w.g.client.MarkCommitRecords(r)
	}
}
