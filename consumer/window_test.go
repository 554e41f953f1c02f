package consumer_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/internal/operation"
)

// fakeWindow is a WindowStore in memory, whose answers can get lost.
type fakeWindow struct {
	mu    sync.Mutex
	rows  map[dedup.Key]windowRow
	fault map[string]int // by method: how many calls lose their answer
}

type windowRow struct {
	token dedup.Token
	done  bool
	ends  time.Time
}

func newWindow() (*consumer.Window, *fakeWindow) {
	f := &fakeWindow{rows: map[dedup.Key]windowRow{}, fault: map[string]int{}}
	return &consumer.Window{Store: f, Group: "billing", Window: time.Hour}, f
}

func (f *fakeWindow) answer(method string, err error) error {
	if f.fault[method] > 0 {
		f.fault[method]--
		return errDown
	}
	return err
}

func (f *fakeWindow) row(key dedup.Key) (windowRow, bool) {
	r, ok := f.rows[key]
	return r, ok && time.Now().Before(r.ends)
}

func (f *fakeWindow) Acquire(_ context.Context, key dedup.Key, token dedup.Token, lease time.Duration) (dedup.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.row(key)
	res := dedup.Result{State: dedup.InProgress}
	switch {
	case !ok:
		f.rows[key] = windowRow{token: token, ends: time.Now().Add(lease)}
		res.State = dedup.Won
	case r.done:
		res.State = dedup.Completed
	default:
		res.Record.LeaseLeft = time.Until(r.ends)
	}
	return res, f.answer("Acquire", nil)
}

func (f *fakeWindow) Finish(_ context.Context, key dedup.Key, token dedup.Token, window time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r, ok := f.row(key); ok && r.token != token {
		return dedup.ErrLeaseLost
	}
	f.rows[key] = windowRow{token: token, done: true, ends: time.Now().Add(window)}
	return f.answer("Finish", nil)
}

func (f *fakeWindow) Release(_ context.Context, key dedup.Key, token dedup.Token) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.row(key)
	if !ok || r.done || r.token != token {
		return dedup.ErrLeaseLost
	}
	delete(f.rows, key)
	return f.answer("Release", nil)
}

func TestWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := newWindow()
		wantStatus(t, w.Handle(t.Context(), "e1", fail), consumer.Failed)
		r := w.Handle(t.Context(), "e1", func(ctx context.Context) error {
			if operation.From(ctx) == "" {
				t.Error("the handler's context names no operation")
			}
			wantStatus(t, w.Handle(ctx, "e1", never(t)), consumer.Busy)
			return nil
		})
		wantStatus(t, r, consumer.Done)
		r = w.Handle(t.Context(), "e1", never(t))
		wantStatus(t, r, consumer.Done)
		if !r.Duplicate {
			t.Errorf("%+v", r)
		}
		time.Sleep(time.Hour + time.Second)
		ran := false
		wantStatus(t, w.Handle(t.Context(), "e1", func(context.Context) error { ran = true; return nil }), consumer.Done)
		if !ran {
			t.Error("the event is remembered past its window")
		}
	})
}

func TestWindowPanicLetsGo(t *testing.T) {
	t.Parallel()
	w, _ := newWindow()
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		w.Handle(t.Context(), "e1", func(context.Context) error { panic("down") })
	}()
	wantStatus(t, w.Handle(t.Context(), "e1", ok), consumer.Done)
}

func TestWindowLeaseBoundsTheHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := newWindow()
		ctx, cancel := context.WithCancel(t.Context())
		r := w.Handle(ctx, "e1", func(ctx context.Context) error {
			cancel() // the caller's end is not the handler's
			if ctx.Err() != nil {
				t.Error("the handler was cut off with its caller")
			}
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), dedup.ErrLeaseLost) {
				t.Errorf("cause is %v", context.Cause(ctx))
			}
			// Another copy is handled before this one notices.
			wantStatus(t, w.Handle(t.Context(), "e1", ok), consumer.Done)
			return nil
		})
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, dedup.ErrLeaseLost) {
			t.Errorf("%v", r.Err)
		}
	})
}

func TestWindowLostAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, f := newWindow()
		f.fault["Acquire"] = 1
		wantStatus(t, w.Handle(t.Context(), "e1", never(t)), consumer.Busy)
		f.fault["Finish"] = 3 // marked, but not told so; asked again
		wantStatus(t, w.Handle(t.Context(), "e1", ok), consumer.Done)
		wantStatus(t, w.Handle(t.Context(), "e1", never(t)), consumer.Done)

		f.fault["Finish"] = 1 << 30
		r := w.Handle(t.Context(), "e2", ok)
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, dedup.ErrNotStored) {
			t.Errorf("%v", r.Err)
		}
	})
}

func TestWindowConfig(t *testing.T) {
	t.Parallel()
	_, f := newWindow()
	for name, w := range map[string]*consumer.Window{
		"no store":       {Window: time.Hour},
		"no window":      {Store: f},
		"negative lease": {Store: f, Window: time.Hour, Lease: -1},
	} {
		r := w.Handle(t.Context(), "e1", never(t))
		wantStatus(t, r, consumer.Failed)
		if !errors.Is(r.Err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, r.Err)
		}
	}
}
