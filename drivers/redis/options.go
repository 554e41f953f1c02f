package redisstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Defaults of [Options].
const (
	DefaultPrefix         = "dedup:"
	DefaultReplicaTimeout = time.Second
)

// Options are the settings of [New]. The zero value works.
type Options struct {
	// Prefix begins the name of every Redis key and channel of the store;
	// DefaultPrefix if empty. A hash tag in it ({...}) puts all rows into one
	// slot of a cluster.
	Prefix string

	// Replicas makes every write wait until so many replicas have it, by WAIT
	// in the same round trip; 0 is not to wait. A write that fewer have got
	// after ReplicaTimeout fails with [ErrNotReplicated].
	Replicas int

	// ReplicaTimeout bounds that wait, in whole milliseconds;
	// DefaultReplicaTimeout if 0. It must be shorter than the client's
	// ReadTimeout.
	ReplicaTimeout time.Duration

	// AllowEviction lets New accept a server that may evict rows, or that does
	// not say whether it does. An evicted row's operation runs again.
	AllowEviction bool
}

// ErrEvicting is in the error of [New] if a server may evict rows.
var ErrEvicting = errors.New("redisstore: the server's maxmemory-policy is not noeviction")

// New returns a store on client, which remains the caller's to close. It asks
// every server of a cluster, replicas too, for its maxmemory-policy; with
// Sentinel only the current primary can be asked. The error wraps [ErrEvicting],
// says which option cannot work, or is the client's.
func New(ctx context.Context, client redis.UniversalClient, o Options) (*Store, error) {
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.ReplicaTimeout == 0 {
		o.ReplicaTimeout = DefaultReplicaTimeout
	}
	switch client.(type) {
	case nil:
		return nil, errors.New("redisstore: client is nil")
	case *redis.Client, *redis.ClusterClient:
	default:
		// A Ring moves the keys of a shard that is down to others, where they
		// are absent.
		return nil, fmt.Errorf("redisstore: a %T can move a key away from its row; use a Client or a ClusterClient", client)
	}
	switch {
	case o.Replicas < 0:
		return nil, fmt.Errorf("redisstore: Replicas is %d", o.Replicas)
	case o.ReplicaTimeout < time.Millisecond: // to WAIT, 0 is for ever
		return nil, fmt.Errorf("redisstore: ReplicaTimeout is %v, want at least 1ms", o.ReplicaTimeout)
	}
	if !o.AllowEviction {
		if err := checkEviction(ctx, client); err != nil {
			return nil, err
		}
	}
	return &Store{
		client:  client,
		o:       o,
		watches: watches{client: client, channel: o.Prefix + "ended"},
	}, nil
}

func checkEviction(ctx context.Context, client redis.UniversalClient) error {
	check := func(ctx context.Context, c *redis.Client) error {
		// Not CONFIG GET, which hosted services forbid.
		info, err := c.Info(ctx, "memory").Result()
		if err != nil {
			return fmt.Errorf("redisstore: asking for the maxmemory-policy: %w", err)
		}
		if policy := infoField(info, "maxmemory_policy"); policy != "noeviction" {
			return fmt.Errorf("%w but %q at %s", ErrEvicting, policy, c.Options().Addr)
		}
		return nil
	}
	switch c := client.(type) {
	case *redis.Client:
		return check(ctx, c)
	case *redis.ClusterClient:
		return c.ForEachShard(ctx, check)
	}
	return nil
}

// infoField returns the value of a line of the INFO command's answer.
func infoField(info, name string) string {
	lines := bufio.NewScanner(strings.NewReader(info))
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			return v
		}
	}
	return ""
}
