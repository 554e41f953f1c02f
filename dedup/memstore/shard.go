package memstore

import (
	"bytes"
	"container/heap"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

const (
	shardCount = 64 // locks: enough for as many cores to seldom meet
	purgeBatch = 64 // rows removed under one lock
)

type row struct {
	key         dedup.Key
	fingerprint string
	status      dedup.Status
	resolved    bool // by an operator: no run's token is current any more
	attempt     int
	token       dedup.Token
	code        int
	header      []byte
	body        []byte
	leaseEnd    time.Time
	createdAt   time.Time
	expiresAt   time.Time
	index       int // in shard.byEnd; -1 if it is not there
}

func (r *row) live(now time.Time) bool {
	return r.status == dedup.StatusInProgress && now.Before(r.leaseEnd)
}

// end is when the row is expired. A row that is unknown has none.
func (r *row) end() time.Time {
	if r.status == dedup.StatusInProgress && r.leaseEnd.After(r.expiresAt) {
		return r.leaseEnd
	}
	return r.expiresAt
}

func (r *row) expired(now time.Time) bool {
	return r.status != dedup.StatusUnknown && !now.Before(r.end())
}

// store and answer copy, since the caller may go on writing to its slices.
func (r *row) store(a dedup.Response) {
	r.code, r.header, r.body = a.Code, bytes.Clone(a.Header), bytes.Clone(a.Body)
}

func (r *row) answer() dedup.Response {
	return dedup.Response{Code: r.code, Header: bytes.Clone(r.header), Body: bytes.Clone(r.body)}
}

// shard holds the rows of some keys, and those that can expire also in the order
// of their end, so that purging need not look at the others.
type shard struct {
	mu    sync.Mutex
	rows  map[dedup.Key]*row
	byEnd ends
}

// find returns the row of k, nil if there is none or it has expired.
func (s *shard) find(k dedup.Key, now time.Time) *row {
	r := s.rows[k]
	if r == nil || !r.expired(now) {
		return r
	}
	s.remove(r)
	return nil
}

func (s *shard) add(r *row) {
	if s.rows == nil {
		s.rows = make(map[dedup.Key]*row)
	}
	s.rows[r.key] = r
	heap.Push(&s.byEnd, r)
}

func (s *shard) remove(r *row) {
	delete(s.rows, r.key)
	if r.index >= 0 {
		heap.Remove(&s.byEnd, r.index)
	}
}

// moved puts r where its new end belongs.
func (s *shard) moved(r *row) {
	switch {
	case r.status == dedup.StatusUnknown:
		if r.index >= 0 {
			heap.Remove(&s.byEnd, r.index)
		}
	case r.index < 0:
		heap.Push(&s.byEnd, r)
	default:
		heap.Fix(&s.byEnd, r.index)
	}
}

// purge removes at most limit expired rows.
func (s *shard) purge(now func() time.Time, limit int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := now()
	n := 0
	for n < limit && len(s.byEnd) > 0 && s.byEnd[0].expired(t) {
		s.remove(s.byEnd[0])
		n++
	}
	return n
}

// ends is a heap of rows by their end. See [heap.Interface].
type ends []*row

func (e ends) Len() int           { return len(e) }
func (e ends) Less(i, j int) bool { return e[i].end().Before(e[j].end()) }
func (e ends) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].index, e[j].index = i, j
}

func (e *ends) Push(x any) {
	r := x.(*row)
	r.index = len(*e)
	*e = append(*e, r)
}

func (e *ends) Pop() any {
	old := *e
	last := len(old) - 1
	r := old[last]
	old[last] = nil // so that its row can be collected
	*e = old[:last]
	r.index = -1
	return r
}
