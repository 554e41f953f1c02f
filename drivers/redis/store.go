package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
)

// Store is a [dedup.Store] and a [dedup.Watcher]. Make one with [New].
//
// Each call is sent once, whatever the client's MaxRetries, so that
// [dedup.ErrBusy] keeps its word that nothing was written. All but Release and
// Resolve may be repeated after any other error; those two may then say that the
// row is gone, since they removed it.
type Store struct {
	client  redis.UniversalClient
	o       Options
	watches watches
}

var (
	_ dedup.Store   = (*Store)(nil)
	_ dedup.Watcher = (*Store)(nil)
)

// escaper makes names injective, and free of hash tags that a client could choose
// to bring all its keys to one slot.
var escaper = strings.NewReplacer("%", "%25", ":", "%3A", "{", "%7B", "}", "%7D")

// RowName returns the name of the Redis key that holds the row of k, for
// operators: prefix, scope, colon, id, with a percent sign, colon or brace in
// the last three written as %25, %3A, %7B, %7D.
func (s *Store) RowName(k dedup.Key) string {
	return s.o.Prefix + escaper.Replace(k.Scope) + ":" + escaper.Replace(k.ID)
}

// Claim implements [dedup.Store]. Its error may wrap [dedup.ErrInvalidKey],
// [dedup.ErrBusy], [ErrNotReplicated] or the context's error.
func (s *Store) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	if err := c.Key.Validate(); err != nil {
		return dedup.Result{}, err
	}
	reply, err := s.write(ctx, claimScript, c.Key, c.Fingerprint, c.Token[:], micros(c.Lease), micros(c.TTL))
	if err != nil {
		return dedup.Result{}, err
	}
	r := &reader{reply: reply}
	var res dedup.Result
	switch state := r.text(); state {
	case "held":
		res.Record.Attempt = int(r.int())
		res.State = dedup.Won
		if res.Record.Attempt > 1 {
			res.State = dedup.Abandoned
		}
	case "in progress":
		res.State = dedup.InProgress
		res.Record.LeaseLeft = time.Duration(r.int()) * time.Microsecond
	case "completed":
		res.State = dedup.Completed
		res.Record.Response = r.response()
	case "mismatch":
		res.State = dedup.Mismatch
		res.Record.Fingerprint = r.bytes()
	case "unknown":
		res.State = dedup.Unknown
	default:
		r.fail(state)
	}
	return res, r.err
}

// Renew implements [dedup.Store].
func (s *Store) Renew(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) error {
	return s.held(s.write(ctx, renewScript, key, token[:], micros(max(lease, 0))))
}

// Complete implements [dedup.Store].
func (s *Store) Complete(ctx context.Context, key dedup.Key, token dedup.Token, c dedup.Completion) error {
	if c.Status != dedup.StatusCompleted && c.Status != dedup.StatusUnknown {
		return errors.New("redisstore: a completion is completed or unknown, not " + c.Status.String())
	}
	return s.held(s.write(ctx, completeScript, key, s.watches.channel, token[:],
		int(c.Status), c.Response.Code, c.Response.Header, c.Response.Body, micros(c.TTL)))
}

// Release implements [dedup.Store].
func (s *Store) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	return s.held(s.write(ctx, releaseScript, key, s.watches.channel, token[:]))
}

func (s *Store) held(reply any, err error) error {
	if err != nil {
		return err
	}
	r := &reader{reply: []any{reply}}
	if r.int() == 0 && r.err == nil {
		return dedup.ErrLeaseLost
	}
	return r.err
}

// Get implements [dedup.Store].
func (s *Store) Get(ctx context.Context, key dedup.Key) (dedup.Record, error) {
	reply, err := s.run(ctx, getScript, key)
	if errors.Is(err, redis.Nil) {
		return dedup.Record{}, dedup.ErrNotFound
	}
	if err != nil {
		return dedup.Record{}, err
	}
	r := &reader{reply: reply}
	now := r.int()
	rec := dedup.Record{Status: dedup.Status(r.int())}
	leaseEnd := r.int()
	rec.ExpiresAt = time.UnixMicro(r.int())
	rec.Fingerprint = r.bytes()
	copy(rec.Token[:], r.text())
	rec.Attempt = int(r.int())
	rec.CreatedAt = time.UnixMicro(r.int())
	rec.Response = r.response()
	if rec.Status == dedup.StatusInProgress {
		rec.LeaseLeft = time.Duration(max(leaseEnd-now, 0)) * time.Microsecond
	}
	return rec, r.err
}

// Resolve implements [dedup.Store].
func (s *Store) Resolve(ctx context.Context, key dedup.Key, response *dedup.Response, ttl time.Duration) error {
	args := []any{s.watches.channel, 0}
	if response != nil {
		args = []any{s.watches.channel, 1, response.Code, response.Header, response.Body, micros(ttl)}
	}
	reply, err := s.write(ctx, resolveScript, key, args...)
	if err != nil {
		return err
	}
	r := &reader{reply: []any{reply}}
	switch v := r.text(); v {
	case "done":
	case "absent":
		return dedup.ErrNotFound
	case "refused":
		return dedup.ErrNotResolvable
	default:
		r.fail(v)
	}
	return r.err
}

// Purge implements [dedup.Store] and removes nothing: Redis expires rows by
// itself.
func (s *Store) Purge(ctx context.Context, _ int) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("redisstore: %w", err)
	}
	return 0, nil
}

// micros rounds up, so that no positive duration becomes 0.
func micros(d time.Duration) int64 {
	us := d.Microseconds()
	if d > time.Duration(us)*time.Microsecond {
		us++
	}
	return us
}

// reader takes a script's reply apart.
type reader struct {
	reply any
	next  int
	err   error
}

func (r *reader) value() any {
	list, ok := r.reply.([]any)
	if !ok || r.next >= len(list) {
		r.fail(r.reply)
		return nil
	}
	v := list[r.next]
	r.next++
	return v
}

func (r *reader) fail(v any) {
	if r.err == nil {
		r.err = fmt.Errorf("redisstore: a reply of the server's is not understood: %.40q", fmt.Sprint(v))
	}
}

// text returns "" for a field that the row does not have.
func (r *reader) text() string {
	switch v := r.value().(type) {
	case nil:
	case string:
		return v
	default:
		r.fail(v)
	}
	return ""
}

func (r *reader) bytes() []byte { return []byte(r.text()) }

func (r *reader) int() int64 {
	switch v := r.value().(type) {
	case nil:
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			r.fail(v)
		}
		return n
	default:
		r.fail(v)
	}
	return 0
}

func (r *reader) response() dedup.Response {
	return dedup.Response{Code: int(r.int()), Header: r.bytes(), Body: r.bytes()}
}
