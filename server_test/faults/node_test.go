package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/server"
)

// nodeConfig is what a node is started with.
type nodeConfig struct {
	Backend   backend
	Mode      dedup.Mode
	Abandoned dedup.Policy
	Lease     time.Duration
	Wait      time.Duration
	KillAt    string // the crash point to die at, or ""
	Listen    string // address; "" for any port
}

const nodeEnv = "IDEMPOTENCY_TEST_NODE"

// TestNode is not a test but a server in a process of its own, which other
// tests start and kill.
func TestNode(t *testing.T) {
	config := os.Getenv(nodeEnv)
	if config == "" {
		return
	}
	var cfg nodeConfig
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		t.Fatal(err)
	}
	conn, err := openBackend(t.Context(), cfg.Backend)
	if err != nil {
		t.Fatal(err)
	}
	crash := &crashPoints{at: cfg.KillAt}
	store := crash.wrap(conn.store)
	guard := server.New(store, server.Options{
		// The tenant is who the caller says to be: enough for a test of what
		// one tenant may see of another.
		Scope:     func(r *http.Request) (string, error) { return r.Header.Get("Tenant"), nil },
		Mode:      cfg.Mode,
		Abandoned: cfg.Abandoned,
		Lease:     cfg.Lease,
		Wait:      cfg.Wait,
		Required:  true,
	})
	if err := guard.Validate(); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("POST /effects", guard.Handler(effectHandler(conn.ledger, crash)))
	l, err := net.Listen("tcp", cmpOr(cfg.Listen, "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("listening on %s\n", l.Addr())
	go func() { // the parent holds the other end for as long as it lives
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	t.Fatal(http.Serve(l, mux))
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// effectRequest asks for one effect.
type effectRequest struct {
	Op   string `json:"op"`   // what to record; unique per logical operation
	Note string `json:"note"` // makes another request of the same operation
}

type effectAnswer struct {
	Op     string `json:"op"`
	Effect int64  `json:"effect"` // number of the effect in the ledger
}

func effectHandler(l ledger, crash *crashPoints) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req effectRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		crash.point("before effect")
		id, err := l.add(r.Context(), req.Op)
		if err != nil {
			// In lease mode the effect may have happened all the same, so this
			// is stored as the answer.
			http.Error(w, "the ledger failed", http.StatusInternalServerError)
			return
		}
		crash.point("after effect")
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Location", "/effects/"+strconv.FormatInt(id, 10))
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(effectAnswer{req.Op, id})
	})
}

// crashPoints end the process, as SIGKILL does, at a named step.
type crashPoints struct{ at string }

func (c *crashPoints) point(name string) {
	if c.at == name {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way
	}
}

// The crash points in the order in which a first request passes them.
var (
	leaseCrashPoints = []string{"before claim", "after claim", "before effect", "after effect", "before complete", "after complete"}
	txCrashPoints    = []string{"before begin", "after begin", "before effect", "after effect", "before commit", "after commit"}
)

func (c *crashPoints) wrap(s dedup.Store) dedup.Store {
	if tx, ok := s.(dedup.TxStore); ok {
		return &crashTxStore{crashStore{s, c}, tx}
	}
	return &crashStore{s, c}
}

type crashStore struct {
	dedup.Store
	crash *crashPoints
}

func (s *crashStore) Claim(ctx context.Context, c dedup.Claim) (dedup.Result, error) {
	s.crash.point("before claim")
	res, err := s.Store.Claim(ctx, c)
	s.crash.point("after claim")
	return res, err
}

func (s *crashStore) Complete(ctx context.Context, k dedup.Key, t dedup.Token, c dedup.Completion) error {
	s.crash.point("before complete")
	err := s.Store.Complete(ctx, k, t, c)
	s.crash.point("after complete")
	return err
}

type crashTxStore struct {
	crashStore
	tx dedup.TxStore
}

func (s *crashTxStore) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	s.crash.point("before begin")
	tx, res, err := s.tx.Begin(ctx, c)
	s.crash.point("after begin")
	if tx != nil {
		tx = &crashTx{tx, s.crash}
	}
	return tx, res, err
}

type crashTx struct {
	dedup.Tx
	crash *crashPoints
}

func (tx *crashTx) Commit(ctx context.Context, c dedup.Completion) error {
	tx.crash.point("before commit")
	err := tx.Tx.Commit(ctx, c)
	tx.crash.point("after commit")
	return err
}

// node is a running server process.
type node struct {
	addr string
	cmd  *exec.Cmd
	out  *syncBuffer
	done chan struct{} // closed when the process has ended
}

// startNode starts a server process and waits until it listens.
func startNode(t testing.TB, cfg nodeConfig) *node {
	t.Helper()
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{out: &syncBuffer{}, done: make(chan struct{})}
	n.cmd = exec.Command(os.Args[0], "-test.run=^TestNode$", "-test.v=false")
	n.cmd.Env = append(os.Environ(), nodeEnv+"="+string(config))
	n.cmd.Stderr = n.out
	if _, err := n.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := n.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// One that hangs says where, and ends.
	hangs := time.AfterFunc(time.Minute, func() { _ = n.cmd.Process.Signal(syscall.SIGQUIT) })
	defer hangs.Stop()
	lines := bufio.NewScanner(stdout)
	for n.addr == "" && lines.Scan() {
		if addr, ok := strings.CutPrefix(lines.Text(), "listening on "); ok {
			n.addr = addr
		} else {
			fmt.Fprintln(n.out, lines.Text())
		}
	}
	go func() {
		_, _ = io.Copy(n.out, stdout)
		_ = n.cmd.Wait()
		close(n.done)
	}()
	if n.addr == "" {
		<-n.done
		t.Fatalf("the node did not start: %s", n.out)
	}
	t.Cleanup(n.kill)
	return n
}

// kill ends the process by SIGKILL and waits for its end.
func (n *node) kill() {
	_ = n.cmd.Process.Kill()
	<-n.done
}

type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
