package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/outbox"
	"github.com/effectonce/idempotency/outbox/outboxtest"
)

// broker is a publisher that keeps what it got, and says what it is told to.
type broker struct {
	mu    sync.Mutex
	log   []string
	calls [][]string
	fate  func(m outbox.Message) error // nil: all is well
	hook  func(ctx context.Context)
}

func (b *broker) Publish(ctx context.Context, msgs []outbox.Message) []error {
	if b.hook != nil {
		b.hook(ctx)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := make([]error, len(msgs))
	var call []string
	for i, m := range msgs {
		call = append(call, string(m.Payload))
		if b.fate != nil {
			errs[i] = b.fate(m)
		}
		if errs[i] == nil {
			b.log = append(b.log, string(m.Payload))
		}
	}
	b.calls = append(b.calls, call)
	return errs
}

func (b *broker) got() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.log)
}

// ordered is a broker that keeps the order of a call.
type ordered struct{ broker }

func (*ordered) KeepsOrder() {}

func msgs(key string, payloads ...string) []outbox.Message {
	var ms []outbox.Message
	for _, p := range payloads {
		ms = append(ms, outbox.Message{ID: p, Topic: "t", Key: key, Payload: []byte(p)})
	}
	return ms
}

// relay runs a relay for d of fake time.
func relay(t *testing.T, store outbox.Store, pub outbox.Publisher, opts outbox.Options, d time.Duration) {
	t.Helper()
	r, err := outbox.New(store, pub, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

var errRefused = errors.New("refused")

// A retry must not let the messages behind it overtake.
func TestRetryKeepsOrder(t *testing.T) {
	t.Parallel()
	for name, keeps := range map[string]bool{"one at a time": false, "ordered publisher": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &outboxtest.Memory{}
				_ = s.Enqueue(t.Context(), msgs("k", "a", "b", "c", "d", "e")...)
				_ = s.Enqueue(t.Context(), msgs("l", "x")...)
				o := &ordered{}
				failed := map[string]bool{}
				o.fate = func(m outbox.Message) error {
					p := string(m.Payload)
					if keeps && failed["now"] && m.Key == "k" {
						return outbox.ErrNotTried
					}
					if (p == "b" || p == "d") && !failed[p] {
						failed[p], failed["now"] = true, true
						return errRefused
					}
					return nil
				}
				o.hook = func(context.Context) { delete(failed, "now") }
				var pub outbox.Publisher = o
				if !keeps {
					pub = &o.broker
				}
				relay(t, s, pub, outbox.Options{}, time.Minute)
				got := o.got()
				if i := slices.Index(got, "x"); i < 0 || i > 3 {
					t.Errorf("the other key waited: %q", got)
				}
				want(t, slices.DeleteFunc(got, func(s string) bool { return s == "x" }), "a", "b", "c", "d", "e")
				for _, call := range o.calls {
					if !keeps && len(call) > 2 {
						t.Errorf("call with several of a key: %q", call)
					}
				}
			})
		})
	}
}

func TestUnreachableSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("k", "a", "b")...)
		back := time.Now().Add(time.Hour)
		b := &broker{}
		tries := 0
		b.fate = func(m outbox.Message) error {
			if time.Now().Before(back) {
				tries++
				return fmt.Errorf("dial: %w", outbox.ErrUnreachable)
			}
			if m.Attempt != 1 {
				t.Errorf("attempt %d, want 1", m.Attempt)
			}
			return nil
		}
		relay(t, s, b, outbox.Options{MaxAttempts: 2}, time.Hour+time.Minute)
		want(t, b.got(), "a", "b")
		if tries < 100 || tries > 2000 {
			t.Errorf("%d tries in an hour", tries)
		}
	})
}

func TestPoison(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		policy    outbox.Poison
		err       error
		published []string
		poison    []string
		tries     int
	}{
		{"its key waits", outbox.BlockKey, errRefused, []string{"b1", "b2"}, []string{"p1", "u1"}, 3},
		{"put aside", outbox.PutAside, errRefused, []string{"b1", "b2", "p2"}, []string{"p1", "u1"}, 3},
		{"permanent", outbox.BlockKey, fmt.Errorf("%w: too large", outbox.ErrPermanent), []string{"b1", "b2"}, []string{"p1", "u1"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &outboxtest.Memory{}
				_ = s.Enqueue(t.Context(), msgs("p", "p1", "p2")...)
				_ = s.Enqueue(t.Context(), msgs("b", "b1", "b2")...)
				_ = s.Enqueue(t.Context(), msgs("", "u1")...)
				tries := 0
				b := &broker{fate: func(m outbox.Message) error {
					if m.ID == "p1" {
						tries++
					}
					if m.ID == "p1" || m.ID == "u1" {
						return c.err
					}
					return nil
				}}
				fates := map[string]outbox.Fate{}
				relay(t, s, b, outbox.Options{MaxAttempts: 3, Poison: c.policy,
					Observe: func(m outbox.Message, f outbox.Fate, _ error) { fates[m.ID] = f }}, time.Hour)
				want(t, slices.Sorted(slices.Values(b.got())), c.published...)
				want(t, s.Poison(), c.poison...)
				if tries != c.tries {
					t.Errorf("%d tries, want %d", tries, c.tries)
				}
				if fates["u1"] != outbox.DeadLetter { // it has no key to block
					t.Errorf("u1: %v", fates["u1"])
				}
			})
		})
	}
}

// One message over which the publisher panics takes no other along.
func TestPanic(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("", "a", "b", "c")...)
		b := outbox.PublisherFunc(func(_ context.Context, m outbox.Message) error {
			if m.ID == "b" {
				panic("b")
			}
			return nil
		})
		relay(t, s, b, outbox.Options{MaxAttempts: 2}, time.Minute)
		want(t, s.Poison(), "b")
		if s.Pending() != 0 {
			t.Errorf("%d left", s.Pending())
		}
	})
}

// wrongLength returns fewer results than it got messages.
type wrongLength struct{}

func (wrongLength) Publish(context.Context, []outbox.Message) []error { return make([]error, 1) }

func TestWrongNumberOfResults(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("", "a", "b")...)
		relay(t, s, wrongLength{}, outbox.Options{MaxAttempts: 1}, time.Second)
		want(t, s.Poison(), "a", "b")
	})
}

// A broker that is slower than the lease: it is renewed, and no second relay
// publishes the same.
func TestLeaseIsRenewed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("k", "a", "b", "c")...)
		b := &broker{hook: func(context.Context) { time.Sleep(10 * time.Second) }}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				relay(t, s, b, outbox.Options{Lease: 3 * time.Second, Poll: 100 * time.Millisecond}, time.Minute)
			})
		}
		wg.Wait()
		want(t, b.got(), "a", "b", "c")
	})
}

// stolen is a store that lets nobody renew.
type stolen struct{ *outboxtest.Memory }

func (stolen) Renew(context.Context, outbox.Token, []int64, time.Duration) (int, error) {
	return 0, nil
}

func TestLeaseLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := stolen{&outboxtest.Memory{}}
		_ = s.Enqueue(t.Context(), msgs("k", "a", "b")...)
		var cause error
		calls := 0
		b := &broker{hook: func(ctx context.Context) {
			if calls++; calls == 1 {
				<-ctx.Done()
				cause = context.Cause(ctx)
			}
		}}
		b.fate = func(outbox.Message) error {
			if calls == 1 {
				return context.Canceled
			}
			return nil
		}
		relay(t, s, b, outbox.Options{MaxAttempts: 1}, time.Minute)
		if !errors.Is(cause, outbox.ErrLeaseLost) {
			t.Errorf("cause %v, want ErrLeaseLost", cause)
		}
		want(t, b.calls[0], "a") // and not b, which another relay may have
		want(t, b.got(), "a", "b")
	})
}

// A stop lets what is being published end, and frees the rest at once.
func TestStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("k", "a", "b")...)
		b := &broker{hook: func(ctx context.Context) {
			time.Sleep(5 * time.Second)
			if ctx.Err() != nil {
				t.Error("cut off")
			}
		}}
		relay(t, s, b, outbox.Options{}, time.Second)
		want(t, b.got(), "a")
		c, _ := s.Claim(t.Context(), 10, time.Minute)
		if len(c.Messages) != 1 || c.Messages[0].ID != "b" || c.Messages[0].Attempt != 1 {
			t.Errorf("left: %+v", c.Messages)
		}
	})
}

func TestStopAfterGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		_ = s.Enqueue(t.Context(), msgs("k", "a")...)
		b := &broker{hook: func(ctx context.Context) { <-ctx.Done() }, fate: func(outbox.Message) error { return context.Canceled }}
		start := time.Now()
		relay(t, s, b, outbox.Options{Grace: 3 * time.Second, MaxAttempts: 1}, time.Second)
		if d := time.Since(start); d != 4*time.Second {
			t.Errorf("stopped after %v, want 4s", d)
		}
		if c, _ := s.Claim(t.Context(), 10, time.Minute); len(c.Messages) != 1 { // free, and no attempt spent
			t.Errorf("left: %+v", c.Messages)
		}
	})
}

// flaky is a store whose database is away now and then.
type flaky struct {
	*outboxtest.Memory
	claims, settles int
}

func (f *flaky) Claim(ctx context.Context, n int, d time.Duration) (outbox.Claim, error) {
	if f.claims++; f.claims%2 == 1 {
		return outbox.Claim{}, errRefused
	}
	return f.Memory.Claim(ctx, n, d)
}

func (f *flaky) Settle(ctx context.Context, token outbox.Token, o []outbox.Outcome) (int, error) {
	if f.settles++; f.settles < 4 {
		return 0, errRefused
	}
	return f.Memory.Settle(ctx, token, o)
}

func TestStoreFailures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &flaky{Memory: &outboxtest.Memory{}}
		_ = s.Enqueue(t.Context(), msgs("k", "a", "b")...)
		b := &broker{}
		relay(t, s, b, outbox.Options{}, time.Minute)
		want(t, b.got(), "a", "b")
		if s.Pending() != 0 {
			t.Errorf("%d left", s.Pending())
		}
	})
}

func TestWakeAndPoll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &outboxtest.Memory{}
		b := &broker{}
		ctx, cancel := context.WithCancel(t.Context())
		r, err := outbox.New(s, b, outbox.Options{Poll: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		synctest.Wait()
		start := time.Now()
		_ = s.Enqueue(t.Context(), msgs("k", "a")...)
		synctest.Wait()
		want(t, b.got(), "a")
		if d := time.Since(start); d != 0 {
			t.Errorf("woken after %v", d)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	s, b := &outboxtest.Memory{}, &broker{}
	for i, o := range []outbox.Options{{Batch: -1}, {Batch: 1e6}, {Lease: -1}, {Lease: 1}, {Poll: -1}, {Grace: -1}, {Unreachable: -1}, {PurgeBatch: -1}, {Poison: 9}} {
		if _, err := outbox.New(s, b, o); !errors.Is(err, outbox.ErrConfig) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if _, err := outbox.New(nil, b, outbox.Options{}); !errors.Is(err, outbox.ErrConfig) {
		t.Error(err)
	}
	if _, err := outbox.New(s, nil, outbox.Options{}); !errors.Is(err, outbox.ErrConfig) {
		t.Error(err)
	}
}
