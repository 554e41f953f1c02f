package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// The environment variables of TestChaos; `make chaos` sets them.
const (
	chaosTimeEnv  = "IDEMPOTENCY_CHAOS_TIME"  // how long each combination runs, "5s" if unset
	chaosSeedEnv  = "IDEMPOTENCY_CHAOS_SEED"  // a number; printed with each run
	chaosStoreEnv = "IDEMPOTENCY_CHAOS_STORE" // one of backendKinds; unset: all
)

// TestChaos runs clients against two nodes on one database, while the nodes and
// the database are killed and started again and both networks, clients to nodes
// and nodes to database, lose, cut, delay and partition. Afterwards all that
// was answered and all that was done must fit the promises.
//
// The seed fixes what is asked for and which faults come; how they meet is up
// to the scheduler.
func TestChaos(t *testing.T) {
	length, err := time.ParseDuration(cmpOr(os.Getenv(chaosTimeEnv), "5s"))
	if err != nil {
		t.Fatalf("%s: %v", chaosTimeEnv, err)
	}
	seed, err := strconv.ParseUint(cmpOr(os.Getenv(chaosSeedEnv), "1"), 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", chaosSeedEnv, err)
	}
	for _, kind := range backendKinds {
		if only := os.Getenv(chaosStoreEnv); only != "" && only != kind {
			continue
		}
		modes := []dedup.Mode{dedup.Lease}
		if transactional(kind) {
			modes = append(modes, dedup.Transaction)
		}
		for _, mode := range modes {
			name := kind + map[dedup.Mode]string{dedup.Lease: "/lease", dedup.Transaction: "/transaction"}[mode]
			t.Run(name, func(t *testing.T) {
				(&chaos{kind: kind, mode: mode, seed: seed, length: length}).run(t)
			})
		}
	}
}

type chaos struct {
	kind   string
	mode   dedup.Mode
	seed   uint64
	length time.Duration

	db       *instance // nil for sqlite
	direct   backend   // around the bad network
	dbNet    *badNetwork
	nodes    [2]*chaosNode
	history  history
	requests sync.Map // operationKey → effectRequest that was sent first
	kills    struct{ nodes, databases int }
}

type chaosNode struct {
	cfg nodeConfig
	n   *node
	net *badNetwork
}

func (c *chaos) run(t *testing.T) {
	c.setUp(t)
	ctx, cancel := context.WithTimeout(t.Context(), c.length)
	defer cancel()
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() { c.client(ctx, rand.New(rand.NewPCG(c.seed, uint64(i)))) })
	}
	c.torment(ctx, t, rand.New(rand.NewPCG(c.seed, 1<<32)))
	clients.Wait()
	asked := c.settleAll(t)
	c.check(t, asked)
}

func (c *chaos) setUp(t *testing.T) {
	c.direct = backend{Kind: c.kind, Prefix: "c" + dedup.NewToken().String()[:12]}
	through := c.direct
	if c.kind == "sqlite" {
		c.direct = newBackend(t, c.kind)
		through = c.direct
	} else {
		c.db = newInstance(t, c.kind)
		c.direct.Addr = c.db.addr
		c.dbNet = newBadNetwork(t, fmt.Sprintf("127.0.0.1:%d", c.db.port))
		through.Addr = redirect(t, c.db.addr, c.db.port, c.dbNet.addr())
		conn, err := openBackend(t.Context(), c.direct)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.close()
		if err := conn.migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for i := range c.nodes {
		cfg := nodeConfig{Backend: through, Mode: c.mode, Lease: 2 * time.Second, Wait: 500 * time.Millisecond,
			Listen: fmt.Sprintf("127.0.0.1:%d", freePort(t))}
		n := &chaosNode{cfg: cfg, n: startNode(t, cfg)}
		n.net = newBadNetwork(t, n.n.addr)
		c.nodes[i] = n
	}
}

// redirect is addr with host and port of the proxy.
func redirect(t *testing.T, addr string, port int, proxy string) string {
	t.Helper()
	if u, err := url.Parse(addr); err == nil && u.Scheme == "postgres" {
		u.Host = proxy
		return u.String()
	}
	return strings.Replace(addr, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), proxy, 1)
}

// client sends operations one after another, each from one to four times,
// sometimes at once, sometimes under a key that stands for something else.
func (c *chaos) client(ctx context.Context, dice *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		k := operationKey{tenant: "tenant-" + strconv.Itoa(dice.IntN(2)), key: "key-" + strconv.Itoa(dice.IntN(4000))}
		req := effectRequest{Op: k.tenant + "/" + k.key}
		if dice.IntN(10) == 0 {
			req.Note = "another request" // with the same key
		}
		c.requests.LoadOrStore(k, req)
		var copies sync.WaitGroup
		for range 1 + dice.IntN(4) {
			target := c.nodes[dice.IntN(len(c.nodes))].net.addr()
			send := func() { c.send(ctx, target, k, req) }
			if dice.IntN(2) == 0 {
				copies.Go(send)
			} else {
				send()
			}
		}
		copies.Wait()
	}
}

func (c *chaos) send(ctx context.Context, addr string, k operationKey, req effectRequest) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	a, err := send(ctx, addr, k.tenant, k.key, req)
	if err == nil {
		c.history.add(event{k.tenant, k.key, req, a})
	}
}

// torment makes things go wrong until ctx ends, and then well again.
func (c *chaos) torment(ctx context.Context, t *testing.T, dice *rand.Rand) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			for _, node := range c.nodes {
				node.net.heal()
			}
			if c.dbNet != nil {
				c.dbNet.heal()
			}
			return
		case <-tick.C:
		}
		c.nodes[dice.IntN(len(c.nodes))].net.change(dice)
		if c.dbNet != nil && n%3 == 0 {
			c.dbNet.change(dice)
		}
		if n%7 == 0 {
			node := c.nodes[dice.IntN(len(c.nodes))]
			node.n.kill()
			if c.dbNet != nil {
				c.dbNet.heal() // a node that can't reach its database does not start
			}
			node.n = startNode(t, node.cfg)
			c.kills.nodes++
		}
		if c.db != nil && n%20 == 0 {
			c.db.kill()
			c.db.up(t)
			c.kills.databases++
		}
	}
}

// settleAll gets every key its definite answer, from the other node than the
// last time, and returns how many keys there are.
func (c *chaos) settleAll(t *testing.T) int {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var all []event
	c.requests.Range(func(k, r any) bool {
		all = append(all, event{tenant: k.(operationKey).tenant, key: k.(operationKey).key, request: r.(effectRequest)})
		return true
	})
	jobs := make(chan event)
	var workers sync.WaitGroup
	for i := range 16 {
		workers.Go(func() {
			for e := range jobs {
				// One lease and a little: then each key has its answer.
				one, cancel := context.WithTimeout(ctx, 30*time.Second)
				a, err := settle(one, c.nodes[i%len(c.nodes)].n.addr, e.tenant, e.key, e.request)
				cancel()
				if err != nil {
					t.Errorf("key %s of %s: %v", e.key, e.tenant, err)
					continue
				}
				e.answer = a
				c.history.add(e)
			}
		})
	}
	for _, e := range all {
		jobs <- e
	}
	close(jobs)
	workers.Wait()
	return len(all)
}

func (c *chaos) check(t *testing.T, asked int) {
	for _, node := range c.nodes {
		node.n.kill() // nothing may happen any more
	}
	conn, err := openBackend(t.Context(), c.direct)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.close()
	effects, err := conn.ledger.effects(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bad := c.history.violations(effects)
	for i, v := range bad {
		if i == 20 {
			t.Errorf("… and %d more", len(bad)-i)
			break
		}
		t.Error(v)
	}
	t.Logf("seed %d, %v: %d keys, %d answers, %d effects; %d nodes and %d databases killed; %d violations",
		c.seed, c.length, asked, len(c.history.events), len(effects), c.kills.nodes, c.kills.databases, len(bad))
	if len(bad) > 0 {
		t.Logf("again: %s=%d %s=%s go test -run 'TestChaos' .", chaosSeedEnv, c.seed, chaosStoreEnv, c.kind)
	}
	if asked == 0 || len(effects) == 0 {
		t.Error("nothing happened at all")
	}
}
