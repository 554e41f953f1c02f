package storetest

import (
	"context"
	"slices"

	"github.com/effectonce/idempotency/dedup"
)

var txTests = []txTest{
	{"BeginWon", beginWon},
	{"BeginFindsRows", beginFindsRows},
	{"BeginAbandoned", beginAbandoned},
	{"BeginInProgressAtOnce", beginInProgressAtOnce},
	{"RollbackFreesTheKey", rollbackFrees},
	{"TxContext", txContext},
}

// txEnv is one test's store with transactions.
type txEnv struct {
	*env
	tx   dedup.TxStore
	caps TxCaps
}

// begin begins with a fresh token and expects state.
func (e *txEnv) begin(k dedup.Key, state dedup.State, promise string) (dedup.Tx, dedup.Result) {
	e.t.Helper()
	return e.beginClaim(e.claimOf(k, dedup.NewToken()), state, promise)
}

func (e *txEnv) beginClaim(c dedup.Claim, state dedup.State, promise string) (dedup.Tx, dedup.Result) {
	e.t.Helper()
	tx, r, err := e.tx.Begin(e.ctx, c)
	if err != nil {
		e.t.Fatalf("Begin(%v): %v: %s", c.Key, err, promise)
	}
	open := r.State == dedup.Won || r.State == dedup.Abandoned
	if open == (tx == nil) {
		if tx != nil {
			tx.Rollback(e.ctx) //nolint:errcheck // it should not be there
		}
		e.t.Fatalf("Begin is %q with Tx %v: the Tx is open for won and abandoned, and nil otherwise", r.State, tx)
	}
	if r.State != state {
		if tx != nil {
			tx.Rollback(e.ctx) //nolint:errcheck // the test has failed already
		}
		e.t.Fatalf("Begin is %q, want %q: %s", r.State, state, promise)
	}
	return tx, r
}

// free checks that k is as if it had never been claimed.
func (e *txEnv) free(k dedup.Key, promise string) {
	e.t.Helper()
	tx, r := e.begin(k, dedup.Won, promise)
	if r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: %s", r.Record.Attempt, promise)
	}
	e.ok(tx.Rollback(e.ctx), "Rollback", "an open transaction can be rolled back")
	e.absent(k, promise)
}

func (e *txEnv) effect(ctx context.Context, n string) {
	e.t.Helper()
	e.ok(e.caps.Effect(ctx, n), "Caps.Effect", "the work writes through the transaction")
}

// effects checks how often n was committed.
func (e *txEnv) effects(n string, want int, promise string) {
	e.t.Helper()
	got := 0
	for _, name := range e.caps.Effects(e.t, e.tx) {
		if name == n {
			got++
		}
	}
	if got != want {
		e.t.Errorf("%d effects are committed, want %d: %s", got, want, promise)
	}
}

func beginWon(e *txEnv) {
	n := e.key.ID
	c := e.claimOf(e.key, dedup.NewToken())
	tx, r := e.beginClaim(c, dedup.Won, "an absent key is won")
	if r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: a won row starts its first run", r.Record.Attempt)
	}
	e.effect(tx.Context(e.ctx), n)
	e.effects(n, 0, "nothing of the transaction shows before Commit")
	e.ok(tx.Commit(e.ctx, done("done")), "Commit", "claim, work and completion are one transaction")
	e.effects(n, 1, "the work's writes are committed with the answer")
	got := e.get(e.key)
	if got.Status != dedup.StatusCompleted || got.Token != c.Token || got.Attempt != 1 || got.LeaseLeft != 0 || string(got.Fingerprint) != string(e.print) {
		e.t.Errorf("row is %+v, want completed by the claim's token, attempt 1, no lease, its fingerprint", got)
	}
	e.response(got.Response, answer("done"), "the answer is committed with the work's writes")
	e.near("ExpiresAt", got.ExpiresAt, got.CreatedAt.Add(ttl))

	k := e.other("-ttl")
	tx, _ = e.begin(k, dedup.Won, "an absent key is won")
	completion := done("x")
	completion.TTL = 3 * ttl
	e.ok(tx.Commit(e.ctx, completion), "Commit", "the completion brings its own TTL")
	got = e.get(k)
	e.near("ExpiresAt", got.ExpiresAt, got.CreatedAt.Add(3*ttl))

	k = e.other("-unknown")
	tx, _ = e.begin(k, dedup.Won, "an absent key is won")
	e.ok(tx.Commit(e.ctx, dedup.Completion{Status: dedup.StatusUnknown, TTL: ttl}), "Commit", "the outcome may be unknown")
	e.want(k, dedup.Unknown, "Commit stores the outcome")

	k = e.other("-bytes")
	tx, _ = e.begin(k, dedup.Won, "an absent key is won")
	exact := dedup.Response{Code: 599, Header: allBytes(), Body: allBytes()}
	e.ok(tx.Commit(e.ctx, dedup.Completion{Status: dedup.StatusCompleted, Response: exact, TTL: ttl}), "Commit", "an answer is any bytes")
	_, r = e.begin(k, dedup.Completed, "Commit stores the outcome")
	e.response(r.Record.Response, exact, "the store keeps an answer byte for byte")
}

func beginFindsRows(e *txEnv) {
	want := answer("done")
	for k, state := range map[dedup.Key]dedup.State{
		e.other("-completed"): dedup.Completed,
		e.other("-unknown"):   dedup.Unknown,
		e.other("-live"):      dedup.InProgress,
	} {
		switch state {
		case dedup.Completed:
			e.completed(k, want)
		case dedup.Unknown:
			e.unknown(k)
		case dedup.InProgress:
			e.won(k)
		}
		for range 2 {
			_, r := e.begin(k, state, "Begin has the results of Claim")
			switch state {
			case dedup.Completed:
				e.response(r.Record.Response, want, "Completed carries the stored answer")
			case dedup.InProgress:
				if l := r.Record.LeaseLeft; l <= 0 || l > lease+patience {
					e.t.Errorf("Record.LeaseLeft is %v, want more than 0 and at most %v", l, lease)
				}
			}
		}
		c := e.claimOf(k, dedup.NewToken())
		c.Fingerprint = []byte("another request")
		_, r := e.beginClaim(c, dedup.Mismatch, "another fingerprint is a mismatch, whatever the row's status")
		if string(r.Record.Fingerprint) != string(e.print) {
			e.t.Errorf("Record.Fingerprint is %q, want the stored %q", r.Record.Fingerprint, e.print)
		}
	}

	k := e.other("-abandoned")
	token := e.abandoned(k)
	c := e.claimOf(k, dedup.NewToken())
	c.Fingerprint = []byte("another request")
	e.beginClaim(c, dedup.Mismatch, "another fingerprint is a mismatch, also on an abandoned row")
	e.ok(e.s.Complete(e.ctx, k, token, done("late")), "Complete", "a mismatch takes nothing over")

	k = e.other("-expired")
	e.completed(k, answer("old"))
	e.caps.Expire(e.t, e.s, k)
	c = e.claimOf(k, dedup.NewToken())
	c.Fingerprint = []byte("another request")
	tx, r := e.beginClaim(c, dedup.Won, "an expired row counts as absent")
	if r.Record.Attempt != 1 {
		e.t.Errorf("Record.Attempt is %d, want 1: an expired row counts as absent", r.Record.Attempt)
	}
	e.effect(tx.Context(e.ctx), k.ID)
	e.ok(tx.Commit(e.ctx, done("new")), "Commit", "a row won in place of an expired one is like any other")
	e.effects(k.ID, 1, "the work's writes are committed with the answer")
	e.response(e.get(k).Response, answer("new"), "nothing is left of the expired row's answer")
}

func beginAbandoned(e *txEnv) {
	n := e.key.ID
	old := e.abandoned(e.key)
	tx, r := e.begin(e.key, dedup.Abandoned, "a row whose lease has ended is taken over")
	if r.Record.Attempt != 2 {
		e.t.Errorf("Record.Attempt is %d, want 2: every run is counted", r.Record.Attempt)
	}
	e.effect(tx.Context(e.ctx), n)
	e.ok(tx.Rollback(e.ctx), "Rollback", "an open transaction can be rolled back")
	e.effects(n, 0, "Rollback drops all writes of the work")
	if got := e.get(e.key); got.Token != old || got.Attempt != 1 {
		e.t.Errorf("row has token %v, attempt %d; want %v, 1: Rollback drops the takeover", got.Token, got.Attempt, old)
	}

	c := e.claimOf(e.key, dedup.NewToken())
	tx, _ = e.beginClaim(c, dedup.Abandoned, "the takeover was rolled back, so the row is still abandoned")
	e.effect(tx.Context(e.ctx), n)
	e.ok(tx.Commit(e.ctx, done("second")), "Commit", "the run that took over commits")
	e.effects(n, 1, "the work's writes are committed with the answer")
	got := e.get(e.key)
	if got.Status != dedup.StatusCompleted || got.Token != c.Token || got.Attempt != 2 {
		e.t.Errorf("row is %+v, want completed by the run that took over, attempt 2", got)
	}
	e.fenced(e.key, old, "a token that was taken over from must write nothing")
	e.response(e.get(e.key).Response, answer("second"), "a loser's answer must not replace the stored one")
}

// The first transaction stays open in this very goroutine: a Begin that waits
// for it would wait for ever.
func beginInProgressAtOnce(e *txEnv) {
	const promise = "a key that another open transaction has claimed is in progress, told at once"
	makers := map[string]func(dedup.Key){
		"new":       func(dedup.Key) {},
		"abandoned": func(k dedup.Key) { e.abandoned(k) },
		"expired":   func(k dedup.Key) { e.completed(k, answer("old")); e.caps.Expire(e.t, e.s, k) },
	}
	for name, makeRow := range makers {
		k := e.other("-" + name)
		makeRow(k)
		state := dedup.Won
		if name == "abandoned" {
			state = dedup.Abandoned
		}
		first, _ := e.begin(k, state, "the key is not claimed by a live row")
		e.effect(first.Context(e.ctx), k.ID)
		for range 3 {
			e.begin(k, dedup.InProgress, promise)
		}
		e.effects(k.ID, 0, "nothing of the transaction shows before Commit")
		e.ok(first.Commit(e.ctx, done("first")), "Commit", "duplicates that were told in progress hold nothing")
		_, r := e.begin(k, dedup.Completed, "the first one has committed")
		e.response(r.Record.Response, answer("first"), "Completed carries the stored answer")
		e.effects(k.ID, 1, "the work's writes are committed with the answer")
	}

	first, _ := e.begin(e.key, dedup.Won, "an absent key is won")
	e.begin(e.key, dedup.InProgress, promise)
	e.ok(first.Rollback(e.ctx), "Rollback", "an open transaction can be rolled back")
	e.free(e.key, "the transaction that had claimed the key is gone")
}

func rollbackFrees(e *txEnv) {
	n := e.key.ID
	tx, _ := e.begin(e.key, dedup.Won, "an absent key is won")
	e.effect(tx.Context(e.ctx), n)
	e.ok(tx.Rollback(e.ctx), "Rollback", "an open transaction can be rolled back")
	e.effects(n, 0, "Rollback drops all writes of the work")
	e.absent(e.key, "Rollback drops the claim")
	e.free(e.key, "Rollback drops the claim")

	c := e.claimOf(e.key, dedup.NewToken())
	c.Fingerprint = []byte("another request")
	tx, _ = e.beginClaim(c, dedup.Won, "Rollback leaves the key free, for any request")
	e.effect(tx.Context(e.ctx), n)
	e.ok(tx.Commit(e.ctx, done("second")), "Commit", "an open transaction can be committed")
	e.effects(n, 1, "the work's writes are committed with the answer")

	k := e.other("-refused")
	tx, _ = e.begin(k, dedup.Won, "an absent key is won")
	if err := e.caps.Effect(tx.Context(e.ctx), n); err == nil {
		e.t.Fatal("Caps.Effect wrote a second row: it must be refused by a unique constraint, or the suite proves nothing")
	}
	e.ok(tx.Rollback(e.ctx), "Rollback", "a transaction in which a statement failed can be rolled back")
	e.free(k, "Rollback drops the claim")
}

type ctxKey struct{}

func txContext(e *txEnv) {
	tx, _ := e.begin(e.key, dedup.Won, "an absent key is won")
	defer tx.Rollback(e.ctx)
	parent, cancel := context.WithCancel(context.WithValue(e.ctx, ctxKey{}, "value"))
	ctx := tx.Context(parent)
	if ctx.Value(ctxKey{}) != "value" {
		e.t.Error("Context(ctx) has lost a value of ctx")
	}
	cancel()
	if ctx.Err() == nil {
		e.t.Error("Context(ctx) does not end with ctx")
	}
	e.effect(tx.Context(e.ctx), e.key.ID) // the end of one context is not the end of the transaction
	if slices.Contains(e.caps.Effects(e.t, e.tx), e.key.ID) {
		e.t.Error("an effect was committed before the transaction: Caps.Effect must write through the transaction in ctx")
	}
}
