package dedup_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

// txStore plays a database whose transactions end as the test says. What the
// real ones do is tested beside them; here it is about what the engine makes
// of it.
type txStore struct {
	*memstore.Store
	commits   []error // results of the next commits; nil once used up
	begins    []error
	rollback  error
	committed []dedup.Status
	rollbacks int
}

func next(errs *[]error) error {
	if len(*errs) == 0 {
		return nil
	}
	err := (*errs)[0]
	*errs = (*errs)[1:]
	return err
}

type txKey struct{}

func (s *txStore) Begin(ctx context.Context, c dedup.Claim) (dedup.Tx, dedup.Result, error) {
	if err := next(&s.begins); err != nil {
		return nil, dedup.Result{}, err
	}
	res, err := s.Claim(ctx, c)
	if err != nil || (res.State != dedup.Won && res.State != dedup.Abandoned) {
		return nil, res, err
	}
	return &fakeTx{s, c}, res, nil
}

type fakeTx struct {
	s *txStore
	c dedup.Claim
}

func (tx *fakeTx) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, txKey{}, tx)
}

func (tx *fakeTx) Commit(ctx context.Context, c dedup.Completion) error {
	if err := next(&tx.s.commits); err != nil {
		_ = tx.s.Release(ctx, tx.c.Key, tx.c.Token)
		return err
	}
	tx.s.committed = append(tx.s.committed, c.Status)
	return tx.s.Complete(ctx, tx.c.Key, tx.c.Token, c)
}

func (tx *fakeTx) Rollback(ctx context.Context) error {
	tx.s.rollbacks++
	_ = tx.s.Release(ctx, tx.c.Key, tx.c.Token)
	return tx.s.rollback
}

func newTx() (*txStore, *dedup.Engine) {
	s := &txStore{Store: memstore.New()}
	return s, &dedup.Engine{Store: s, Mode: dedup.Transaction}
}

func TestTransactionCommitsTheAnswer(t *testing.T) {
	t.Parallel()
	s, e := newTx()
	out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if ctx.Value(txKey{}) == nil {
			t.Error("the work has no transaction")
		}
		return answer("one"), nil
	})
	wantAnswer(t, out, dedup.Won, "one")
	wantAnswer(t, mustDo(t, e, request("f"), never(t)), dedup.Completed, "one")
	if !slices.Equal(s.committed, []dedup.Status{dedup.StatusCompleted}) {
		t.Errorf("committed %v", s.committed)
	}
}

func TestLostRaceRunsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, e := newTx()
		s.begins = []error{dedup.ErrSerialization}
		s.commits = []error{dedup.ErrSerialization, dedup.ErrSerialization}
		var a answers
		wantAnswer(t, mustDo(t, e, request("f"), a.work("one")), dedup.Won, "one")
		if a.count() != 3 {
			t.Errorf("work ran %d times, want 3", a.count())
		}
	})
}

func TestLostRacesAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for retries, runs := range map[int]int{0: dedup.DefaultRetries + 1, 2: 3, -1: 1} {
			s, e := newTx()
			e.Retries = retries
			s.commits = slices.Repeat([]error{dedup.ErrSerialization}, 50)
			var a answers
			if _, err := e.Do(t.Context(), request("f"), a.work("one")); !errors.Is(err, dedup.ErrSerialization) {
				t.Errorf("Do: %v, want ErrSerialization", err)
			}
			if a.count() != runs {
				t.Errorf("with Retries %d the work ran %d times, want %d", retries, a.count(), runs)
			}
		}
	})
}

// The work itself may report the lost race.
func TestLostRaceReportedByTheWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, e := newTx()
		runs := 0
		out := mustDo(t, e, request("f"), func(context.Context) (dedup.Answer, error) {
			if runs++; runs == 1 {
				return dedup.Answer{}, dedup.ErrSerialization
			}
			return answer("one"), nil
		})
		wantAnswer(t, out, dedup.Won, "one")
		if s.rollbacks != 1 {
			t.Errorf("%d rollbacks, want 1", s.rollbacks)
		}
	})
}

func TestRollbacks(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		work dedup.Work
		err  error
	}{
		"Rollback": {work: func(ctx context.Context) (dedup.Answer, error) { return answer("no"), dedup.Rollback(ctx) }},
		"NotExecuted": {work: func(ctx context.Context) (dedup.Answer, error) {
			dedup.NotExecuted(ctx)
			return answer("no"), nil
		}},
		"free answer": {work: func(context.Context) (dedup.Answer, error) {
			ans := answer("no")
			ans.Free = true
			return ans, nil
		}},
		"error": {work: func(context.Context) (dedup.Answer, error) { return answer("no"), errDown }, err: errDown},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, e := newTx()
			out, err := e.Do(t.Context(), request("f"), tt.work)
			if !errors.Is(err, tt.err) {
				t.Fatalf("Do: %v, want %v", err, tt.err)
			}
			wantAnswer(t, out, dedup.Won, "no")
			if out.Stored || s.rollbacks != 1 || s.committed != nil {
				t.Errorf("outcome %+v, %d rollbacks, commits %v", out, s.rollbacks, s.committed)
			}
			wantAnswer(t, mustDo(t, e, request("f"), new(answers).work("yes")), dedup.Won, "yes")
		})
	}
}

func TestPanicRollsBack(t *testing.T) {
	t.Parallel()
	s, e := newTx()
	func() {
		defer func() {
			if r := recover(); r != "boom" {
				t.Errorf("recovered %v", r)
			}
		}()
		_, _ = e.Do(t.Context(), request("f"), func(context.Context) (dedup.Answer, error) { panic("boom") })
	}()
	if s.rollbacks != 1 {
		t.Errorf("%d rollbacks, want 1", s.rollbacks)
	}
	wantAnswer(t, mustDo(t, e, request("f"), new(answers).work("yes")), dedup.Won, "yes")
}

func TestCommitFailures(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		commit error
		want   error // of Do
	}{
		"not committed":         {dedup.ErrNotCommitted, dedup.ErrNotStored},
		"connection lost":       {errDown, dedup.ErrNotStored},
		"ended by the work":     {dedup.ErrTxEnded, dedup.ErrTxEnded},
		"left aborted by work":  {dedup.ErrTxAborted, nil},
		"claim was not its own": {dedup.ErrLeaseLost, dedup.ErrLeaseLost},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, e := newTx()
			s.commits = []error{tt.commit}
			out, err := e.Do(t.Context(), request("f"), new(answers).work("one"))
			if !errors.Is(err, tt.want) {
				t.Fatalf("Do: %v, want %v", err, tt.want)
			}
			if err != nil && out.State != 0 {
				t.Errorf("an outcome beside the error: %+v", out)
			}
			if err == nil && (out.Stored || !out.Aborted) {
				t.Errorf("outcome %+v, want aborted and not stored", out)
			}
		})
	}
}

func TestRollbackOfAnEndedTransactionIsReported(t *testing.T) {
	t.Parallel()
	s, e := newTx()
	s.rollback = dedup.ErrTxEnded
	_, err := e.Do(t.Context(), request("f"), func(ctx context.Context) (dedup.Answer, error) {
		return answer("no"), dedup.Rollback(ctx)
	})
	if !errors.Is(err, dedup.ErrTxEnded) {
		t.Errorf("Do: %v, want ErrTxEnded", err)
	}
}

func TestAbandonedInTransactionMode(t *testing.T) {
	t.Parallel()
	s, e := newTx()
	abandon(t, s)
	wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
	wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)

	s, e = newTx()
	e.Abandoned = dedup.Reexecute
	abandon(t, s)
	out := mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if n := dedup.Attempt(ctx); n != 2 {
			t.Errorf("Attempt is %d, want 2", n)
		}
		return answer("again"), nil
	})
	wantAnswer(t, out, dedup.Won, "again")
}
