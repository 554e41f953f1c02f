package storetest

import (
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var leaseTests = []test{
	{"Renew", renew},
	{"RenewEndsTheLease", renewEnds},
	{"Complete", complete},
	{"CompleteAfterLease", completeAfterLease},
	{"CompleteRepeated", completeRepeated},
	{"Release", release},
	{"WrongTokenWritesNothing", wrongToken},
}

func renew(e *env) {
	token := e.won(e.key)
	e.ok(e.s.Renew(e.ctx, e.key, token, 3*lease), "Renew", "the holder of the token renews its lease")
	if l := e.get(e.key).LeaseLeft; l <= lease || l > 3*lease+time.Second {
		e.t.Errorf("LeaseLeft is %v, want about %v: Renew makes the lease end that long from now", l, 3*lease)
	}
	e.ok(e.s.Renew(e.ctx, e.key, token, lease), "Renew", "a lease may be renewed again")
	if l := e.get(e.key).LeaseLeft; l <= 0 || l > lease+time.Second {
		e.t.Errorf("LeaseLeft is %v, want about %v: Renew counts from now, also to a shorter lease", l, lease)
	}

	e.caps.Lapse(e.t, e.s, e.key)
	e.ok(e.s.Renew(e.ctx, e.key, token, lease), "Renew", "nobody took the row over, so its token is still current")
	e.want(e.key, dedup.InProgress, "a renewed row is live again")

	const gone = "a row that is no longer in progress has no lease"
	e.complete(e.key, token, dedup.StatusCompleted, answer("done"))
	e.is(e.s.Renew(e.ctx, e.key, token, lease), dedup.ErrLeaseLost, "Renew of a completed row", gone)
	k := e.other("-unknown")
	token = e.unknown(k)
	e.is(e.s.Renew(e.ctx, k, token, lease), dedup.ErrLeaseLost, "Renew of an unknown row", gone)
	e.is(e.s.Renew(e.ctx, e.other("-absent"), token, lease), dedup.ErrLeaseLost, "Renew of an absent row", gone)
}

func renewEnds(e *env) {
	for name, d := range map[string]time.Duration{"zero": 0, "negative": -time.Hour} {
		k := e.other("-" + name)
		token := e.won(k)
		e.ok(e.s.Renew(e.ctx, k, token, d), "Renew", "0 or less ends the lease")
		if l := e.get(k).LeaseLeft; l != 0 {
			e.t.Errorf("LeaseLeft is %v, want 0: a lease renewed for %v has ended at once", l, d)
		}
		r := e.want(k, dedup.Abandoned, "0 or less ends the lease at once, so that the next claim finds the row abandoned")
		if r.Record.Attempt != 2 {
			e.t.Errorf("Record.Attempt is %d, want 2", r.Record.Attempt)
		}
		e.fenced(k, token, "a token that was taken over from must write nothing")
	}
}

func complete(e *env) {
	token := e.won(e.key)
	e.complete(e.key, token, dedup.StatusCompleted, answer("done"))
	r := e.want(e.key, dedup.Completed, "Complete stores the outcome")
	e.response(r.Record.Response, answer("done"), "Complete stores the answer")

	k := e.other("-unknown")
	token = e.won(k)
	e.complete(k, token, dedup.StatusUnknown, answer("maybe"))
	e.want(k, dedup.Unknown, "Complete stores the outcome unknown")
	e.response(e.get(k).Response, answer("maybe"), "Complete stores the answer also with the status unknown")

	k = e.other("-absent")
	e.is(e.s.Complete(e.ctx, k, dedup.NewToken(), done("x")), dedup.ErrLeaseLost, "Complete of an absent row", "there is no row that holds the token")
	e.absent(k, "Complete makes no row")
}

func completeAfterLease(e *env) {
	token := e.abandoned(e.key)
	e.ok(e.s.Complete(e.ctx, e.key, token, done("late")), "Complete", "it succeeds after the lease has ended, so long as nobody took the row over")
	r := e.want(e.key, dedup.Completed, "the late answer was stored")
	e.response(r.Record.Response, answer("late"), "the late answer was stored")

	k := e.other("-taken")
	old := e.abandoned(k)
	token = dedup.NewToken()
	e.wantClaim(e.claimOf(k, token), dedup.Abandoned, "a row whose lease has ended is taken over")
	e.fenced(k, old, "the row was taken over")
	e.complete(k, token, dedup.StatusCompleted, answer("second"))
	e.is(e.s.Complete(e.ctx, k, old, done("first")), dedup.ErrLeaseLost, "Complete", "the row was taken over, and completed by the other")
	e.response(e.get(k).Response, answer("second"), "a loser's answer must not replace the stored one")
}

func completeRepeated(e *env) {
	token := e.completed(e.key, answer("done"))
	for range 2 {
		e.ok(e.s.Complete(e.ctx, e.key, token, done("done")), "Complete", "repeated with the same token it succeeds, since the first answer may have been lost")
	}
	e.ok(e.s.Complete(e.ctx, e.key, token, done("changed")), "Complete", "repeated with the same token it succeeds")
	e.response(e.get(e.key).Response, answer("done"), "a repeated Complete changes nothing but the TTL: an answer that was given out stays")
	r := e.want(e.key, dedup.Completed, "a repeated Complete leaves the row completed")
	e.response(r.Record.Response, answer("done"), "a repeated Complete changes nothing but the TTL")

	k := e.other("-unknown")
	token = e.unknown(k)
	err := e.s.Complete(e.ctx, k, token, dedup.Completion{Status: dedup.StatusUnknown, TTL: ttl})
	e.ok(err, "Complete", "repeated with the same token it succeeds, also for an unknown row")
	e.want(k, dedup.Unknown, "a repeated Complete changes nothing")
}

func release(e *env) {
	token := e.won(e.key)
	e.ok(e.s.Release(e.ctx, e.key, token), "Release", "the holder of the token releases its row")
	e.absent(e.key, "a released row is gone")
	e.fenced(e.key, token, "a released row is gone")
	c := e.claimOf(e.key, dedup.NewToken())
	c.Fingerprint = []byte("another request")
	r := e.wantClaim(c, dedup.Won, "a released key is free, for any request")
	if r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: a new row counts from the start", r.Record.Attempt)
	}
	e.fenced(e.key, token, "the key was released and claimed anew by another")

	k := e.other("-abandoned")
	token = e.abandoned(k)
	e.ok(e.s.Release(e.ctx, k, token), "Release", "an abandoned row that nobody took over is still its holder's")
	e.want(k, dedup.Won, "a released key is free")

	const kept = "a finished row must not be removed: its operation would run again"
	k = e.other("-completed")
	token = e.completed(k, answer("done"))
	e.is(e.s.Release(e.ctx, k, token), dedup.ErrLeaseLost, "Release of a completed row", kept)
	e.want(k, dedup.Completed, kept)
	k = e.other("-unknown")
	token = e.unknown(k)
	e.is(e.s.Release(e.ctx, k, token), dedup.ErrLeaseLost, "Release of an unknown row", kept)
	e.want(k, dedup.Unknown, kept)
}

func wrongToken(e *env) {
	const promise = "only the row's current token may write"
	token := e.won(e.key)
	near := token
	near[15] ^= 1
	for _, wrong := range []dedup.Token{dedup.NewToken(), {}, near} {
		e.fenced(e.key, wrong, promise)
	}
	if r := e.get(e.key); r.Token != token || r.Status != dedup.StatusInProgress || r.Attempt != 1 {
		e.t.Errorf("row is now %+v: %s", r, promise)
	}
	e.complete(e.key, token, dedup.StatusCompleted, answer("done"))
	for _, wrong := range []dedup.Token{dedup.NewToken(), {}, near} {
		e.fenced(e.key, wrong, promise)
	}
	e.response(e.get(e.key).Response, answer("done"), promise)
}
