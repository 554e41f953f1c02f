package dedup_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
)

func TestObserverSeesEveryStep(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seen []string
	s := memstore.New()
	e := &dedup.Engine{Store: s, Observer: func(_ context.Context, ev dedup.Event) {
		mu.Lock()
		defer mu.Unlock()
		line := ev.Kind.String()
		if ev.Kind == dedup.EventClaimed {
			line += " " + ev.State.String()
		}
		if ev.Key != testKey {
			t.Errorf("event %v of key %v", ev.Kind, ev.Key)
		}
		seen = append(seen, line)
	}}
	mustDo(t, e, request("f"), new(answers).work("one"))
	mustDo(t, e, request("f"), never(t))
	mustDo(t, e, request("other"), never(t))
	want := []string{"claimed won", "ran", "stored", "claimed completed", "claimed mismatch"}
	if !slices.Equal(seen, want) {
		t.Errorf("seen %q, want %q", seen, want)
	}
}

func TestKeysStayOutOfLogs(t *testing.T) {
	t.Parallel()
	var buf bytes.Buffer
	s := memstore.New()
	abandon(t, s)
	e := &dedup.Engine{Store: s, Logger: slog.New(slog.NewJSONHandler(&buf, nil))}
	wantState(t, mustDo(t, e, request("f"), never(t)), dedup.Unknown)
	if !strings.Contains(buf.String(), "abandoned") || !strings.Contains(buf.String(), testKey.Scope) {
		t.Errorf("log says %q, want the abandoned operation's scope", buf.String())
	}
	if strings.Contains(buf.String(), testKey.ID) {
		t.Errorf("the key is in the log: %q", buf.String())
	}
}

func TestWorkKnowsItsKey(t *testing.T) {
	t.Parallel()
	if _, ok := dedup.KeyFrom(t.Context()); ok || dedup.Attempt(t.Context()) != 0 {
		t.Error("a plain context belongs to an operation")
	}
	e := &dedup.Engine{Store: memstore.New()}
	mustDo(t, e, request("f"), func(ctx context.Context) (dedup.Answer, error) {
		if key, ok := dedup.KeyFrom(ctx); !ok || key != testKey {
			t.Errorf("KeyFrom = %v, %v", key, ok)
		}
		return answer("one"), nil
	})
}
