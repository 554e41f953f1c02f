package redisstore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

// told waits for a word.
func told(t *testing.T, c <-chan struct{}, of string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(time.Minute):
		t.Fatalf("no word of %s", of)
	}
}

func watch(t *testing.T, s *redisstore.Store, k dedup.Key) <-chan struct{} {
	t.Helper()
	c, stop, err := s.Watch(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return c
}

// In a cluster every node hears every word, so there must be none without need.
func TestOnlyWatchedRunsArePublished(t *testing.T) {
	t.Parallel()
	c := shared(t)
	s := newStore(t, c, redisstore.Options{})
	ctx := t.Context()
	prefix, _ := strings.CutSuffix(s.RowName(dedup.Key{}), ":")
	sub := c.Subscribe(ctx, prefix+"ended")
	defer sub.Close()
	if _, err := sub.Receive(ctx); err != nil {
		t.Fatal(err)
	}
	ends := map[string]func(c dedup.Claim) error{
		"completed": func(c dedup.Claim) error { return s.Complete(ctx, c.Key, c.Token, completion("x")) },
		"released":  func(c dedup.Claim) error { return s.Release(ctx, c.Key, c.Token) },
		"resolved": func(c dedup.Claim) error {
			return errors.Join(s.Renew(ctx, c.Key, c.Token, 0), s.Resolve(ctx, c.Key, &dedup.Response{}, time.Hour))
		},
		"freed": func(c dedup.Claim) error {
			return errors.Join(s.Renew(ctx, c.Key, c.Token, 0), s.Resolve(ctx, c.Key, nil, 0))
		},
	}
	for name, end := range ends {
		alone, watched := claim("alone-"+name), claim("watched-"+name)
		mustClaim(t, s, alone, dedup.Won)
		mustClaim(t, s, watched, dedup.Won)
		watch(t, s, watched.Key)
		if err := errors.Join(end(alone), end(watched)); err != nil {
			t.Fatal(err)
		}
		m, err := sub.ReceiveMessage(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if m.Payload != s.RowName(watched.Key) {
			t.Errorf("the first word is of %q, want %q: only watched runs are published", m.Payload, s.RowName(watched.Key))
		}
	}
}

func TestWatchTellsAtOnce(t *testing.T) {
	t.Parallel()
	s := newStore(t, shared(t), redisstore.Options{})
	told(t, watch(t, s, dedup.Key{ID: "absent"}), "a row that is not there")
	row := claim("a")
	mustClaim(t, s, row, dedup.Won)
	if err := s.Complete(t.Context(), row.Key, row.Token, completion("x")); err != nil {
		t.Fatal(err)
	}
	told(t, watch(t, s, row.Key), "a run that had ended before")
}

// Words may have been lost with the connection, so all who wait look again.
func TestWatchAfterLostConnection(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	s := newStore(t, c, redisstore.Options{})
	row := claim("a")
	mustClaim(t, s, row, dedup.Won)
	told(t, watch(t, s, row.Key), "the subscription, once it is in force")
	again := watch(t, s, row.Key)
	if n, err := c.ClientKillByFilter(t.Context(), "TYPE", "pubsub").Result(); n != 1 || err != nil {
		t.Fatalf("%d connections killed (%v), want 1: all watches share one", n, err)
	}
	told(t, again, "the connection that was lost")
	third := watch(t, s, row.Key)
	if err := s.Release(t.Context(), row.Key, row.Token); err != nil {
		t.Fatal(err)
	}
	told(t, third, "the release, by the new connection")
}

func TestCloseEndsWatches(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	s := newStore(t, c, redisstore.Options{})
	row := claim("a")
	mustClaim(t, s, row, dedup.Won)
	told(t, watch(t, s, row.Key), "the subscription, once it is in force")
	waiting := watch(t, s, row.Key)
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	}
	told(t, waiting, "the end of the store")
	if _, _, err := s.Watch(t.Context(), row.Key); err == nil {
		t.Error("Watch = nil after Close")
	}
	eventually(t, "the subscription's connection is gone", func() bool {
		list, err := c.Do(t.Context(), "client", "list", "type", "pubsub").Text()
		return err == nil && list == ""
	})
	mustClaim(t, s, claim("a"), dedup.InProgress) // the rest goes on
}

func TestWatchWithoutServer(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	c := redis.NewClient(&redis.Options{Addr: srv.addr, MaxRetries: -1, DialerRetries: 1})
	t.Cleanup(func() { c.Close() })
	s, err := redisstore.New(t.Context(), c, redisstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	srv.kill()
	if _, _, err := s.Watch(t.Context(), dedup.Key{ID: "a"}); err == nil {
		t.Error("Watch = nil though there is no server")
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close = %v", err)
	}
}

// Two processes: who waits in one is told when the run ends in the other.
func TestEnginesOfTwoProcesses(t *testing.T) {
	t.Parallel()
	c := shared(t)
	here := newStore(t, c, redisstore.Options{})
	prefix, _ := strings.CutSuffix(here.RowName(dedup.Key{}), ":")
	there, err := redisstore.New(t.Context(), c, redisstore.Options{Prefix: prefix})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { there.Close() })
	key := dedup.Key{Scope: "s", ID: "a"}
	started, finish := make(chan struct{}), make(chan struct{})
	first := make(chan dedup.Outcome, 1)
	run := func(s dedup.Store, work dedup.Work) dedup.Outcome {
		e := &dedup.Engine{Store: s, Wait: time.Minute}
		out, err := e.Do(t.Context(), dedup.Request{Key: key, Fingerprint: []byte("f")}, work)
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		return out
	}
	go func() {
		first <- run(there, func(context.Context) (dedup.Answer, error) {
			close(started)
			<-finish
			return dedup.Answer{Response: dedup.Response{Code: 201, Body: []byte("once")}}, nil
		})
	}()
	<-started
	waiting := make(chan dedup.Outcome, 1)
	go func() {
		waiting <- run(here, func(context.Context) (dedup.Answer, error) {
			t.Error("the work ran twice")
			return dedup.Answer{}, nil
		})
	}()
	eventually(t, "the second one waits", func() bool {
		w, err := c.HGet(t.Context(), here.RowName(key), "w").Result()
		return err == nil && w == "1"
	})
	close(finish)
	if out := <-first; out.State != dedup.Won {
		t.Errorf("first is %v, want won", out.State)
	}
	if out := <-waiting; out.State != dedup.Completed || string(out.Response.Body) != "once" {
		t.Errorf("second is %v with %q, want completed with the stored answer", out.State, out.Response.Body)
	}
}
