package faults

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// instance is a database server of the test's own, to be killed and started
// again. The shared ones are left alone.
type instance struct {
	kind  string
	dir   string
	port  int
	addr  string // as backend.Addr
	start func() *exec.Cmd
	cmd   *exec.Cmd
	done  chan struct{}
}

// newInstance starts a server with a data directory of its own. Where its
// program is missing the test is skipped, or fails if CI=true.
func newInstance(t testing.TB, kind string) *instance {
	t.Helper()
	dir, err := os.MkdirTemp("", "instance")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	in := &instance{kind: kind, dir: dir, port: freePort(t)}
	switch kind {
	case "postgres", "pgx":
		in.postgres(t)
	case "mysql":
		in.mariadb(t)
	case "redis":
		in.redis(t)
	default:
		t.Fatalf("no instances of %q", kind)
	}
	in.up(t)
	t.Cleanup(in.kill)
	return in
}

func (in *instance) postgres(t testing.TB) {
	initdb := program(t, "initdb", "/usr/lib/postgresql/*/bin/initdb")
	server := program(t, "postgres", "/usr/lib/postgresql/*/bin/postgres")
	data := filepath.Join(in.dir, "data")
	in.run(t, "postgres", initdb, "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync")
	in.addr = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", in.port)
	in.start = func() *exec.Cmd {
		return in.as("postgres", server, "-D", data, "-p", strconv.Itoa(in.port), "-k", in.dir, "-c", "listen_addresses=127.0.0.1")
	}
}

func (in *instance) mariadb(t testing.TB) {
	install := program(t, "mariadb-install-db", "/usr/bin/mariadb-install-db")
	server := program(t, "mariadbd", "/usr/sbin/mariadbd")
	data := filepath.Join(in.dir, "data")
	in.run(t, "mysql", install, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db")
	in.addr = fmt.Sprintf("root@tcp(127.0.0.1:%d)/mysql", in.port)
	in.start = func() *exec.Cmd {
		return in.as("mysql", server, "--no-defaults", "--datadir="+data, "--port="+strconv.Itoa(in.port),
			"--bind-address=127.0.0.1", "--socket="+filepath.Join(in.dir, "s"), "--pid-file="+filepath.Join(in.dir, "pid"))
	}
}

func (in *instance) redis(t testing.TB) {
	server := program(t, "redis-server", "/usr/bin/redis-server")
	in.addr = fmt.Sprintf("127.0.0.1:%d", in.port)
	in.start = func() *exec.Cmd {
		// Each write is on disk before it is answered, so a kill loses nothing.
		return in.as("", server, "--port", strconv.Itoa(in.port), "--bind", "127.0.0.1", "--dir", in.dir,
			"--appendonly", "yes", "--appendfsync", "always", "--save", "")
	}
}

// up starts the server and waits until it answers. One that ends again is
// started once more: after a kill PostgreSQL does not start before the last of
// its old processes is gone.
func (in *instance) up(t testing.TB) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(in.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	launch := func() {
		cmd, done := in.start(), make(chan struct{})
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { _ = cmd.Wait(); close(done) }()
		in.cmd, in.done = cmd, done
	}
	launch()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := openBackend(ctx, backend{Kind: in.kind, Addr: in.addr, Prefix: "probe"})
		if err == nil {
			conn.close()
			return
		}
		select {
		case <-ctx.Done():
			out, _ := os.ReadFile(log.Name())
			t.Fatalf("%s does not answer: %v\n%s", in.kind, err, out)
		case <-tick.C:
		}
		select {
		case <-in.done:
			launch()
		default:
		}
	}
}

// kill ends the server and its helpers as a power cut does, short of the disk.
func (in *instance) kill() {
	_ = syscall.Kill(-in.cmd.Process.Pid, syscall.SIGKILL)
	<-in.done
	_ = os.Remove(filepath.Join(in.dir, "data", "postmaster.pid"))
}

// as is a command of another user, since databases refuse to run as root.
func (in *instance) as(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = in.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that kill gets all of it
	if u, err := user.Lookup(name); err == nil && os.Getuid() == 0 {
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
	return cmd
}

func (in *instance) run(t testing.TB, owner string, args ...string) {
	t.Helper()
	cmd := in.as(owner, args...)
	if c := cmd.SysProcAttr.Credential; c != nil {
		if err := os.Chown(in.dir, int(c.Uid), int(c.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", args[0], err, out)
	}
}

func program(t testing.TB, name string, places ...string) string {
	t.Helper()
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, pattern := range places {
		found, _ := filepath.Glob(pattern)
		if len(found) > 0 {
			slices.Sort(found)
			return found[len(found)-1]
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("no program %s", name)
	}
	t.Skipf("no program %s", name)
	return ""
}

func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
