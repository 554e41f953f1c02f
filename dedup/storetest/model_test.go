package storetest_test

import (
	"bytes"
	"context"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// model is the plainest store there is. With a fault it breaks one promise.
type model struct {
	fault string
	mu    sync.Mutex
	rows  map[dedup.Key]*row
}

type row struct {
	dedup.Record
	key      dedup.Key
	leaseEnd time.Time
}

func (r *row) live() bool { return r.Status == dedup.StatusInProgress && time.Now().Before(r.leaseEnd) }

func (r *row) expired() bool {
	return r.Status != dedup.StatusUnknown && !r.live() && !time.Now().Before(r.ExpiresAt)
}

// key is where faults of collation and separators show.
func (m *model) key(k dedup.Key) dedup.Key {
	switch m.fault {
	case "keys fold case":
		k.ID = strings.ToLower(k.ID)
	case "keys lose trailing spaces":
		k.ID = strings.TrimRight(k.ID, " ")
	case "keys joined by a colon":
		k = dedup.Key{ID: k.Scope + ":" + k.ID}
	case "keys cut to 254 bytes":
		k.ID = k.ID[:min(len(k.ID), 254)]
	case "scope ignored":
		k.Scope = ""
	}
	return k
}

func (m *model) find(k dedup.Key) *row {
	r := m.rows[m.key(k)]
	if r == nil || r.expired() && m.fault != "expired rows are found" {
		return nil
	}
	return r
}

func (m *model) lock(ctx context.Context) (func(), error) {
	if err := ctx.Err(); err != nil && m.fault != "context ignored" {
		return nil, err
	}
	m.mu.Lock()
	return m.mu.Unlock, nil
}

func (m *model) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	unlock, err := m.lock(ctx)
	if err != nil {
		return dedup.Result{}, err
	}
	defer unlock()
	now := time.Now()
	r := m.find(c.Key)
	if m.fault == "claims race" {
		m.mu.Unlock()
		for range 100 { // lets the others in
			runtime.Gosched()
		}
		m.mu.Lock()
	}
	if r == nil {
		r = &row{key: c.Key, Record: dedup.Record{
			Fingerprint: bytes.Clone(c.Fingerprint), Status: dedup.StatusInProgress, Attempt: 1,
			Token: c.Token, CreatedAt: now, ExpiresAt: now.Add(c.TTL),
		}, leaseEnd: now.Add(c.Lease)}
		m.rows[m.key(c.Key)] = r
		return dedup.Result{State: dedup.Won, Record: r.Record}, nil
	}
	mismatch := !bytes.Equal(r.Fingerprint, c.Fingerprint)
	own := r.Token == c.Token && m.fault != "repeated claim is a duplicate"
	switch {
	case mismatch && (m.fault != "mismatch only when completed" || r.Status == dedup.StatusCompleted):
		return dedup.Result{State: dedup.Mismatch, Record: r.Record}, nil
	case r.Status == dedup.StatusCompleted && (m.fault != "completed is won by its token" || !own):
		return dedup.Result{State: dedup.Completed, Record: m.copy(r)}, nil
	case r.Status == dedup.StatusUnknown:
		return dedup.Result{State: dedup.Unknown}, nil
	case !own && r.live():
		return dedup.Result{State: dedup.InProgress, Record: dedup.Record{LeaseLeft: r.leaseEnd.Sub(now)}}, nil
	case !own:
		if m.fault != "takeover keeps the token" {
			r.Token = c.Token
		}
		if m.fault != "attempts not counted" {
			r.Attempt++
		}
	}
	r.leaseEnd, r.ExpiresAt = now.Add(c.Lease), now.Add(c.TTL)
	if r.Attempt > 1 {
		return dedup.Result{State: dedup.Abandoned, Record: r.Record}, nil
	}
	return dedup.Result{State: dedup.Won, Record: r.Record}, nil
}

func (m *model) copy(r *row) dedup.Record {
	rec := r.Record
	if r.live() {
		rec.LeaseLeft = time.Until(r.leaseEnd)
	}
	rec.Fingerprint = bytes.Clone(rec.Fingerprint)
	rec.Response = m.clone(rec.Response)
	return rec
}

func (m *model) clone(r dedup.Response) dedup.Response {
	switch m.fault {
	case "answers shared":
		return r
	case "answers as text":
		r.Body = []byte(strings.ToValidUTF8(string(r.Body), "?"))
	case "answers cut at NUL":
		r.Body, _, _ = bytes.Cut(r.Body, []byte{0})
	}
	return dedup.Response{Code: r.Code, Header: bytes.Clone(r.Header), Body: bytes.Clone(r.Body)}
}

func (m *model) held(ctx context.Context, k dedup.Key, t dedup.Token, call string, do func(*row) error) error {
	unlock, err := m.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	r := m.find(k)
	if r == nil || r.Token != t && m.fault != call+" without a token" {
		return dedup.ErrLeaseLost
	}
	return do(r)
}

func (m *model) Renew(ctx context.Context, k dedup.Key, t dedup.Token, lease time.Duration) error {
	return m.held(ctx, k, t, "Renew", func(r *row) error {
		if r.Status != dedup.StatusInProgress {
			return dedup.ErrLeaseLost
		}
		if lease > 0 || m.fault != "Renew ignores zero" {
			r.leaseEnd = time.Now().Add(lease)
		}
		return nil
	})
}

func (m *model) Complete(ctx context.Context, k dedup.Key, t dedup.Token, c dedup.Completion) error {
	return m.held(ctx, k, t, "Complete", func(r *row) error {
		if m.fault == "Complete only within the lease" && r.Status == dedup.StatusInProgress && !r.live() ||
			m.fault == "Complete only once" && r.Status != dedup.StatusInProgress {
			return dedup.ErrLeaseLost
		}
		if r.Status == dedup.StatusInProgress || m.fault == "Complete overwrites" {
			r.Status, r.Response = c.Status, m.clone(c.Response)
		}
		r.ExpiresAt = time.Now().Add(c.TTL)
		return nil
	})
}

func (m *model) Release(ctx context.Context, k dedup.Key, t dedup.Token) error {
	return m.held(ctx, k, t, "Release", func(r *row) error {
		if r.Status != dedup.StatusInProgress && m.fault != "Release of finished rows" {
			return dedup.ErrLeaseLost
		}
		delete(m.rows, m.key(k))
		return nil
	})
}

func (m *model) Get(ctx context.Context, k dedup.Key) (dedup.Record, error) {
	unlock, err := m.lock(ctx)
	if err != nil {
		return dedup.Record{}, err
	}
	defer unlock()
	r := m.find(k)
	if r == nil {
		return dedup.Record{}, dedup.ErrNotFound
	}
	return m.copy(r), nil
}

func (m *model) Resolve(ctx context.Context, k dedup.Key, response *dedup.Response, ttl time.Duration) error {
	unlock, err := m.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	r := m.find(k)
	switch {
	case r == nil:
		return dedup.ErrNotFound
	case r.Status == dedup.StatusCompleted, r.live() && m.fault != "Resolve of live rows":
		return dedup.ErrNotResolvable
	case response == nil:
		delete(m.rows, m.key(k))
		return nil
	}
	r.Status, r.Response, r.ExpiresAt = dedup.StatusCompleted, m.clone(*response), time.Now().Add(ttl)
	if m.fault != "Resolve keeps the token" {
		r.Token = dedup.NewToken()
	}
	return nil
}

func (m *model) Purge(ctx context.Context, limit int) (int, error) {
	unlock, err := m.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	n := 0
	for k, r := range m.rows {
		past := !time.Now().Before(r.ExpiresAt)
		gone := r.expired() ||
			past && m.fault == "Purge of live rows" && r.live() ||
			past && m.fault == "Purge of unknown rows" && r.Status == dedup.StatusUnknown
		if gone && (n < limit || m.fault == "Purge without a limit") {
			delete(m.rows, k)
			n++
		}
	}
	return n, nil
}
