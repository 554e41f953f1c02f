package storetest

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var expiryTests = []test{
	{"ExpiredIsAbsent", expiredIsAbsent},
	{"UnknownNeverExpires", unknownNeverExpires},
	{"LiveNeverExpires", liveNeverExpires},
	{"ShortTimes", shortTimes},
	{"Purge", purge},
	{"PurgeKeepsLiveAndUnknown", purgeKeeps},
	{"PurgeConcurrent", purgeConcurrent},
}

func expiredIsAbsent(e *env) {
	rows := map[string]func(dedup.Key) dedup.Token{
		"completed": func(k dedup.Key) dedup.Token { return e.completed(k, answer("old")) },
		"abandoned": e.abandoned,
		"claimed":   e.won, // its lease passes with its TTL
	}
	for name, makeRow := range rows {
		promise := "a row that was " + name + " counts as absent once its TTL has passed"

		k := e.other("-written-" + name)
		token := makeRow(k)
		e.caps.Expire(e.t, e.s, k)
		e.absent(k, promise)
		e.fenced(k, token, promise)
		e.is(e.s.Resolve(e.ctx, k, nil, 0), dedup.ErrNotFound, "Resolve", promise)
		r := answer("by the operator")
		e.is(e.s.Resolve(e.ctx, k, &r, ttl), dedup.ErrNotFound, "Resolve", promise)
		e.absent(k, promise)

		k = e.other("-claimed-" + name)
		token = makeRow(k)
		e.caps.Expire(e.t, e.s, k)
		c := e.claimOf(k, dedup.NewToken())
		c.Fingerprint = []byte("another request")
		res := e.wantClaim(c, dedup.Won, promise+", so another request wins it")
		if res.Record.Attempt != 1 {
			e.t.Errorf("Record.Attempt is %d, want 1: %s", res.Record.Attempt, promise)
		}
		got := e.get(k)
		if string(got.Fingerprint) != "another request" || got.Token != c.Token || got.Status != dedup.StatusInProgress || got.LeaseLeft <= 0 {
			e.t.Errorf("row is %+v, want a new one made by the claim: %s", got, promise)
		}
		e.near("ExpiresAt", got.ExpiresAt, got.CreatedAt.Add(ttl))
		e.response(got.Response, dedup.Response{}, "nothing is left of the expired row's answer")
		e.fenced(k, token, promise)
		e.complete(k, c.Token, dedup.StatusCompleted, answer("new"))
		res = e.wantClaim(c, dedup.Completed, "the new row is like any other")
		e.response(res.Record.Response, answer("new"), "the new row is like any other")

		k = e.other("-repeated-" + name)
		first := e.claimOf(k, makeRow(k))
		e.caps.Expire(e.t, e.s, k)
		res = e.wantClaim(first, dedup.Won, promise+", also for a claim with its token")
		if res.Record.Attempt != 1 {
			e.t.Errorf("Record.Attempt is %d, want 1: %s", res.Record.Attempt, promise)
		}
		e.want(k, dedup.InProgress, "a row won in place of an expired one is live")
	}
}

func unknownNeverExpires(e *env) {
	const promise = "a row in doubt is kept past its TTL, until Resolve"
	e.unknown(e.key)
	e.caps.Expire(e.t, e.s, e.key)
	e.want(e.key, dedup.Unknown, promise)
	if _, err := e.s.Purge(e.ctx, 100); err != nil {
		e.t.Errorf("Purge: %v", err)
	}
	if got := e.get(e.key); got.Status != dedup.StatusUnknown {
		e.t.Errorf("status is %v, want unknown: %s", got.Status, promise)
	}
	r := answer("by the operator")
	e.ok(e.s.Resolve(e.ctx, e.key, &r, ttl), "Resolve", promise)
	res := e.want(e.key, dedup.Completed, "Resolve starts a new TTL")
	e.response(res.Record.Response, r, "Resolve starts a new TTL")
	e.caps.Expire(e.t, e.s, e.key)
	e.absent(e.key, "a resolved row expires like any completed one")
}

func liveNeverExpires(e *env) {
	const promise = "a live row never expires, though its TTL has passed"
	c := e.claimOf(e.key, dedup.NewToken())
	c.TTL = time.Millisecond
	e.wantClaim(c, dedup.Won, "an absent key is won")
	e.pastTTL(e.get(e.key).ExpiresAt)
	e.want(e.key, dedup.InProgress, promise)
	if _, err := e.s.Purge(e.ctx, 100); err != nil {
		e.t.Errorf("Purge: %v", err)
	}
	if got := e.get(e.key); got.Token != c.Token {
		e.t.Errorf("row is %+v: %s", got, promise)
	}
	r := answer("by the operator")
	e.is(e.s.Resolve(e.ctx, e.key, &r, ttl), dedup.ErrNotResolvable, "Resolve", promise)
	e.ok(e.s.Renew(e.ctx, e.key, c.Token, lease), "Renew", promise)
	e.want(e.key, dedup.InProgress, promise)
	e.ok(e.s.Complete(e.ctx, e.key, c.Token, done("done")), "Complete", promise)
	e.want(e.key, dedup.Completed, "Complete starts the TTL anew")

	c = e.claimOf(e.other("-lapsed"), dedup.NewToken())
	c.TTL = time.Millisecond
	e.wantClaim(c, dedup.Won, "an absent key is won")
	e.pastTTL(e.get(c.Key).ExpiresAt)
	e.ok(e.s.Renew(e.ctx, c.Key, c.Token, 0), "Renew", promise)
	e.absent(c.Key, "the lease has ended and the TTL has passed, so the row is expired")
	if r := e.want(c.Key, dedup.Won, "an expired row counts as absent"); r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: an expired row is not abandoned", r.Record.Attempt)
	}
}

// Stores count in milliseconds or finer; what is shorter must not become 0 or
// forever.
func shortTimes(e *env) {
	c := e.claimOf(e.key, dedup.NewToken())
	c.Lease, c.TTL = 1, 1
	e.wantClaim(c, dedup.Won, "any positive lease and TTL will do")
	if got, err := e.s.Get(e.ctx, e.key); err == nil {
		e.pastTTL(got.ExpiresAt.Add(got.LeaseLeft))
	}
	e.absent(e.key, "a lease and a TTL of a nanosecond pass")
	e.won(e.key)

	c = e.claimOf(e.other("-long"), dedup.NewToken())
	c.TTL = 10 * 365 * 24 * time.Hour
	e.wantClaim(c, dedup.Won, "any positive lease and TTL will do")
	got := e.get(c.Key)
	e.near("ExpiresAt", got.ExpiresAt, got.CreatedAt.Add(c.TTL))
}

// expired makes n expired rows, completed and abandoned in turn.
func (e *env) expired(n int) {
	e.t.Helper()
	for i := range n {
		k := e.other(fmt.Sprint("-expired-", i))
		if i%2 == 0 {
			e.completed(k, answer("old"))
		} else {
			e.abandoned(k)
		}
		e.caps.Expire(e.t, e.s, k)
	}
}

func purge(e *env) {
	if n, err := e.s.Purge(e.ctx, 10); n != 0 || err != nil {
		e.t.Errorf("Purge of an empty table = %d, %v, want 0, nil", n, err)
	}
	e.expired(7)
	e.completed(e.other("-kept"), answer("kept"))
	e.abandoned(e.other("-kept-abandoned"))
	want := []int{3, 3, 1, 0}
	if e.caps.SelfExpiring {
		want = []int{0}
	}
	for i, want := range want {
		n, err := e.s.Purge(e.ctx, 3)
		if n != want || err != nil {
			e.t.Errorf("call %d: Purge(3) of 7 expired rows = %d, %v, want %d, nil: it removes at most limit rows, and fewer only if there are no more",
				i+1, n, err, want)
		}
	}
	e.want(e.other("-kept"), dedup.Completed, "Purge removes only rows whose TTL has passed")
	e.want(e.other("-kept-abandoned"), dedup.Abandoned, "Purge removes only rows whose TTL has passed")
	e.want(e.other("-expired-0"), dedup.Won, "a purged key is free")
}

func purgeKeeps(e *env) {
	live := e.claimOf(e.other("-live"), dedup.NewToken())
	live.TTL = time.Millisecond
	e.wantClaim(live, dedup.Won, "an absent key is won")
	unknown := e.other("-unknown")
	e.unknown(unknown)
	e.caps.Expire(e.t, e.s, unknown)
	e.pastTTL(e.get(live.Key).ExpiresAt)
	e.expired(4)
	want := 4
	if e.caps.SelfExpiring {
		want = 0
	}
	if n, err := e.s.Purge(e.ctx, 100); n != want || err != nil {
		e.t.Errorf("Purge = %d, %v, want %d, nil: live and unknown rows are not counted", n, err, want)
	}
	e.want(live.Key, dedup.InProgress, "Purge never removes a live row: its operation would run twice")
	e.want(unknown, dedup.Unknown, "Purge never removes an unknown row: its operation would run twice")
}

func purgeConcurrent(e *env) {
	const rows, nodes = 60, 4
	e.expired(rows)
	e.won(e.other("-live"))
	e.unknown(e.other("-unknown"))
	e.completed(e.other("-kept"), answer("kept"))

	var wg sync.WaitGroup
	var mu sync.Mutex
	removed := 0
	purge := func() (int, error) {
		n, err := e.s.Purge(e.ctx, 7)
		mu.Lock()
		defer mu.Unlock()
		removed += n
		return n, err
	}
	for range nodes {
		wg.Go(func() {
			for range rows { // ends by itself, whatever the others leave
				n, err := purge()
				if err != nil && !errors.Is(err, dedup.ErrBusy) {
					e.t.Errorf("Purge: %v: it may run on any number of nodes at once", err)
					return
				}
				if err == nil && n < 7 {
					return
				}
			}
		})
	}
	wg.Wait()
	for range rows {
		if n, err := purge(); err != nil {
			e.t.Fatalf("Purge: %v", err)
		} else if n < 7 {
			break
		}
	}
	want := rows
	if e.caps.SelfExpiring {
		want = 0
	}
	if removed != want {
		e.t.Errorf("%d concurrent purges removed %d rows in all, want %d: each row is removed and counted once", nodes, removed, want)
	}
	e.want(e.other("-live"), dedup.InProgress, "Purge never removes a live row")
	e.want(e.other("-unknown"), dedup.Unknown, "Purge never removes an unknown row")
	e.want(e.other("-kept"), dedup.Completed, "Purge removes only rows whose TTL has passed")
}
