// Package rediswindow keeps the marks of consumer.Window in Redis: one key an
// event, set with its expiry by one atomic step, so that none stays for ever.
//
//	w := &consumer.Window{
//		Store:  &rediswindow.Store{Client: client},
//		Group:  "billing",
//		Window: 72 * time.Hour, // longer than the sender goes on redelivering
//	}
//
// It works on Redis 3.2 or later, Redis Cluster (each step uses one key) and
// Valkey. It promises what Redis does: a primary that dies before it has
// replicated a mark forgets it, and so does a server that evicts keys. Set
// maxmemory-policy to noeviction, or use another mode where one effect must
// mean one.
package rediswindow

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
)

// DefaultPrefix begins the keys of a [Store].
const DefaultPrefix = "window:"

// Store is a consumer.WindowStore. Client is required.
type Store struct {
	Client redis.UniversalClient

	// Prefix begins every key ([DefaultPrefix] if "").
	Prefix string
}

var _ consumer.WindowStore = (*Store)(nil)

// An event's key holds its state and the token of whose it is: "p" (being
// processed) or "d" (done), followed by the token in hexadecimal.
const (
	processing = "p"
	done       = "d"
)

// Each script knows the caller's own mark, so that a call may be repeated whose
// answer was lost.
var (
	// KEYS[1] the event; ARGV[1] our mark; ARGV[2] the lease in milliseconds.
	// Returns the state before and the milliseconds left to it; "" if none.
	acquire = redis.NewScript(`
local v = redis.call('GET', KEYS[1])
if not v then
	redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
	return {'', 0}
end
if v == ARGV[1] then
	return {'', 0}
end
return {string.sub(v, 1, 1), redis.call('PTTL', KEYS[1])}`)

	// KEYS[1] the event; ARGV[1] our mark; ARGV[2] the mark when done; ARGV[3]
	// the window in milliseconds. Returns 1 if the event is marked done.
	finish = redis.NewScript(`
local v = redis.call('GET', KEYS[1])
if v and v ~= ARGV[1] and v ~= ARGV[2] then
	return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1`)

	// KEYS[1] the event; ARGV[1] our mark. Returns 1 if it was removed.
	release = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then
	return redis.call('DEL', KEYS[1])
end
return 0`)
)

// Acquire implements consumer.WindowStore.
func (s *Store) Acquire(ctx context.Context, key dedup.Key, token dedup.Token, lease time.Duration) (dedup.Result, error) {
	if err := s.check(key); err != nil {
		return dedup.Result{}, err
	}
	got, err := acquire.Run(ctx, s.Client, []string{s.key(key)}, processing+token.String(), millis(lease)).Slice()
	if err != nil {
		return dedup.Result{}, fmt.Errorf("rediswindow: acquire: %w", err)
	}
	if len(got) != 2 {
		return dedup.Result{}, errAnswer
	}
	state, _ := got[0].(string)
	left, _ := got[1].(int64)
	switch state {
	case "":
		return dedup.Result{State: dedup.Won}, nil
	case done:
		return dedup.Result{State: dedup.Completed}, nil
	case processing:
		return dedup.Result{
			State:  dedup.InProgress,
			Record: dedup.Record{LeaseLeft: time.Duration(max(left, 0)) * time.Millisecond},
		}, nil
	}
	return dedup.Result{}, errAnswer
}

// errAnswer: the key holds something that this package did not write.
var errAnswer = errors.New("rediswindow: the key is used for something else; choose another Prefix")

// Finish implements consumer.WindowStore.
func (s *Store) Finish(ctx context.Context, key dedup.Key, token dedup.Token, window time.Duration) error {
	if err := s.check(key); err != nil {
		return err
	}
	t := token.String()
	return held("finish", finish.Run(ctx, s.Client, []string{s.key(key)}, processing+t, done+t, millis(window)))
}

// Release implements consumer.WindowStore.
func (s *Store) Release(ctx context.Context, key dedup.Key, token dedup.Token) error {
	if err := s.check(key); err != nil {
		return err
	}
	return held("release", release.Run(ctx, s.Client, []string{s.key(key)}, processing+token.String()))
}

// held turns a script's 0 into ErrLeaseLost.
func held(what string, cmd *redis.Cmd) error {
	n, err := cmd.Int()
	if err != nil {
		return fmt.Errorf("rediswindow: %s: %w", what, err)
	}
	if n != 1 {
		return dedup.ErrLeaseLost
	}
	return nil
}

func (s *Store) check(key dedup.Key) error {
	if s.Client == nil {
		return fmt.Errorf("%w: the Client of rediswindow.Store is nil", consumer.ErrConfig)
	}
	return key.Validate()
}

// key puts the scope's length first, so that no two keys are one.
func (s *Store) key(key dedup.Key) string {
	prefix := s.Prefix
	if prefix == "" {
		prefix = DefaultPrefix
	}
	return prefix + strconv.Itoa(len(key.Scope)) + ":" + key.Scope + key.ID
}

// millis rounds up: Redis refuses an expiry of 0.
func millis(d time.Duration) int64 {
	return max(1, int64((d+time.Millisecond-1)/time.Millisecond))
}
