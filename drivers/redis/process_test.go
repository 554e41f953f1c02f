package redisstore_test

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// missing fails the test in CI, where everything must run, and skips it elsewhere.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is missing", what)
	}
	t.Skipf("%s is missing", what)
}

// server is a redis-server process of the test's own.
type server struct {
	addr string
	cmd  *exec.Cmd
}

// startServer starts one on a free port, in a folder of its own. It is killed at
// the end of the test.
func startServer(t testing.TB, args ...string) *server {
	t.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		missing(t, "the program redis-server")
	}
	var last string
	for range 10 { // the port may be taken by another before the server has it
		port := freePort(t)
		args := append([]string{"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"}, args...)
		cmd := exec.Command(path, args...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			last = lines.Text()
			if strings.Contains(last, "eady to accept connections") {
				go func() { // ends with the process
					for lines.Scan() {
					}
				}()
				return &server{addr: fmt.Sprintf("127.0.0.1:%d", port), cmd: cmd}
			}
		}
	}
	t.Fatalf("redis-server does not start: %s", last)
	return nil
}

func (s *server) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// freePort finds a port that is free along with the one for a cluster's bus.
func freePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.IntN(10000)
		if free(port) && free(port+10000) {
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

func free(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// patient is a ReplicaTimeout that a busy machine does not outlast.
const patient = 20 * time.Second

// client connects to s.
func (s *server) client(t testing.TB) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.addr, ReadTimeout: 2 * patient})
	t.Cleanup(func() { c.Close() })
	return c
}

// startCluster starts three primaries that share the slots, each with so many
// replicas. The primaries come first.
func startCluster(t testing.TB, replicas int) ([]*server, *redis.ClusterClient) {
	t.Helper()
	ctx := t.Context()
	const nodes, slots = 3, 16384
	servers := make([]*server, nodes*(1+replicas))
	addrs := make([]string, len(servers))
	for i := range servers {
		servers[i] = startServer(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
		addrs[i] = servers[i].addr
		if i >= nodes {
			continue
		}
		if err := servers[i].client(t).ClusterAddSlotsRange(ctx, i*slots/nodes, (i+1)*slots/nodes-1).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range servers {
		_, port, _ := net.SplitHostPort(s.addr)
		if err := servers[0].client(t).ClusterMeet(ctx, "127.0.0.1", port).Err(); err != nil {
			t.Fatal(err)
		}
	}
	formed := func(s *server) {
		c := s.client(t)
		eventually(t, "the cluster forms", func() bool {
			info, err := c.ClusterInfo(ctx).Result()
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprint("cluster_known_nodes:", len(servers)))
		})
	}
	for _, s := range servers {
		formed(s)
	}
	for i, s := range servers[nodes:] {
		id, err := servers[i%nodes].client(t).Do(ctx, "cluster", "myid").Text()
		if err != nil {
			t.Fatal(err)
		}
		if err := s.client(t).ClusterReplicate(ctx, id).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range servers[nodes:] {
		replicated(t, servers[i%nodes], s)
	}
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ReadTimeout: 2 * patient})
	t.Cleanup(func() { c.Close() })
	return servers, c
}

// eventually asks for something that another process brings about.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// startReplica starts a replica of the server at addr, which may be a proxy of
// primary.
func startReplica(t testing.TB, primary *server, addr string) *server {
	t.Helper()
	replica := startServer(t, "--replicaof", strings.Replace(addr, ":", " ", 1))
	replicated(t, primary, replica)
	return replica
}

// replicated waits until both sides see their link up.
func replicated(t testing.TB, primary, replica *server) {
	t.Helper()
	for s, up := range map[*server]string{primary: "state=online", replica: "master_link_status:up"} {
		c := s.client(t)
		eventually(t, "the replica follows its primary", func() bool {
			info, err := c.Info(t.Context(), "replication").Result()
			return err == nil && strings.Contains(info, up)
		})
	}
}
