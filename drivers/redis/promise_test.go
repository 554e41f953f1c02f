package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

// This file shows what Redis cannot promise, and what the options change.

func TestNewRefusesEviction(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	for policy, ok := range map[string]bool{
		"noeviction": true, "allkeys-lru": false, "allkeys-random": false, "volatile-lru": false, "volatile-ttl": false,
	} {
		if err := c.ConfigSet(t.Context(), "maxmemory-policy", policy).Err(); err != nil {
			t.Fatal(err)
		}
		_, err := redisstore.New(t.Context(), c, redisstore.Options{})
		if ok && err != nil || !ok && !errors.Is(err, redisstore.ErrEvicting) {
			t.Errorf("New at a server with %s = %v, want ErrEvicting: %v", policy, err, !ok)
		}
		if _, err := redisstore.New(t.Context(), c, redisstore.Options{AllowEviction: true}); err != nil {
			t.Errorf("New with AllowEviction at a server with %s = %v", policy, err)
		}
	}

	servers, cluster := startCluster(t, 0)
	servers[2].client(t).ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lfu")
	if _, err := redisstore.New(t.Context(), cluster, redisstore.Options{}); !errors.Is(err, redisstore.ErrEvicting) {
		t.Errorf("New on a cluster of which one server evicts = %v, want ErrEvicting", err)
	}
}

func TestEvictedRowRunsAgain(t *testing.T) {
	t.Parallel()
	c := startServer(t, "--maxmemory-policy", "allkeys-lru").client(t)
	s := newStore(t, c, redisstore.Options{AllowEviction: true})
	row := claim("paid")
	mustClaim(t, s, row, dedup.Won)
	if err := s.Complete(t.Context(), row.Key, row.Token, completion("receipt")); err != nil {
		t.Fatal(err)
	}
	mustClaim(t, s, claim("paid"), dedup.Completed)
	if err := c.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil { // evicts all
		t.Fatal(err)
	}
	eventually(t, "the row is evicted", func() bool {
		n, err := c.Exists(t.Context(), s.RowName(row.Key)).Result()
		return err == nil && n == 0
	})
	c.ConfigSet(t.Context(), "maxmemory", "0")
	mustClaim(t, s, claim("paid"), dedup.Won) // a second payment
}

// link carries a replica's connections to its primary, until it is cut.
type link struct {
	l     net.Listener
	to    string
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
	wg    sync.WaitGroup
}

func newLink(t *testing.T, to string) *link {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k := &link{l: l, to: to}
	k.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			k.carry(in)
		}
	})
	t.Cleanup(k.close)
	return k
}

func (k *link) carry(in net.Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out, err := net.Dial("tcp", k.to)
	if err != nil || k.cut {
		in.Close()
		return
	}
	k.conns = append(k.conns, in, out)
	k.wg.Go(func() { io.Copy(out, in); out.Close() })
	k.wg.Go(func() { io.Copy(in, out); in.Close() })
}

func (k *link) close() {
	k.mu.Lock()
	k.cut = true
	for _, c := range k.conns {
		c.Close()
	}
	k.mu.Unlock()
	k.l.Close()
	k.wg.Wait()
}

func TestPrimaryDiesBeforeReplication(t *testing.T) {
	t.Parallel()
	primary := startServer(t)
	k := newLink(t, primary.addr)
	replica := startReplica(t, primary, k.l.Addr().String())
	pc, rc := primary.client(t), replica.client(t)

	on := func(c *redis.Client, replicas int, wait time.Duration) *redisstore.Store {
		t.Helper()
		s, err := redisstore.New(t.Context(), c, redisstore.Options{Replicas: replicas, ReplicaTimeout: wait})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	pay := func(s *redisstore.Store, id string) error {
		row := claim(id)
		mustClaim(t, s, row, dedup.Won)
		return s.Complete(t.Context(), row.Key, row.Token, completion("receipt"))
	}

	if err := pay(on(pc, 1, patient), "replicated"); err != nil {
		t.Fatalf("with a replica at hand: %v", err)
	}
	k.close()
	// Without Replicas nobody notices.
	if err := pay(on(pc, 0, 0), "not replicated"); err != nil {
		t.Fatal(err)
	}
	mustClaim(t, on(pc, 0, 0), claim("not replicated"), dedup.Completed)
	// With it, nobody runs on a claim, or sends an answer, that could be lost.
	row := claim("refused")
	if r, err := on(pc, 1, 100*time.Millisecond).Claim(t.Context(), row); !errors.Is(err, redisstore.ErrNotReplicated) || errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Claim without a replica = %v, %v, want ErrNotReplicated, and not ErrBusy, since the write is there", r.State, err)
	}
	if err := on(pc, 1, 100*time.Millisecond).Complete(t.Context(), row.Key, row.Token, completion("x")); !errors.Is(err, redisstore.ErrNotReplicated) {
		t.Errorf("Complete without a replica = %v, want ErrNotReplicated", err)
	}

	primary.kill()
	if err := rc.Do(t.Context(), "replicaof", "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	after := on(rc, 0, 0)
	mustClaim(t, after, claim("replicated"), dedup.Completed)
	mustClaim(t, after, claim("not replicated"), dedup.Won) // a second payment
	mustClaim(t, after, claim("refused"), dedup.Won)        // the first: nobody had been told of the other
}

// Slots move while the cluster serves.
func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	_, c := startCluster(t, 1)
	for _, replicas := range []int{0, 1} {
		t.Run(fmt.Sprint("Replicas=", replicas), func(t *testing.T) {
			ctx := t.Context()
			s := newStore(t, c, redisstore.Options{Replicas: replicas, ReplicaTimeout: patient})
			row := claim("a")
			name := s.RowName(row.Key)
			slot, err := c.ClusterKeySlot(ctx, name).Result()
			if err != nil {
				t.Fatal(err)
			}
			from, err := c.MasterForKey(ctx, name)
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			var to *redis.Client
			c.ForEachMaster(ctx, func(_ context.Context, n *redis.Client) error {
				mu.Lock()
				defer mu.Unlock()
				if n.Options().Addr != from.Options().Addr {
					to = n
				}
				return nil
			})
			id := func(n *redis.Client) string { return n.Do(ctx, "cluster", "myid").Val().(string) }
			setslot := func(n *redis.Client, how string, node *redis.Client) {
				t.Helper()
				if err := n.Do(ctx, "cluster", "setslot", slot, how, id(node)).Err(); err != nil {
					t.Fatal(err)
				}
			}
			setslot(to, "importing", from)
			setslot(from, "migrating", to)
			mustClaim(t, s, row, dedup.Won) // by ASK: a key that is not there yet is made at the target
			if n := to.Do(ctx, "cluster", "countkeysinslot", slot).Val(); n != int64(1) {
				t.Fatalf("the slot's target holds %v keys, want 1: the test has shown no ASK", n)
			}
			mustClaim(t, s, claim("a"), dedup.InProgress)
			setslot(to, "node", to)
			setslot(from, "node", to)
			mustClaim(t, s, claim("a"), dedup.InProgress) // by MOVED
			if err := s.Complete(ctx, row.Key, row.Token, completion("x")); err != nil {
				t.Error(err)
			}
			mustClaim(t, s, claim("a"), dedup.Completed)
		})
	}
}

func TestPhysicalExpiry(t *testing.T) {
	t.Parallel()
	c := shared(t)
	s := newStore(t, c, redisstore.Options{})
	ctx := t.Context()
	row := claim("a")
	row.Lease, row.TTL = time.Hour, time.Minute
	about := func(when string, want time.Duration) {
		t.Helper()
		got, err := c.PTTL(ctx, s.RowName(row.Key)).Result()
		if err != nil || (got-want).Abs() > 30*time.Second {
			t.Errorf("%s: Redis drops the row after %v (%v), want about %v", when, got, err, want)
		}
	}
	mustClaim(t, s, row, dedup.Won)
	about("live", time.Hour) // never before its lease has ended
	s.Renew(ctx, row.Key, row.Token, 2*time.Hour)
	about("renewed", 2*time.Hour)
	s.Renew(ctx, row.Key, row.Token, 0)
	about("abandoned", time.Minute)
	s.Complete(ctx, row.Key, row.Token, dedup.Completion{Status: dedup.StatusUnknown, TTL: time.Minute})
	about("unknown", -1) // Redis's word for never
	s.Resolve(ctx, row.Key, &dedup.Response{Code: 200}, 5*time.Minute)
	about("resolved", 5*time.Minute)
}

func TestNewValidates(t *testing.T) {
	t.Parallel()
	c := shared(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": c.Options().Addr}})
	t.Cleanup(func() { ring.Close() })
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { gone.Close() })
	for name, f := range map[string]func() error{
		"nil client": func() error { _, err := redisstore.New(t.Context(), nil, redisstore.Options{}); return err },
		"a Ring":     func() error { _, err := redisstore.New(t.Context(), ring, redisstore.Options{}); return err },
		"no server":  func() error { _, err := redisstore.New(t.Context(), gone, redisstore.Options{}); return err },
		"Replicas":   func() error { _, err := redisstore.New(t.Context(), c, redisstore.Options{Replicas: -1}); return err },
		"ReplicaTimeout": func() error {
			_, err := redisstore.New(t.Context(), c, redisstore.Options{ReplicaTimeout: 1})
			return err
		},
	} {
		if err := f(); err == nil || !strings.HasPrefix(err.Error(), "redisstore: ") {
			t.Errorf("New with %s = %v, want an error of this package", name, err)
		}
	}
}
