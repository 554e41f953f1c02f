package faults

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// badNetwork is a TCP proxy whose faults change at random.
type badNetwork struct {
	listener net.Listener
	upstream string
	fault    atomic.Pointer[fault] // never nil
	ctx      context.Context       // ends with the test
	links    sync.WaitGroup

	mu    sync.Mutex
	lossy []context.CancelFunc // end the connections that have lost bytes
}

// fault is what befalls the bytes that go in one direction, or both.
type fault struct {
	up, down bool
	delay    time.Duration // of each piece, up to twice that
	bytes    int           // what passes before it comes to the end below, on each connection
	end      ending
	slice    int // size of the pieces; 0: as they come
}

type ending uint8

const (
	never   ending = iota
	cut            // the connection is closed
	reset          // by RST
	swallow        // bytes vanish, and the connection goes when the fault does
)

var noFault = &fault{}

// randomFault is the network's next one. Those that lose data do so downstream
// too, after the server has acted.
func randomFault(dice *rand.Rand) *fault {
	f := &fault{up: dice.IntN(2) == 0, bytes: dice.IntN(400)}
	f.down = !f.up
	switch dice.IntN(9) {
	case 0, 1:
		return noFault
	case 2, 3:
		f.delay = 30 * time.Millisecond
	case 4, 5:
		f.end = cut
	case 6:
		f.end = reset
	case 7:
		f.slice, f.delay = 20, time.Millisecond/4
	default:
		f.end = swallow
		if dice.IntN(2) == 0 {
			f.up, f.down, f.bytes = true, true, 0 // a partition
		}
	}
	return f
}

func newBadNetwork(t testing.TB, upstream string) *badNetwork {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &badNetwork{listener: l, upstream: upstream, ctx: ctx}
	n.heal()
	n.links.Go(n.accept)
	t.Cleanup(func() {
		cancel()
		l.Close()
		n.links.Wait()
	})
	return n
}

func (n *badNetwork) addr() string { return n.listener.Addr().String() }

// change replaces the network's fault by another one.
func (n *badNetwork) change(dice *rand.Rand) { n.set(randomFault(dice)) }

func (n *badNetwork) heal() { n.set(noFault) }

func (n *badNetwork) set(f *fault) {
	n.fault.Store(f)
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, end := range n.lossy {
		end()
	}
	n.lossy = nil
}

// loses has a connection end with the fault f that it has lost bytes by.
func (n *badNetwork) loses(f *fault, end context.CancelFunc) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lossy = append(n.lossy, end)
	if n.fault.Load() != f {
		end()
	}
}

func (n *badNetwork) accept() {
	for {
		client, err := n.listener.Accept()
		if err != nil {
			return
		}
		n.links.Go(func() { n.carry(client) })
	}
}

// carry takes a connection's bytes both ways until either side or a fault ends
// it.
func (n *badNetwork) carry(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", n.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	ctx, end := context.WithCancel(n.ctx)
	stop := context.AfterFunc(ctx, func() { client.Close(); server.Close() })
	defer stop()
	var both sync.WaitGroup
	both.Go(func() { defer end(); n.pump(ctx, end, server, client, true) })
	both.Go(func() { defer end(); n.pump(ctx, end, client, server, false) })
	both.Wait()
}

func (n *badNetwork) pump(ctx context.Context, end context.CancelFunc, to, from net.Conn, up bool) {
	buf := make([]byte, 4096)
	f, left := noFault, 0
	for {
		k, err := from.Read(buf)
		if err != nil {
			return
		}
		if now := n.fault.Load(); now != f {
			f, left = now, now.bytes
		}
		b := buf[:k]
		if hit := up && f.up || !up && f.down; !hit {
			if _, err := to.Write(b); err != nil {
				return
			}
			continue
		}
		ended := f.end != never && len(b) > left
		if ended {
			b = b[:left]
		}
		left -= len(b)
		if !f.write(ctx, to, b) {
			return
		}
		switch {
		case !ended:
		case f.end == swallow:
			n.loses(f, end)
		default:
			if f.end == reset {
				for _, c := range []net.Conn{to, from} {
					_ = c.(*net.TCPConn).SetLinger(0)
				}
			}
			return
		}
	}
}

func (f *fault) write(ctx context.Context, to net.Conn, b []byte) bool {
	for len(b) > 0 {
		piece := b
		if f.slice > 0 {
			piece = b[:min(f.slice, len(b))]
		}
		if f.delay > 0 {
			t := time.NewTimer(f.delay + rand.N(f.delay))
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
				return false
			}
		}
		if _, err := to.Write(piece); err != nil {
			return false
		}
		b = b[len(piece):]
	}
	return true
}
