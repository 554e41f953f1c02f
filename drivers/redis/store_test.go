package redisstore_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/storetest"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

// shared connects to the Redis server that the tests of all packages share.
func shared(t testing.TB) *redis.Client {
	t.Helper()
	addr := os.Getenv("IDEMPOTENCY_REDIS_ADDR")
	if addr == "" {
		addr = "127.0.0.1:6379"
	}
	c := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { c.Close() })
	if err := c.Ping(t.Context()).Err(); err != nil {
		missing(t, "Redis at "+addr)
	}
	return c
}

// newStore makes a store whose keys are all removed at the end of the test.
func newStore(t testing.TB, c redis.UniversalClient, o redisstore.Options) *redisstore.Store {
	t.Helper()
	o.Prefix = "test:" + dedup.NewToken().String() + ":"
	s, err := redisstore.New(t.Context(), c, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		clean := func(ctx context.Context, c *redis.Client) error {
			keys := c.Scan(ctx, 0, o.Prefix+"*", 1000).Iterator()
			for keys.Next(ctx) {
				c.Del(ctx, keys.Val())
			}
			return keys.Err()
		}
		switch c := c.(type) {
		case *redis.Client:
			clean(context.Background(), c)
		case *redis.ClusterClient:
			c.ForEachMaster(context.Background(), clean)
		}
	})
	return s
}

// caps moves the times in a row's hash. What Redis drops by itself is expired
// either by its fields or by Redis.
func caps(c redis.UniversalClient, byRedis bool) storetest.Caps {
	past := func() string { return fmt.Sprint(time.Now().Add(-time.Hour).UnixMicro()) }
	return storetest.Caps{
		SelfExpiring: true,
		Lapse: func(t *testing.T, s dedup.Store, k dedup.Key) {
			row := s.(*redisstore.Store).RowName(k)
			if err := c.HSet(t.Context(), row, "l", past()).Err(); err != nil {
				t.Fatal(err)
			}
		},
		Expire: func(t *testing.T, s dedup.Store, k dedup.Key) {
			ctx, row := t.Context(), s.(*redisstore.Store).RowName(k)
			status, err := c.HGet(ctx, row, "s").Result()
			if err != nil {
				t.Fatal(err)
			}
			fields := []any{"e", past()}
			if status == "1" {
				fields = append(fields, "l", past())
			}
			if err := c.HSet(ctx, row, fields...).Err(); err != nil {
				t.Fatal(err)
			}
			// Redis drops what has an expiry; a row in doubt must have none.
			if ttl, err := c.TTL(ctx, row).Result(); err != nil {
				t.Fatal(err)
			} else if byRedis && ttl >= 0 {
				c.PExpire(ctx, row, -time.Second)
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	servers := map[string]*redis.Client{"": shared(t)}
	if addr := os.Getenv("IDEMPOTENCY_VALKEY_ADDR"); addr != "" { // beside Redis, where there is one
		c := redis.NewClient(&redis.Options{Addr: addr})
		t.Cleanup(func() { c.Close() })
		servers["Valkey"] = c
	}
	for server, c := range servers {
		for name, byRedis := range map[string]bool{"ExpiredByFields": false, "ExpiredByRedis": true} {
			t.Run(server+name, func(t *testing.T) {
				storetest.Run(t, func(t *testing.T) dedup.Store { return newStore(t, c, redisstore.Options{}) }, caps(c, byRedis))
			})
		}
	}
}

func TestStoreRESP2(t *testing.T) {
	t.Parallel()
	o := *shared(t).Options()
	o.Protocol = 2
	c := redis.NewClient(&o)
	t.Cleanup(func() { c.Close() })
	storetest.Run(t, func(t *testing.T) dedup.Store { return newStore(t, c, redisstore.Options{}) }, caps(c, false))
}

func TestCluster(t *testing.T) {
	t.Parallel()
	_, c := startCluster(t, 0)
	storetest.Run(t, func(t *testing.T) dedup.Store { return newStore(t, c, redisstore.Options{}) }, caps(c, true))

	t.Run("AllNodesHoldRows", func(t *testing.T) {
		s := newStore(t, c, redisstore.Options{})
		for i := range 100 {
			mustClaim(t, s, claim(fmt.Sprint("{tag}", i)), dedup.Won)
		}
		err := c.ForEachMaster(t.Context(), func(ctx context.Context, n *redis.Client) error {
			keys, _, err := n.Scan(ctx, 0, s.RowName(dedup.Key{ID: ""})+"*", 1000).Result()
			if err == nil && len(keys) < 10 {
				err = fmt.Errorf("%s holds %d of 100 rows: the client chose their slot", n.Options().Addr, len(keys))
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestStoreWaitsForReplicas(t *testing.T) {
	t.Parallel()
	primary := startServer(t)
	startReplica(t, primary, primary.addr)
	c := primary.client(t)
	storetest.Run(t, func(t *testing.T) dedup.Store {
		return newStore(t, c, redisstore.Options{Replicas: 1, ReplicaTimeout: patient})
	}, caps(c, false))
}

func claim(id string) dedup.Claim {
	return dedup.Claim{Key: dedup.Key{ID: id}, Fingerprint: []byte("f"), Token: dedup.NewToken(), Lease: time.Minute, TTL: time.Hour}
}

func mustClaim(t testing.TB, s *redisstore.Store, c dedup.Claim, want dedup.State) {
	t.Helper()
	r, err := s.Claim(t.Context(), c)
	if err != nil || r.State != want {
		t.Fatalf("Claim = %v, %v, want %v", r.State, err, want)
	}
}

func completion(body string) dedup.Completion {
	return dedup.Completion{Status: dedup.StatusCompleted, Response: dedup.Response{Code: 200, Body: []byte(body)}, TTL: time.Hour}
}
