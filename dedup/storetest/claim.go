package storetest

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var claimTests = []test{
	{"ClaimWon", claimWon},
	{"ClaimInProgress", claimInProgress},
	{"ClaimCompleted", claimCompleted},
	{"ClaimUnknown", claimUnknown},
	{"ClaimAbandoned", claimAbandoned},
	{"ClaimRepeated", claimRepeated},
	{"ClaimMismatch", claimMismatch},
	{"ClaimFingerprintExact", claimFingerprintExact},
	{"GetShowsTheRow", getShowsTheRow},
}

func claimWon(e *env) {
	e.absent(e.key, "a key that was never claimed has no row")
	token := dedup.NewToken()
	r := e.wantClaim(e.claimOf(e.key, token), dedup.Won, "an absent key is won")
	if r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: a won row starts its first run", r.Record.Attempt)
	}
	if got := e.get(e.key); got.Token != token || got.Status != dedup.StatusInProgress {
		e.t.Errorf("row is %v with token %v, want in_progress with the claim's token %v", got.Status, got.Token, token)
	}
}

func claimInProgress(e *env) {
	token := e.won(e.key)
	for range 2 {
		r := e.want(e.key, dedup.InProgress, "a live row belongs to the claim that won it")
		if l := r.Record.LeaseLeft; l <= 0 || l > lease+time.Second {
			e.t.Errorf("Record.LeaseLeft is %v, want more than 0 and at most the lease of %v", l, lease)
		}
	}
	if got := e.get(e.key); got.Token != token || got.Attempt != 1 {
		e.t.Errorf("after claims that were told in progress the row has token %v, attempt %d; want %v, 1: they must change nothing",
			got.Token, got.Attempt, token)
	}
}

func claimCompleted(e *env) {
	want := answer("done")
	e.completed(e.key, want)
	for range 2 {
		r := e.want(e.key, dedup.Completed, "a completed row answers every later claim")
		e.response(r.Record.Response, want, "Completed carries the stored answer")
	}
}

func claimUnknown(e *env) {
	e.unknown(e.key)
	for range 2 {
		e.want(e.key, dedup.Unknown, "a row completed as unknown waits for Resolve")
	}
}

func claimAbandoned(e *env) {
	token := e.won(e.key)
	for attempt := 2; attempt <= 4; attempt++ {
		e.caps.Lapse(e.t, e.s, e.key)
		old := token
		token = dedup.NewToken()
		r := e.wantClaim(e.claimOf(e.key, token), dedup.Abandoned, "a row whose lease has ended is taken over")
		if r.Record.Attempt != attempt {
			e.t.Errorf("Record.Attempt is %d, want %d: every run is counted", r.Record.Attempt, attempt)
		}
		got := e.get(e.key)
		if got.Token != token || got.Attempt != attempt || got.LeaseLeft <= 0 {
			e.t.Errorf("row has token %v, attempt %d, lease %v; want the new token %v, %d and a new lease",
				got.Token, got.Attempt, got.LeaseLeft, token, attempt)
		}
		e.fenced(e.key, old, "a token that was taken over from must write nothing")
		e.want(e.key, dedup.InProgress, "a row just taken over is live")
	}
	e.complete(e.key, token, dedup.StatusCompleted, answer("second"))
	r := e.want(e.key, dedup.Completed, "the run that took over completes the row")
	e.response(r.Record.Response, answer("second"), "the stored answer is that of the run that took over")

	k := e.other("-released")
	e.abandoned(k)
	token = dedup.NewToken()
	e.wantClaim(e.claimOf(k, token), dedup.Abandoned, "a row whose lease has ended is taken over")
	e.ok(e.s.Release(e.ctx, k, token), "Release", "the run that took over may release")
	if r := e.want(k, dedup.Won, "a released key is free"); r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: a new row counts from the start", r.Record.Attempt)
	}
}

func claimRepeated(e *env) {
	const promise = "a claim repeated with the row's token recognises itself, since its first answer may have been lost"
	first := e.claimOf(e.key, dedup.NewToken())
	e.wantClaim(first, dedup.Won, "an absent key is won")
	for range 2 {
		if r := e.wantClaim(first, dedup.Won, promise); r.Record.Attempt != 1 {
			e.t.Errorf("Record.Attempt is %d, want 1: a repeated claim starts no other run", r.Record.Attempt)
		}
	}
	e.caps.Lapse(e.t, e.s, e.key)
	if r := e.wantClaim(first, dedup.Won, promise+", also after its lease"); r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: a repeated claim starts no other run", r.Record.Attempt)
	}

	e.caps.Lapse(e.t, e.s, e.key)
	second := e.claimOf(e.key, dedup.NewToken())
	e.wantClaim(second, dedup.Abandoned, "a row whose lease has ended is taken over")
	for range 2 {
		if r := e.wantClaim(second, dedup.Abandoned, promise+", and gets what the first one got"); r.Record.Attempt != 2 {
			e.t.Errorf("Record.Attempt is %d, want 2: a repeated claim starts no other run", r.Record.Attempt)
		}
	}
	e.wantClaim(first, dedup.InProgress, "a token that was taken over from is not the row's any more")

	e.complete(e.key, second.Token, dedup.StatusCompleted, answer("done"))
	r := e.wantClaim(second, dedup.Completed, "a finished operation must not run again, whatever the token")
	e.response(r.Record.Response, answer("done"), "Completed carries the stored answer")

	doubt := e.claimOf(e.other("-unknown"), dedup.NewToken())
	e.wantClaim(doubt, dedup.Won, "an absent key is won")
	e.complete(doubt.Key, doubt.Token, dedup.StatusUnknown, dedup.Response{})
	e.wantClaim(doubt, dedup.Unknown, "an operation in doubt must not run again, whatever the token")
}

func claimMismatch(e *env) {
	rows := []struct {
		name string
		make func(dedup.Key) dedup.Token
	}{
		{"live", e.won},
		{"abandoned", e.abandoned},
		{"completed", func(k dedup.Key) dedup.Token { return e.completed(k, answer("done")) }},
		{"unknown", e.unknown},
	}
	for _, row := range rows {
		k := e.other("-" + row.name)
		token := row.make(k)
		before := e.get(k)
		for name, with := range map[string]dedup.Token{"a fresh token": dedup.NewToken(), "the row's token": token} {
			c := e.claimOf(k, with)
			c.Fingerprint = []byte("another request")
			r := e.wantClaim(c, dedup.Mismatch, fmt.Sprintf("another fingerprint is a mismatch on a row that is %s, claimed with %s", row.name, name))
			if !bytes.Equal(r.Record.Fingerprint, e.print) {
				e.t.Errorf("%s: Record.Fingerprint is %q, want the stored %q", row.name, r.Record.Fingerprint, e.print)
			}
		}
		after := e.get(k)
		if after.Token != before.Token || after.Attempt != before.Attempt || after.Status != before.Status || !bytes.Equal(after.Fingerprint, before.Fingerprint) {
			e.t.Errorf("%s: a mismatch changed the row from %+v to %+v", row.name, before, after)
		}
		if row.name == "abandoned" {
			e.ok(e.s.Complete(e.ctx, k, token, done("late")), "Complete", "a mismatch takes nothing over")
		}
	}
}

func claimFingerprintExact(e *env) {
	long := strings.Repeat("\xff", dedup.MaxFingerprintLength)
	prints := []string{"", "a", "A", "a ", "a\x00", "\x00", "ab", "\xff\xfe", "é", "é", "%", long, long[1:], long[1:] + "\xfe"}
	for i, stored := range prints {
		k := e.other(fmt.Sprint("-", i))
		c := e.claimOf(k, dedup.NewToken())
		c.Fingerprint = []byte(stored)
		e.wantClaim(c, dedup.Won, "a fingerprint is any bytes")
		for _, given := range prints {
			c := e.claimOf(k, dedup.NewToken())
			c.Fingerprint = []byte(given)
			want := dedup.Mismatch
			if given == stored {
				want = dedup.InProgress
			}
			e.wantClaim(c, want, fmt.Sprintf("fingerprints are compared byte for byte; stored %q, given %q", stored, given))
		}
		if got := e.get(k).Fingerprint; string(got) != stored {
			e.t.Errorf("Get: fingerprint %q, want %q", got, stored)
		}
	}
	k := e.other("-nil")
	c := e.claimOf(k, dedup.NewToken())
	c.Fingerprint = nil
	e.wantClaim(c, dedup.Won, "a fingerprint may be nil")
	c.Token = dedup.NewToken()
	c.Fingerprint = []byte{}
	e.wantClaim(c, dedup.InProgress, "nil and empty fingerprints are the same bytes")
}

func getShowsTheRow(e *env) {
	c := e.claimOf(e.key, dedup.NewToken())
	e.wantClaim(c, dedup.Won, "an absent key is won")
	r := e.get(e.key)
	if !bytes.Equal(r.Fingerprint, c.Fingerprint) || r.Status != dedup.StatusInProgress || r.Token != c.Token || r.Attempt != 1 {
		e.t.Errorf("Get = %+v, want all fields of the claim %+v", r, c)
	}
	if r.LeaseLeft <= 0 || r.LeaseLeft > lease+time.Second {
		e.t.Errorf("LeaseLeft is %v, want more than 0 and at most %v on a live row", r.LeaseLeft, lease)
	}
	if r.CreatedAt.IsZero() {
		e.t.Error("CreatedAt is zero")
	}
	e.near("ExpiresAt", r.ExpiresAt, r.CreatedAt.Add(ttl))

	e.caps.Lapse(e.t, e.s, e.key)
	if r := e.get(e.key); r.LeaseLeft != 0 || r.Status != dedup.StatusInProgress {
		e.t.Errorf("abandoned row: %v with LeaseLeft %v, want in_progress with 0", r.Status, r.LeaseLeft)
	}

	e.ok(e.s.Complete(e.ctx, e.key, c.Token, dedup.Completion{Status: dedup.StatusCompleted, Response: answer("x"), TTL: 3 * ttl}), "Complete", "the holder completes")
	done := e.get(e.key)
	if done.Status != dedup.StatusCompleted || done.Attempt != 1 || done.LeaseLeft != 0 || !bytes.Equal(done.Fingerprint, e.print) {
		e.t.Errorf("completed row: %+v, want completed, attempt 1, no lease, the fingerprint kept", done)
	}
	e.response(done.Response, answer("x"), "Get shows the answer")
	e.near("ExpiresAt", done.ExpiresAt, r.CreatedAt.Add(3*ttl)) // Complete starts the TTL
	e.near("CreatedAt", done.CreatedAt, r.CreatedAt)

	k := e.other("-unknown")
	e.unknown(k)
	if r := e.get(k); r.Status != dedup.StatusUnknown || r.LeaseLeft != 0 {
		e.t.Errorf("unknown row: %v with LeaseLeft %v, want unknown with 0", r.Status, r.LeaseLeft)
	}
}
