package redisstore

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
)

// ErrNotReplicated says that a call took effect at the primary, but that fewer
// than Options.Replicas replicas had it when Options.ReplicaTimeout was over. It
// will hold unless the primary dies soon.
var ErrNotReplicated = errors.New("redisstore: the write has not reached its replicas")

// once is a command that go-redis sends a single time. Its own retries would hide
// that an earlier try, whose answer was lost, may have taken effect.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

// run runs a script that writes nothing worth waiting for.
func (s *Store) run(ctx context.Context, script *script, key dedup.Key, args ...any) (any, error) {
	return s.do(ctx, script, key, s.send, args)
}

// write runs a script and waits for the replicas, if that is asked for.
func (s *Store) write(ctx context.Context, script *script, key dedup.Key, args ...any) (any, error) {
	if s.o.Replicas > 0 {
		return s.do(ctx, script, key, s.sendAndWait, args)
	}
	return s.do(ctx, script, key, s.send, args)
}

type sendFunc func(ctx context.Context, row string, cmd once) error

func (s *Store) do(ctx context.Context, script *script, key dedup.Key, send sendFunc, args []any) (any, error) {
	if err := ctx.Err(); err != nil { // go-redis may look at ctx too late
		return nil, fmt.Errorf("redisstore: %w", err)
	}
	row := s.RowName(key)
	call := append([]any{"evalsha", script.sha, 1, row}, args...)
	cmd := once{redis.NewCmd(ctx, call...)}
	err := send(ctx, row, cmd)
	if redis.HasErrorPrefix(err, "NOSCRIPT") { // first use, or the server was restarted
		call = append([]any{"eval", script.source, 1, row}, args...)
		cmd = once{redis.NewCmd(ctx, call...)}
		err = send(ctx, row, cmd)
	}
	if err != nil {
		return nil, classify(err)
	}
	return cmd.Val(), nil
}

func (s *Store) send(ctx context.Context, _ string, cmd once) error {
	return s.client.Process(ctx, cmd)
}

// sendAndWait sends cmd and WAIT over one connection, as WAIT counts only what
// its own connection has written.
func (s *Store) sendAndWait(ctx context.Context, row string, cmd once) error {
	if cluster, ok := s.client.(*redis.ClusterClient); ok {
		return s.redirected(ctx, cluster, row, cmd)
	}
	return s.pipeline(ctx, s.client, false, cmd)
}

// redirected finds the node for sendAndWait: a cluster's client would send the
// two commands to different ones.
func (s *Store) redirected(ctx context.Context, cluster *redis.ClusterClient, row string, cmd once) error {
	node, err := cluster.MasterForKey(ctx, row)
	asking := false
	for range redirects {
		if err != nil {
			return err
		}
		err = s.pipeline(ctx, node, asking, cmd)
		addr, moved := redis.IsMovedError(err)
		if moved {
			cluster.ReloadState(ctx) // may not know of it yet, so addr counts
		} else if addr, asking = redis.IsAskError(err); !asking {
			return err
		}
		cmd.SetErr(nil)
		node, err = nodeAt(ctx, cluster, addr)
	}
	return fmt.Errorf("%w: the slot moved %d times", dedup.ErrBusy, redirects)
}

const redirects = 4

func (s *Store) pipeline(ctx context.Context, node redis.Cmdable, asking bool, cmd once) error {
	p := node.Pipeline()
	if asking {
		p.Process(ctx, once{redis.NewCmd(ctx, "asking")}) //nolint:errcheck // see Exec
	}
	p.Process(ctx, cmd) //nolint:errcheck // see Exec
	wait := once{redis.NewCmd(ctx, "wait", s.o.Replicas, s.o.ReplicaTimeout.Milliseconds())}
	p.Process(ctx, wait) //nolint:errcheck // see Exec
	p.Exec(ctx)          //nolint:errcheck // each command has its own
	if err := cmd.Err(); err != nil {
		return err
	}
	got, err := wait.Int()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotReplicated, err)
	}
	if got < s.o.Replicas {
		return fmt.Errorf("%w: %d of %d have it", ErrNotReplicated, got, s.o.Replicas)
	}
	return nil
}

// classify marks the errors after which it is certain that nothing was written.
func classify(err error) error {
	if errors.Is(err, ErrNotReplicated) {
		return err // the write is there
	}
	if refused(err) {
		return fmt.Errorf("redisstore: %w: %w", dedup.ErrBusy, err)
	}
	if errors.Is(err, redis.Nil) {
		return err
	}
	return fmt.Errorf("redisstore: %w", err)
}

// refused tells whether the server, or the client before it, did not begin. Lua
// scripts are refused at their first write if at all, never half way.
func refused(err error) bool {
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) {
		return true
	}
	for _, is := range []func(error) bool{
		redis.IsLoadingError, redis.IsClusterDownError, redis.IsTryAgainError, redis.IsMasterDownError,
		redis.IsReadOnlyError, redis.IsMaxClientsError, redis.IsOOMError, redis.IsNoReplicasError,
	} {
		if is(err) {
			return true
		}
	}
	// BUSY: a script runs that does not end. MISCONF: the server cannot save.
	return redis.HasErrorPrefix(err, "BUSY ") || redis.HasErrorPrefix(err, "MISCONF ")
}

// nodeAt finds the node that a cluster sent us to.
func nodeAt(ctx context.Context, cluster *redis.ClusterClient, addr string) (*redis.Client, error) {
	var mu sync.Mutex
	var found *redis.Client
	err := cluster.ForEachShard(ctx, func(_ context.Context, c *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		if c.Options().Addr == addr {
			found = c
		}
		return nil
	})
	if err == nil && found == nil {
		err = fmt.Errorf("%w: the cluster's node %s is not known yet", dedup.ErrBusy, addr)
	}
	return found, err
}
