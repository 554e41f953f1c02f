package storetest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/effectonce/idempotency/dedup"
)

var txEndTests = []txTest{
	{"ViolationSwallowed", violationSwallowed},
	{"EndedByTheWork", endedByTheWork},
	{"TxCancelled", txCancelled},
}

var txRaceTests = []txTest{
	{"DifferentKeysAtOnce", differentKeys},
	{"ConcurrentBegins", concurrentBegins},
}

// A handler that catches a unique violation and answers 409 has done nothing
// wrong; what becomes of its transaction is up to the database.
func violationSwallowed(e *txEnv) {
	n := e.key.ID
	tx, _ := e.begin(e.key, dedup.Won, "an absent key is won")
	e.effect(tx.Context(e.ctx), n)
	e.ok(e.caps.Violate(tx.Context(e.ctx)), "Caps.Violate", "it makes a unique violation and swallows it")
	err := tx.Commit(e.ctx, done("409"))
	if e.caps.ViolationAborts {
		e.is(err, dedup.ErrTxAborted, "Commit", "a failed statement left the transaction unable to commit, and that must be told")
		e.effects(n, 0, "an aborted transaction is rolled back whole")
		e.absent(e.key, "an aborted transaction is rolled back whole")
		e.free(e.key, "an aborted transaction is rolled back whole, so the key is free")
		return
	}
	e.ok(err, "Commit", "the database rolls back only the failed statement, so the rest commits")
	e.effects(n, 1, "the work's other writes are committed with the answer")
	e.response(e.get(e.key).Response, answer("409"), "the answer is committed")
}

func endedByTheWork(e *txEnv) {
	if e.caps.End == nil {
		e.t.Skip("the store lets no work end the transaction")
	}
	const promise = "the work had ended the transaction, so what became of its writes is unknown here, and that must be told"
	ends := map[string]func(dedup.Tx) error{
		"Commit":   func(tx dedup.Tx) error { return tx.Commit(e.ctx, done("x")) },
		"Rollback": func(tx dedup.Tx) error { return tx.Rollback(e.ctx) },
	}
	for name, end := range ends {
		k := e.other("-" + name)
		tx, _ := e.begin(k, dedup.Won, "an absent key is won")
		e.effect(tx.Context(e.ctx), k.ID)
		e.ok(e.caps.End(tx.Context(e.ctx)), "Caps.End", "it commits the transaction")
		e.is(end(tx), dedup.ErrTxEnded, name, promise)
		e.effects(k.ID, 1, "Caps.End commits the work's writes")

		const kept = "the effect is there, so no duplicate may win the key"
		e.begin(k, dedup.InProgress, "the claim was committed by the work: "+kept)
		e.caps.Lapse(e.t, e.s, k)
		tx, _ = e.begin(k, dedup.Abandoned, "the lease has ended without a completion: "+kept)
		e.ok(tx.Rollback(e.ctx), "Rollback", "an open transaction can be rolled back")
	}
}

// A client that leaves at any moment must not wedge its key: all is committed,
// or nothing is.
func txCancelled(e *txEnv) {
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	tx, r, err := e.tx.Begin(ctx, e.claimOf(e.key, dedup.NewToken()))
	if err == nil || tx != nil {
		e.t.Fatalf("Begin is %q, %v under a context that has ended: it gives an error and no Tx", r.State, err)
	}
	e.free(e.key, "a Begin under a context that had ended holds nothing")

	for i, when := range []string{"after Begin", "after the work", "with Commit", "with Rollback"} {
		k := e.other(fmt.Sprint("-", i))
		c := e.claimOf(k, dedup.NewToken())
		ctx, cancel := context.WithCancel(e.ctx)
		tx, _, err := e.tx.Begin(ctx, c)
		e.ok(err, "Begin", "an absent key is won")
		if i == 0 {
			cancel()
		}
		worked := e.caps.Effect(tx.Context(ctx), k.ID)
		if i == 1 {
			cancel()
		}
		switch {
		case i == 3:
			cancel()
			tx.Rollback(ctx) //nolint:errcheck // only what it leaves counts
			err = context.Canceled
		case worked != nil:
			tx.Rollback(e.ctx) //nolint:errcheck // only what it leaves counts
			err = worked
		case i == 2:
			cancel()
			err = tx.Commit(ctx, done("x"))
		default:
			err = tx.Commit(e.ctx, done("x"))
		}
		cancel()
		e.settled(k, err, "the context ended "+when)
	}
}

// settled checks that k is wholly committed or wholly free.
func (e *txEnv) settled(k dedup.Key, err error, when string) {
	e.t.Helper()
	got, gerr := e.s.Get(e.ctx, k)
	switch {
	case gerr == nil && got.Status == dedup.StatusCompleted:
		e.effects(k.ID, 1, when+": the answer is there, so the effect must be")
		e.begin(k, dedup.Completed, when+": the answer is there")
	case errors.Is(gerr, dedup.ErrNotFound):
		if err == nil {
			e.t.Errorf("%s: Commit = nil, but nothing is committed", when)
		}
		e.effects(k.ID, 0, when+": there is no row, so there must be no effect")
		e.free(k, when+": the key must not stay wedged")
	default:
		e.t.Errorf("%s: Get = %v, %v: a transaction leaves a completed row or none", when, got.Status, gerr)
	}
}

func differentKeys(e *txEnv) {
	if e.caps.Serial {
		e.t.Skip("the store runs one transaction at a time")
	}
	const promise = "different keys don't get in each other's way"
	var open []dedup.Tx
	for i := range 3 {
		k := e.other(fmt.Sprint("-", i))
		tx, _ := e.begin(k, dedup.Won, promise)
		e.effect(tx.Context(e.ctx), k.ID)
		open = append(open, tx)
	}
	for i, tx := range open {
		e.ok(tx.Commit(e.ctx, done("x")), "Commit", promise)
		e.effects(e.other(fmt.Sprint("-", i)).ID, 1, promise)
	}
}

func concurrentBegins(e *txEnv) {
	const begins = 8
	for _, name := range []string{"new", "abandoned", "expired"} {
		k := e.other("-" + name)
		switch name {
		case "abandoned":
			e.abandoned(k)
		case "expired":
			e.completed(k, answer("old"))
			e.caps.Expire(e.t, e.s, k)
		}
		var mu sync.Mutex
		won := 0
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i := range begins {
			wg.Go(func() {
				<-start
				mine, err := e.once(k)
				if err != nil {
					e.t.Errorf("%s row, goroutine %d: %v", name, i, err)
				}
				if mine {
					mu.Lock()
					won++
					mu.Unlock()
				}
			})
		}
		close(start)
		wg.Wait()
		if won != 1 {
			e.t.Errorf("%s row: %d of %d concurrent runs committed, want 1", name, won, begins)
		}
		e.effects(k.ID, 1, "N concurrent duplicates have one effect")
	}
}

// once runs the operation k as an engine would and tells whether this run was
// the one that had the effect.
func (e *txEnv) once(k dedup.Key) (bool, error) {
	for e.ctx.Err() == nil {
		tx, r, err := e.tx.Begin(e.ctx, e.claimOf(k, dedup.NewToken()))
		switch {
		case errors.Is(err, dedup.ErrBusy), errors.Is(err, dedup.ErrSerialization):
			if tx != nil {
				return false, fmt.Errorf("call of Begin has a Tx and an error: %w", err)
			}
			runtime.Gosched()
			continue
		case err != nil:
			return false, fmt.Errorf("call of Begin: %w", err)
		}
		switch r.State {
		case dedup.InProgress:
			runtime.Gosched()
			continue
		case dedup.Completed:
			return false, sameResponse(r.Record.Response, answer("once"))
		case dedup.Won, dedup.Abandoned:
		default:
			return false, fmt.Errorf("call of Begin is %q", r.State)
		}
		if err := e.caps.Effect(tx.Context(e.ctx), k.ID); err != nil {
			return false, errors.Join(err, tx.Rollback(e.ctx))
		}
		err = tx.Commit(e.ctx, done("once"))
		if errors.Is(err, dedup.ErrSerialization) {
			continue
		}
		return err == nil, err
	}
	return false, e.ctx.Err()
}
