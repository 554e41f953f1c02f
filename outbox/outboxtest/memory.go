package outboxtest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/effectonce/idempotency/outbox"
)

// Memory is an outbox.Store in memory, for tests of what uses one. It passes
// [Run]. The zero value is empty.
type Memory struct {
	mu   sync.Mutex
	last int64
	rows []*row
	once sync.Once
	wake chan struct{}
}

type row struct {
	outbox.Message
	state     outbox.Fate // 0: pending
	attempts  int
	token     outbox.Token
	available time.Time
	err       string
}

var _ outbox.Store = (*Memory)(nil)

// Enqueue adds messages and wakes the relay.
func (s *Memory) Enqueue(_ context.Context, msgs ...outbox.Message) error {
	s.mu.Lock()
	for i := range msgs {
		m := msgs[i]
		if _, err := m.Encode(); err != nil {
			s.mu.Unlock()
			return err
		}
		s.last++
		m.Seq, m.Created = s.last, time.Now()
		s.rows = append(s.rows, &row{Message: m})
	}
	s.mu.Unlock()
	select {
	case s.wakeups() <- struct{}{}:
	default:
	}
	return nil
}

// Claim implements outbox.Store.
func (s *Memory) Claim(_ context.Context, limit int, lease time.Duration) (outbox.Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := outbox.Claim{Token: outbox.NewToken()}
	now := time.Now()
	held := map[string]bool{}
	for _, r := range s.rows {
		if r.state != 0 && r.state != outbox.Blocked || len(c.Messages) == limit {
			continue
		}
		if r.state == outbox.Blocked || now.Before(r.available) || r.Key != "" && held[r.Key] {
			held[r.Key] = true
			continue
		}
		r.token, r.available = c.Token, now.Add(lease)
		m := r.Message
		m.Attempt = r.attempts + 1
		c.Messages = append(c.Messages, m)
	}
	return c, nil
}

// find returns the pending row if it has the token.
func (s *Memory) find(seq int64, token outbox.Token) *row {
	for _, r := range s.rows {
		if r.Seq == seq && r.state == 0 && r.token == token {
			return r
		}
	}
	return nil
}

// Renew implements outbox.Store.
func (s *Memory) Renew(_ context.Context, token outbox.Token, seqs []int64, lease time.Duration) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, seq := range seqs {
		if r := s.find(seq, token); r != nil {
			r.available = time.Now().Add(lease)
			n++
		}
	}
	return n, nil
}

// Settle implements outbox.Store.
func (s *Memory) Settle(_ context.Context, token outbox.Token, outcomes []outbox.Outcome) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, o := range outcomes {
		r := s.find(o.Seq, token)
		if r == nil {
			continue
		}
		n++
		r.token, r.available = outbox.Token{}, time.Now().Add(o.Delay)
		switch o.Fate {
		case outbox.Released:
		case outbox.Failed:
			r.attempts, r.err = r.attempts+1, o.Err
		case outbox.Published:
			s.rows = slices.DeleteFunc(s.rows, func(x *row) bool { return x == r })
		default:
			r.attempts, r.err, r.state = r.attempts+1, o.Err, o.Fate
		}
	}
	return n, nil
}

// Purge implements outbox.Store; there is never anything to purge.
func (s *Memory) Purge(context.Context, int) (int, error) { return 0, nil }

// Wakeups implements outbox.Store.
func (s *Memory) Wakeups() <-chan struct{} { return s.wakeups() }

func (s *Memory) wakeups() chan struct{} {
	s.once.Do(func() { s.wake = make(chan struct{}, 1) })
	return s.wake
}

// Expire ends all leases and waits.
func (s *Memory) Expire(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rows {
		r.available = time.Time{}
	}
	return nil
}

// Pending returns how many messages are not published, nor poison.
func (s *Memory) Pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.rows {
		if r.state == 0 {
			n++
		}
	}
	return n
}

// Poison returns the ids of the messages that are blocked or dead letters.
func (s *Memory) Poison() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, r := range s.rows {
		if r.state != 0 {
			ids = append(ids, r.ID)
		}
	}
	return ids
}
