package redisstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

// replies makes a server answer every script with its error.
type replies struct{ with string }

func (r replies) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !strings.HasPrefix(cmd.Name(), "eval") {
			return next(ctx, cmd)
		}
		reply := redis.NewCmd(ctx, "eval", "return redis.error_reply(ARGV[1])", 0, r.with)
		err := next(ctx, reply)
		cmd.SetErr(err)
		return err
	}
}

func (replies) DialHook(next redis.DialHook) redis.DialHook { return next }
func (replies) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestErrorClasses(t *testing.T) {
	t.Parallel()
	for reply, busy := range map[string]bool{
		"LOADING Redis is loading the dataset in memory":                 true,
		"BUSY Redis is busy running a script.":                           true,
		"CLUSTERDOWN The cluster is down":                                true,
		"TRYAGAIN Multiple keys request during rehashing of slot":        true,
		"MASTERDOWN Link with MASTER is down":                            true,
		"READONLY You can't write against a read only replica.":          true,
		"NOREPLICAS Not enough good replicas to write.":                  true,
		"OOM command not allowed when used memory > 'maxmemory'.":        true,
		"MISCONF Redis is configured to save RDB snapshots, but cannot.": true,
		"ERR max number of clients reached":                              true,
		"BUSYGROUP Consumer Group name already exists":                   false,
		"NOPERM this user has no permissions":                            false,
		"ERR something":                                                  false,
	} {
		o := *shared(t).Options()
		o.MaxRetries = -1 // of the hook's own call
		c := redis.NewClient(&o)
		t.Cleanup(func() { c.Close() })
		s := newStore(t, c, redisstore.Options{})
		c.AddHook(replies{with: reply})
		row := claim("a")
		_, claimErr := s.Claim(t.Context(), row)
		_, getErr := s.Get(t.Context(), row.Key)
		for call, err := range map[string]error{
			"Claim":    claimErr,
			"Get":      getErr,
			"Renew":    s.Renew(t.Context(), row.Key, row.Token, time.Minute),
			"Complete": s.Complete(t.Context(), row.Key, row.Token, completion("x")),
			"Release":  s.Release(t.Context(), row.Key, row.Token),
			"Resolve":  s.Resolve(t.Context(), row.Key, nil, 0),
		} {
			var cause redis.Error
			if !errors.As(err, &cause) || errors.Is(err, dedup.ErrBusy) != busy {
				t.Errorf("%s at %q = %v, want the server's error, ErrBusy: %v", call, reply, err, busy)
			}
			if errors.Is(err, dedup.ErrLeaseLost) || errors.Is(err, dedup.ErrNotFound) {
				t.Errorf("%s at %q = %v: the server did not say that", call, reply, err)
			}
		}
	}
}

// Servers that refuse, in earnest.
func TestRefusedWritesNothing(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	c := srv.client(t)
	s := newStore(t, c, redisstore.Options{})
	mustClaim(t, s, claim("first"), dedup.Won)
	for name, set := range map[string][2]string{
		"OOM":        {"maxmemory", "1"},
		"NOREPLICAS": {"min-replicas-to-write", "1"},
	} {
		if err := c.ConfigSet(t.Context(), set[0], set[1]).Err(); err != nil {
			t.Fatal(err)
		}
		row := claim(name)
		if r, err := s.Claim(t.Context(), row); !errors.Is(err, dedup.ErrBusy) {
			t.Errorf("%s: Claim = %v, %v, want ErrBusy", name, r.State, err)
		}
		c.ConfigSet(t.Context(), set[0], "0")
		if n, err := c.Exists(t.Context(), s.RowName(row.Key)).Result(); n != 0 || err != nil {
			t.Errorf("%s: a refused claim left a row (%v)", name, err)
		}
		mustClaim(t, s, row, dedup.Won)
	}

	replica := startReplica(t, srv, srv.addr)
	rs, err := redisstore.New(t.Context(), replica.client(t), redisstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rs.Claim(t.Context(), claim("at the replica")); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Claim at a replica = %v, want ErrBusy", err)
	}

	o := *c.Options()
	o.PoolSize, o.PoolTimeout = 1, time.Millisecond
	small := redis.NewClient(&o)
	t.Cleanup(func() { small.Close() })
	ps, err := redisstore.New(t.Context(), small, redisstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	conn := small.Conn()
	if err := conn.Ping(t.Context()).Err(); err != nil { // takes the only connection
		t.Fatal(err)
	}
	if _, err := ps.Claim(t.Context(), claim("no connection")); !errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Claim without a free connection = %v, want ErrBusy", err)
	}
	conn.Close()
}

func TestClusterDownIsBusy(t *testing.T) {
	t.Parallel()
	servers, c := startCluster(t, 0)
	s := newStore(t, c, redisstore.Options{})
	mustClaim(t, s, claim("first"), dedup.Won)
	servers[0].kill()
	eventually(t, "the cluster is down", func() bool {
		info, err := servers[1].client(t).ClusterInfo(t.Context()).Result()
		return err == nil && strings.Contains(info, "cluster_state:fail")
	})
	var busy int
	for i := range 20 { // those whose slot was on the dead node can't be asked at all
		if _, err := s.Claim(t.Context(), claim(fmt.Sprint(i))); errors.Is(err, dedup.ErrBusy) {
			busy++
		} else if err == nil {
			t.Error("Claim succeeded though the cluster is down")
		}
	}
	if busy == 0 {
		t.Error("no Claim is ErrBusy, though the servers that are left refuse all")
	}
}

func TestForeignValue(t *testing.T) {
	t.Parallel()
	c := shared(t)
	s := newStore(t, c, redisstore.Options{})
	row := claim("a")
	if err := c.Set(t.Context(), s.RowName(row.Key), "not a row", time.Minute).Err(); err != nil {
		t.Fatal(err)
	}
	if r, err := s.Claim(t.Context(), row); err == nil || errors.Is(err, dedup.ErrBusy) {
		t.Errorf("Claim = %v, %v, want an error that is not ErrBusy", r.State, err)
	}
}

// lossy is a connection that fails to read the answer of a script, once.
type lossy struct {
	net.Conn
	lose *atomic.Int32 // how many answers are yet to be lost
	sent *atomic.Int32 // scripts
	mine atomic.Bool   // the answer to read next is one to lose
}

func (l *lossy) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("evalsha")) {
		l.sent.Add(1)
		l.mine.Store(l.lose.Add(-1) >= 0)
	}
	return l.Conn.Write(b)
}

func (l *lossy) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if l.mine.Swap(false) {
		l.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// A call whose answer is lost is not repeated behind the caller's back, says that
// it is unknown what became of it, and can be repeated by the caller.
func TestAnswerLost(t *testing.T) {
	t.Parallel()
	for _, replicas := range []int{0, 1} {
		t.Run(fmt.Sprint("Replicas=", replicas), func(t *testing.T) {
			o := *shared(t).Options()
			if replicas > 0 {
				primary := startServer(t)
				startReplica(t, primary, primary.addr)
				o.Addr, o.ReadTimeout = primary.addr, 2*patient
			}
			var lose, sent atomic.Int32
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := new(net.Dialer).DialContext(ctx, network, addr)
				return &lossy{Conn: c, lose: &lose, sent: &sent}, err
			}
			c := redis.NewClient(&o)
			t.Cleanup(func() { c.Close() })
			s := newStore(t, c, redisstore.Options{Replicas: replicas, ReplicaTimeout: patient})
			ctx := t.Context()
			mustClaim(t, s, claim("warm"), dedup.Won) // the server knows the scripts now
			s.Complete(ctx, dedup.Key{ID: "none"}, dedup.Token{}, completion("x"))

			row := claim("a")
			lost := func(call string, do func() error) {
				t.Helper()
				lose.Store(1)
				before := sent.Load()
				if err := do(); err == nil || errors.Is(err, dedup.ErrBusy) || errors.Is(err, dedup.ErrLeaseLost) {
					t.Errorf("%s = %v, want an error that knows nothing", call, err)
				}
				if n := sent.Load() - before; n != 1 {
					t.Errorf("%s was sent %d times, want once", call, n)
				}
			}
			lost("Claim", func() error { _, err := s.Claim(ctx, row); return err })
			mustClaim(t, s, claim("a"), dedup.InProgress)
			mustClaim(t, s, row, dedup.Won)
			lost("Complete", func() error { return s.Complete(ctx, row.Key, row.Token, completion("x")) })
			mustClaim(t, s, claim("a"), dedup.Completed)
			if err := s.Complete(ctx, row.Key, row.Token, completion("x")); err != nil {
				t.Errorf("Complete repeated = %v", err)
			}
		})
	}
}

func TestScriptsAreLoadedAgain(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	s := newStore(t, c, redisstore.Options{})
	row := claim("a")
	for _, step := range []func() error{
		func() error { _, err := s.Claim(t.Context(), row); return err },
		func() error { return s.Renew(t.Context(), row.Key, row.Token, time.Minute) },
		func() error { return s.Complete(t.Context(), row.Key, row.Token, completion("x")) },
		func() error { _, err := s.Get(t.Context(), row.Key); return err },
	} {
		if err := c.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		if err := step(); err != nil {
			t.Errorf("after SCRIPT FLUSH: %v", err)
		}
	}
}
