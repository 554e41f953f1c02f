// Package outboxtest has the tests that every outbox.Store must pass, and a
// store in memory.
package outboxtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency/outbox"
)

// Fixture is a new, empty store and how to reach behind it.
type Fixture struct {
	Store   outbox.Store
	Enqueue func(ctx context.Context, msgs ...outbox.Message) error // in a committed transaction of its own
	Expire  func(ctx context.Context) error                         // ends all leases and all waits, since tests don't sleep
}

// Run runs the tests. newFixture is called for each.
func Run(t *testing.T, newFixture func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, f *fixture)
	}{
		{"Content", testContent},
		{"OrderWithinATransaction", testOrder},
		{"RunOfAKeyHasOneHolder", testHolder},
		{"FailureHoldsItsKeyAlone", testFailure},
		{"ReleaseSpendsNothing", testRelease},
		{"BlockedHoldsItsKeyAlone", testBlocked},
		{"DeadLetterLetsItsKeyGoOn", testDeadLetter},
		{"BlockedBacklogStarvesNobody", testStarvation},
		{"TokenFences", testFence},
		{"Renew", testRenew},
		{"SettleIsPositional", testPositional},
		{"PurgeLeavesUnpublished", testPurge},
		{"ConcurrentClaims", testConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, &fixture{newFixture(t), t}) })
	}
}

type fixture struct {
	Fixture
	t *testing.T
}

const lease = time.Hour // ended by Expire

func (f *fixture) enqueue(key string, names ...string) {
	f.t.Helper()
	msgs := make([]outbox.Message, len(names))
	for i, n := range names {
		msgs[i] = outbox.Message{Topic: "topic", Key: key, Payload: []byte(n)}
	}
	f.ok(f.Enqueue(f.t.Context(), msgs...))
}

func (f *fixture) ok(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// claim claims, and wants these payloads in this order.
func (f *fixture) claim(want ...string) outbox.Claim {
	f.t.Helper()
	c, err := f.Store.Claim(f.t.Context(), 100, lease)
	f.ok(err)
	if got := names(c.Messages); !slices.Equal(got, want) {
		f.t.Fatalf("claimed %q, want %q", got, want)
	}
	return c
}

func names(msgs []outbox.Message) []string {
	var s []string
	for _, m := range msgs {
		s = append(s, string(m.Payload))
	}
	return s
}

// settle gives the messages of c these fates, by position, and wants all written.
func (f *fixture) settle(c outbox.Claim, fates ...outbox.Fate) {
	f.t.Helper()
	var outcomes []outbox.Outcome
	for i, fate := range fates {
		o := outbox.Outcome{Seq: c.Messages[i].Seq, Fate: fate}
		if fate == outbox.Failed {
			o.Delay = time.Hour
		}
		if fate >= outbox.Failed {
			o.Err = "no\x00\xff" // not a text that every database takes
		}
		outcomes = append(outcomes, o)
	}
	n, err := f.Store.Settle(f.t.Context(), c.Token, outcomes)
	f.ok(err)
	if n != len(fates) {
		f.t.Fatalf("settled %d of %d", n, len(fates))
	}
}

func testContent(t *testing.T, f *fixture) {
	id := outbox.NewID()
	in := outbox.Message{ID: id, Topic: "Tópic", Key: "key ", Header: map[string]string{"traceparent": "00-1-2-01", "b": `"ü"`}, Payload: []byte{0, 1, 0xff, '\''}}
	f.ok(f.Enqueue(t.Context(), in, outbox.Message{Topic: "t"}))
	c, err := f.Store.Claim(t.Context(), 10, lease)
	f.ok(err)
	if len(c.Messages) != 2 {
		t.Fatalf("%d messages, want 2", len(c.Messages))
	}
	m, bare := c.Messages[0], c.Messages[1]
	if m.ID != id || m.Topic != in.Topic || m.Key != in.Key || string(m.Payload) != string(in.Payload) ||
		len(m.Header) != 2 || m.Header["traceparent"] != in.Header["traceparent"] || m.Header["b"] != in.Header["b"] {
		t.Errorf("%+v came out for %+v", m, in)
	}
	if m.Attempt != 1 || m.Seq <= 0 || m.Seq >= bare.Seq {
		t.Errorf("attempt %d, seq %d before %d", m.Attempt, m.Seq, bare.Seq)
	}
	if d := time.Since(m.Created).Abs(); d > 12*time.Hour {
		t.Errorf("created %v ago", d)
	}
	if bare.ID == "" || bare.ID == id || bare.Key != "" || len(bare.Payload) != 0 || len(bare.Header) != 0 {
		t.Errorf("the bare message came out as %+v", bare)
	}
}

func testOrder(t *testing.T, f *fixture) {
	var want []string
	for i := range 60 {
		want = append(want, fmt.Sprint("m", i))
	}
	f.enqueue("k", want...)
	f.enqueue("", "last")
	f.claim(append(want, "last")...)
}

func testHolder(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2")
	c, err := f.Store.Claim(t.Context(), 1, lease)
	f.ok(err)
	if got := names(c.Messages); !slices.Equal(got, []string{"a1"}) {
		t.Fatalf("claimed %q", got)
	}
	f.enqueue("a", "a3")
	f.enqueue("A", "A1") // another key than a
	f.enqueue("", "x1")
	f.claim("A1", "x1")
	f.settle(c, outbox.Published)
	f.claim("a2", "a3")
}

func testFailure(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2", "a3")
	f.enqueue("b", "b1")
	c := f.claim("a1", "a2", "a3", "b1")
	f.settle(c, outbox.Published, outbox.Failed, outbox.Released, outbox.Failed)
	f.enqueue("b", "b2")
	f.enqueue("c", "c1")
	f.claim("c1")
	f.ok(f.Expire(t.Context()))
	c = f.claim("a2", "a3", "b1", "b2", "c1")
	if c.Messages[0].Attempt != 2 || c.Messages[1].Attempt != 1 {
		t.Errorf("attempts %d and %d, want 2 and 1", c.Messages[0].Attempt, c.Messages[1].Attempt)
	}
}

func testRelease(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2")
	for range 3 {
		c := f.claim("a1", "a2")
		if c.Messages[0].Attempt != 1 {
			t.Fatalf("attempt %d, want 1", c.Messages[0].Attempt)
		}
		f.settle(c, outbox.Released, outbox.Released)
	}
	c := f.claim("a1", "a2")
	n, err := f.Store.Settle(t.Context(), c.Token, []outbox.Outcome{
		{Seq: c.Messages[0].Seq, Fate: outbox.Released, Delay: time.Hour}, {Seq: c.Messages[1].Seq, Fate: outbox.Released}})
	f.ok(err)
	if n != 2 {
		t.Errorf("settled %d, want 2", n)
	}
	f.claim() // a2 waits for a1
}

func testBlocked(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2")
	f.settle(f.claim("a1", "a2"), outbox.Blocked, outbox.Released)
	f.enqueue("a", "a3")
	f.enqueue("b", "b1")
	f.claim("b1")
}

func testDeadLetter(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2")
	f.settle(f.claim("a1", "a2"), outbox.DeadLetter, outbox.Released)
	f.claim("a2")
	f.ok(f.Expire(t.Context()))
	f.claim("a2")
}

func testStarvation(t *testing.T, f *fixture) {
	var many []string
	for i := range 250 {
		many = append(many, fmt.Sprint("p", i))
	}
	f.enqueue("poison", many...)
	c, err := f.Store.Claim(t.Context(), 1, lease)
	f.ok(err)
	f.settle(c, outbox.Blocked)
	f.enqueue("a", "a1")
	f.claim("a1")
}

func testFence(t *testing.T, f *fixture) {
	f.enqueue("a", "a1")
	old := f.claim("a1")
	f.ok(f.Expire(t.Context()))
	now := f.claim("a1")
	for _, fate := range []outbox.Fate{outbox.Published, outbox.Released, outbox.Failed, outbox.Blocked, outbox.DeadLetter} {
		n, err := f.Store.Settle(t.Context(), old.Token, []outbox.Outcome{{Seq: old.Messages[0].Seq, Fate: fate}})
		if err != nil || n != 0 {
			t.Fatalf("%v with an old token: %d, %v; want 0 and no error", fate, n, err)
		}
	}
	if n, err := f.Store.Renew(t.Context(), old.Token, []int64{old.Messages[0].Seq}, lease); err != nil || n != 0 {
		t.Fatalf("renewed with an old token: %d, %v", n, err)
	}
	f.settle(now, outbox.Published)
	f.claim()
}

func testRenew(t *testing.T, f *fixture) {
	f.enqueue("a", "a1", "a2")
	c := f.claim("a1", "a2")
	f.ok(f.Expire(t.Context()))
	n, err := f.Store.Renew(t.Context(), c.Token, []int64{c.Messages[0].Seq, c.Messages[1].Seq}, lease)
	if err != nil || n != 2 {
		t.Fatalf("renewed %d, %v; want 2", n, err)
	}
	f.claim()
	f.settle(c, outbox.Published, outbox.Published)
}

func testPositional(t *testing.T, f *fixture) {
	f.enqueue("", "x1", "x2", "x3", "x4")
	c := f.claim("x1", "x2", "x3", "x4")
	f.settle(c, outbox.Published, outbox.Released, outbox.DeadLetter)
	f.claim("x2") // x4 is still leased
	f.ok(f.Expire(t.Context()))
	f.claim("x2", "x4")
}

func testPurge(t *testing.T, f *fixture) {
	f.enqueue("", "x1", "x2", "x3", "x4")
	f.settle(f.claim("x1", "x2", "x3", "x4"), outbox.DeadLetter, outbox.Released, outbox.Published)
	if _, err := f.Store.Purge(t.Context(), 10); err != nil {
		t.Fatal(err)
	}
	f.ok(f.Expire(t.Context()))
	if _, err := f.Store.Purge(t.Context(), 10); err != nil {
		t.Fatal(err)
	}
	f.claim("x2", "x4")
}

// testConcurrent has several relays at once on a few keys, while messages are
// being added, with random outcomes: each is published once, in order.
func testConcurrent(t *testing.T, f *fixture) {
	const keys, each, relays = 3, 60, 4
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var mu sync.Mutex
	published := map[string][]string{}
	total := 0
	var wg sync.WaitGroup
	for k := range keys {
		wg.Go(func() {
			for i := range each {
				m := outbox.Message{Topic: "t", Key: fmt.Sprint("k", k), Payload: fmt.Append(nil, i)}
				if err := f.Enqueue(ctx, m, outbox.Message{Topic: "t", Payload: fmt.Append(nil, "none", k, i)}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	relay := func() {
		for ctx.Err() == nil {
			mu.Lock()
			done := total == 2*keys*each
			mu.Unlock()
			if done {
				return
			}
			c, err := f.Store.Claim(ctx, 1+rand.N(20), lease)
			if err != nil {
				t.Error(err)
				return
			}
			var outcomes []outbox.Outcome
			failed := map[string]bool{}
			mu.Lock()
			for _, m := range c.Messages {
				o := outbox.Outcome{Seq: m.Seq, Fate: outbox.Published}
				if m.Key != "" && (failed[m.Key] || rand.N(5) == 0) {
					o.Fate = outbox.Released
					failed[m.Key] = true
				} else {
					published[m.Key] = append(published[m.Key], string(m.Payload))
					total++
				}
				outcomes = append(outcomes, o)
			}
			mu.Unlock()
			if n, err := f.Store.Settle(ctx, c.Token, outcomes); err != nil || n != len(outcomes) {
				t.Errorf("settled %d of %d: %v", n, len(outcomes), err)
				return
			}
		}
	}
	for range relays {
		wg.Go(relay)
	}
	wg.Wait()
	for k := range keys {
		var want []string
		for i := range each {
			want = append(want, fmt.Sprint(i))
		}
		if got := published[fmt.Sprint("k", k)]; !slices.Equal(got, want) {
			t.Errorf("key %d came out as %q", k, got)
		}
	}
	if got := published[""]; len(got) != keys*each || len(slices.Compact(slices.Sorted(slices.Values(got)))) != len(got) {
		t.Errorf("%d messages without a key, want %d, each once", len(got), keys*each)
	}
}
