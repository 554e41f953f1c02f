// Package storetest checks that a [dedup.Store] keeps every promise of its
// interface, and a [dedup.TxStore] those of its own. All stores of this module
// pass it; the author of another one calls [Run] from a test:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) dedup.Store {
//			return newEmptyStore(t)
//		}, storetest.Caps{Lapse: lapse, Expire: expire})
//	}
//
// A failure says which promise is broken. The suite waits for no clock: Caps
// moves the stored times.
package storetest

import (
	"context"
	"testing"

	"github.com/effectonce/idempotency/dedup"
)

// Caps says how to move the times that a store has stored, and what the store
// does in a way of its own. Lapse and Expire are required.
type Caps struct {
	// Lapse ends the lease of the in-progress row of k, as if its time had
	// passed, and changes nothing else.
	Lapse func(t *testing.T, s dedup.Store, k dedup.Key)

	// Expire moves the TTL of the row of k into the past, and its lease too if
	// the row is in progress. It must do so for a row that is unknown as well,
	// which the store must keep all the same.
	Expire func(t *testing.T, s dedup.Store, k dedup.Key)

	// SelfExpiring is for a store whose database drops expired rows by itself,
	// so that Purge has nothing to do and may return 0.
	SelfExpiring bool
}

// TxCaps is what [RunTx] needs beside [Caps].
type TxCaps struct {
	Caps

	// Effect writes the row n to a table of effects, through the transaction
	// that ctx carries. A second row n is refused by a unique constraint. The
	// table may serve one store or many. Required.
	Effect func(ctx context.Context, n string) error

	// Effects reads the names of all committed effects that s wrote, outside of
	// any transaction. Required.
	Effects func(t *testing.T, s dedup.TxStore) []string

	// Violate makes a unique violation in the transaction that ctx carries and
	// swallows it, as a handler does that answers 409. Its error is nil if the
	// database refused the statement. Required.
	Violate func(ctx context.Context) error

	// ViolationAborts says that the database lets a transaction commit no more
	// once a statement has failed in it, as Postgres does.
	ViolationAborts bool

	// End commits the transaction that ctx carries behind the store's back, as
	// a handler must not. nil if the store makes that impossible.
	End func(ctx context.Context) error

	// Serial says that the store runs one transaction at a time, whatever the
	// keys, as SQLite does.
	Serial bool
}

// Run checks s against every promise of [dedup.Store], and of [dedup.Watcher]
// if the store is one. newStore is called once for each test and must return a
// store on an empty table of its own. Tests run in parallel; all have ended
// when Run returns.
func Run(t *testing.T, newStore func(t *testing.T) dedup.Store, caps Caps) {
	t.Helper()
	caps.check(t)
	t.Run("Store", func(t *testing.T) {
		for _, group := range [][]test{claimTests, leaseTests, resolveTests, expiryTests, dataTests, raceTests, cancelTests, watchTests} {
			for _, c := range group {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					c.run(newEnv(t, newStore(t), caps))
				})
			}
		}
	})
}

// RunTx checks s against every promise that [dedup.TxStore] adds to
// [dedup.Store]; call [Run] too. newStore is as for Run. A store must be able to
// have nine transactions open, unless it is Serial.
func RunTx(t *testing.T, newStore func(t *testing.T) dedup.TxStore, caps TxCaps) {
	t.Helper()
	caps.check(t)
	if caps.Effect == nil || caps.Effects == nil || caps.Violate == nil {
		t.Fatal("storetest: TxCaps.Effect, Effects and Violate are required")
	}
	t.Run("Tx", func(t *testing.T) {
		for _, group := range [][]txTest{txTests, txEndTests, txRaceTests} {
			for _, c := range group {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					s := newStore(t)
					c.run(&txEnv{env: newEnv(t, s, caps.Caps), tx: s, caps: caps})
				})
			}
		}
	})
}

func (c Caps) check(t *testing.T) {
	t.Helper()
	if c.Lapse == nil || c.Expire == nil {
		t.Fatal("storetest: Caps.Lapse and Caps.Expire are required")
	}
}

type test struct {
	name string
	run  func(e *env)
}

type txTest struct {
	name string
	run  func(e *txEnv)
}
