package pgxstore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

// held inserts the row of id in a transaction that it leaves open, so that
// every claim of it waits. The transaction holds no advisory lock: it is
// nothing that the store would make.
func held(t *testing.T, pool *pgxpool.Pool, table, id string) (release func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() { tx.Rollback(context.Background()) }) //nolint:errcheck // the end is all that counts
	t.Cleanup(release)
	if _, err := tx.Exec(t.Context(), "INSERT INTO "+table+` (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
		VALUES ('scope', $1, '', '', 1, 1, now(), now(), now())`, id); err != nil {
		t.Fatal(err)
	}
	return release
}

// answer is what a call in its own goroutine gave.
type answer struct {
	res  dedup.Result
	err  error
	done chan struct{}
}

func (a *answer) wait() *answer { <-a.done; return a }

func claim(ctx context.Context, s *pgxstore.Store, c dedup.Claim) *answer {
	a := &answer{done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.res, a.err = s.Claim(ctx, c)
	}()
	return a
}

func wantWon(t *testing.T, as ...*answer) {
	t.Helper()
	for i, a := range as {
		if a.wait(); a.err != nil || a.res.State != dedup.Won {
			t.Errorf("claim %d = %v, %v, want won", i, a.res.State, a.err)
		}
	}
}

// waiting waits until n calls wait for a lane.
func waiting(s *pgxstore.Store, n int) {
	for s.Waiting() != n {
		runtime.Gosched()
	}
}

// blocked waits until a statement on table waits for another transaction.
func blocked(t *testing.T, pool *pgxpool.Pool, table string) {
	t.Helper()
	for count(t, pool, `SELECT count(*) FROM pg_stat_activity
		WHERE wait_event_type = 'Lock' AND strpos(query, $1) > 0 AND pid <> pg_backend_pid()`, table) == 0 {
		runtime.Gosched()
	}
}

// crowd makes a store whose only lane is taken until release, and n claims that
// wait for it. Their keys are "k00" to ….
func crowd(t *testing.T, n int, opts pgxstore.Options) (s *pgxstore.Store, pool *pgxpool.Pool, table string, as []*answer, cancels []context.CancelFunc, release func()) {
	t.Helper()
	pool = newPool(t)
	opts.Lanes = 1
	s, table = newStore(t, pool, opts)
	exec(t, pool, "ALTER TABLE "+table+" ADD CHECK (id_key <> 'k-refused')")
	free := held(t, pool, table, "held")
	first := claim(t.Context(), s, claimOf("held"))
	blocked(t, pool, table)
	for i := range n {
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		as = append(as, claim(ctx, s, claimOf(fmt.Sprintf("k%02d", i))))
		cancels = append(cancels, cancel)
		waiting(s, i+1)
	}
	return s, pool, table, as, cancels, func() {
		free()
		wantWon(t, first)
	}
}

func TestBatch(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		opts    pgxstore.Options
		commits int
	}{
		{pgxstore.Options{}, 1},
		{pgxstore.Options{BatchRows: 4}, 3},
		{pgxstore.Options{BatchRows: 1}, 10},
		{pgxstore.Options{BatchBytes: 1}, 10}, // no two fit
	} {
		t.Run(fmt.Sprintf("%+v", tc.opts), func(t *testing.T) {
			_, pool, table, as, _, release := crowd(t, 10, tc.opts)
			release()
			wantWon(t, as...)
			if n := count(t, pool, "SELECT count(DISTINCT xmin::text) FROM "+table+" WHERE id_key LIKE 'k%'"); n != tc.commits {
				t.Errorf("10 claims that waited took %d commits, want %d", n, tc.commits)
			}
		})
	}
}

// Claims and completions share batches, and a key may be there twice.
func TestBatchMixed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s, table := newStore(t, pool, pgxstore.Options{Lanes: 1})
	mine, lost := claimOf("k-mine"), claimOf("k-lost")
	wantWon(t, claim(t.Context(), s, mine), claim(t.Context(), s, lost))

	release := held(t, pool, table, "held")
	first := claim(t.Context(), s, claimOf("held"))
	blocked(t, pool, table)
	errs := make([]chan error, 2)
	for i, token := range []dedup.Token{mine.Token, dedup.NewToken()} {
		key := []dedup.Key{mine.Key, lost.Key}[i]
		errs[i] = make(chan error, 1)
		go func() { errs[i] <- s.Complete(t.Context(), key, token, done("in a batch")) }()
		waiting(s, i+1)
	}
	twice := []*answer{claim(t.Context(), s, claimOf("k-twice")), claim(t.Context(), s, claimOf("k-twice"))}
	waiting(s, 4)
	release()
	wantWon(t, first)
	if err := <-errs[0]; err != nil {
		t.Errorf("Complete = %v, want nil", err)
	}
	if err := <-errs[1]; !errors.Is(err, dedup.ErrLeaseLost) {
		t.Errorf("Complete with another's token = %v, want ErrLeaseLost", err)
	}
	states := []dedup.State{twice[0].wait().res.State, twice[1].wait().res.State}
	slices.Sort(states)
	if !slices.Equal(states, []dedup.State{dedup.Won, dedup.InProgress}) {
		t.Errorf("two claims of one key in a batch = %v, want one won and one in progress", states)
	}
	rec, err := s.Get(t.Context(), mine.Key)
	if err != nil || string(rec.Response.Body) != "in a batch" {
		t.Errorf("the answer is %q, %v", rec.Response.Body, err)
	}
}

// A caller that leaves while it waits takes nobody with it, and leaves nothing
// behind.
func TestCancelledWhileWaiting(t *testing.T) {
	t.Parallel()
	s, _, _, as, cancels, release := crowd(t, 6, pgxstore.Options{})
	for _, i := range []int{0, 3, 5} {
		cancels[i]()
		if as[i].wait(); !errors.Is(as[i].err, context.Canceled) {
			t.Errorf("claim %d = %v, want context.Canceled", i, as[i].err)
		}
		if _, err := s.Get(t.Context(), claimOf(fmt.Sprintf("k%02d", i)).Key); !errors.Is(err, dedup.ErrNotFound) {
			t.Errorf("claim %d was not sent, but Get = %v", i, err)
		}
	}
	release()
	wantWon(t, as[1], as[2], as[4])
}

// The same while the batch is under way; not even its leader takes it along.
func TestCancelledInBatch(t *testing.T) {
	t.Parallel()
	_, pool, table, as, cancels, release := crowd(t, 4, pgxstore.Options{})
	free := held(t, pool, table, "k02")
	release()
	blocked(t, pool, table)
	cancels[0]() // it leads
	cancels[3]()
	if as[3].wait(); !errors.Is(as[3].err, context.Canceled) {
		t.Errorf("a follower that leaves gets %v, want context.Canceled", as[3].err)
	}
	free()
	wantWon(t, as[1], as[2])
	as[0].wait()
}

// A batch that nobody waits for any more is given up.
func TestAllCancelledInBatch(t *testing.T) {
	t.Parallel()
	s, pool, table, as, cancels, release := crowd(t, 3, pgxstore.Options{})
	free := held(t, pool, table, "k01")
	release()
	blocked(t, pool, table)
	for _, cancel := range cancels {
		cancel()
	}
	for i, a := range as {
		if a.wait(); !errors.Is(a.err, context.Canceled) {
			t.Errorf("claim %d = %v, want context.Canceled", i, a.err)
		}
	}
	free()
	wantWon(t, claim(t.Context(), s, claimOf("after"))) // the lane is free
}

// One call's error is its own.
func TestBatchFails(t *testing.T) {
	t.Parallel()
	s, _, _, as, _, release := crowd(t, 5, pgxstore.Options{})
	refused := claim(t.Context(), s, claimOf("k-refused"))
	waiting(s, 6)
	release()
	wantWon(t, as...)
	var code interface{ SQLState() string }
	if refused.wait(); !errors.As(refused.err, &code) || code.SQLState() != "23514" {
		t.Errorf("the call that was refused = %v, want its own error", refused.err)
	}
}

// codes counts the errors that the server answered batches with.
type codes struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *codes) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (c *codes) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *codes) TraceBatchEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchEndData) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var state interface{ SQLState() string }
	if errors.As(d.Err, &state) {
		c.n[state.SQLState()]++
	}
}
func (c *codes) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (c *codes) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Batches of several processes hold the same keys, and don't dead-lock.
func TestBatchesInKeyOrder(t *testing.T) {
	t.Parallel()
	errs := &codes{n: map[string]int{}}
	pool := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = errs })
	_, table := newStore(t, pool, pgxstore.Options{})
	var stores []*pgxstore.Store
	for range 3 {
		s, err := pgxstore.New(pool, pgxstore.Options{Table: table, Lanes: 2})
		if err != nil {
			t.Fatal(err)
		}
		stores = append(stores, s)
	}
	for round := range 20 {
		var as []*answer
		for i, s := range stores {
			for k := range 16 {
				k := (k*7 + i*5 + round) % 16
				as = append(as, claim(t.Context(), s, claimOf(fmt.Sprintf("%d-%d", round, k))))
			}
		}
		won := 0
		for _, a := range as {
			if a.wait(); a.err != nil {
				t.Fatal(a.err)
			}
			if a.res.State == dedup.Won {
				won++
			}
		}
		if won != 16 {
			t.Errorf("%d of 16 keys were won", won)
		}
	}
	if n := errs.n["40P01"]; n != 0 {
		t.Errorf("%d dead-locks", n)
	}
}
