package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// answer is what a client saw of one request.
type answer struct {
	Status   int
	Body     string
	Location string
	Replayed bool
}

// definite reports whether asking again can't change the answer: a success, a
// refusal, or what is marked as stored. Others, such as a 503 or a handler's
// first 500, a client comes back for.
func (a answer) definite() bool {
	return a.Status == http.StatusCreated || a.Status == http.StatusUnprocessableEntity || a.Replayed
}

// send sends one request. Each goes over a connection of its own, for on a
// reused one net/http repeats requests by itself.
func send(ctx context.Context, addr, tenant, key string, req effectRequest) (answer, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return answer{}, err
	}
	hr, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/effects", bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	hr.Header.Set("Idempotency-Key", key)
	hr.Header.Set("Tenant", tenant)
	hr.Header.Set("Content-Type", "application/json")
	hr.Close = true
	client := &http.Client{Transport: oneShot}
	resp, err := client.Do(hr)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, string(got), resp.Header.Get("Location"), resp.Header.Get("Idempotent-Replayed") == "true"}, err
}

var oneShot = &http.Transport{DisableKeepAlives: true}

// settle asks until the answer is definite, as a client does that goes by
// Retry-After, only less patiently.
func settle(ctx context.Context, addr, tenant, key string, req effectRequest) (answer, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		a, err := send(ctx, addr, tenant, key, req)
		if err == nil && a.definite() {
			return a, nil
		}
		select {
		case <-ctx.Done():
			return a, fmt.Errorf("no definite answer (last: %+v, %w): %w", a, errors.Join(err), ctx.Err())
		case <-tick.C:
		}
	}
}

// A process that is killed at any step of a request leaves an operation that
// the next process finishes, replays, or says the truth about.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, kind := range backendKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := newBackend(t, kind)
			if transactional(kind) {
				for _, point := range txCrashPoints {
					t.Run("transaction/"+point, func(t *testing.T) {
						killAt(t, nodeConfig{Backend: b, Mode: dedup.Transaction}, point, expect{status: 201, effects: 1})
					})
				}
			}
			for i, point := range leaseCrashPoints {
				cfg := nodeConfig{Backend: b, Lease: 600 * time.Millisecond}
				effects := 0
				if i > slices.Index(leaseCrashPoints, "before effect") {
					effects = 1
				}
				t.Run("lease/fail/"+point, func(t *testing.T) {
					want := expect{status: 500, unknown: true, effects: effects}
					if point == "before claim" || point == "after complete" {
						want = expect{status: 201, effects: 1}
					}
					killAt(t, cfg, point, want)
				})
				t.Run("lease/reexecute/"+point, func(t *testing.T) {
					cfg.Abandoned = dedup.Reexecute
					want := expect{status: 201, effects: 1}
					if point == "after effect" || point == "before complete" {
						want.effects = 2 // as was asked for by the policy
					}
					killAt(t, cfg, point, want)
				})
			}
		})
	}
}

type expect struct {
	status  int
	unknown bool
	effects int
}

func killAt(t *testing.T, cfg nodeConfig, point string, want expect) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	key := dedup.NewToken().String()
	req := effectRequest{Op: key}

	cfg.KillAt = point
	first := startNode(t, cfg)
	if a, err := send(ctx, first.addr, "acme", key, req); err == nil {
		t.Fatalf("a node that was killed %s answered: %+v", point, a)
	}
	<-first.done

	cfg.KillAt = ""
	second := startNode(t, cfg)
	got, err := settle(ctx, second.addr, "acme", key, req)
	if err != nil {
		t.Fatal(err)
	}
	if got.Status != want.status {
		t.Errorf("after a kill %s the answer is %+v, want status %d", point, got, want.status)
	}
	if want.unknown && !got.Replayed {
		t.Errorf("an outcome that stays unknown is not marked as final: %+v", got)
	}
	again, err := send(ctx, second.addr, "acme", key, req)
	if err != nil || again.Status != got.Status || again.Body != got.Body || again.Location != got.Location {
		t.Errorf("answered %+v, then %+v, %v", got, again, err)
	}
	if other, err := send(ctx, second.addr, "acme", key, effectRequest{Op: key, Note: "other"}); err != nil || other.Status != 422 {
		t.Errorf("the key with another request: %+v, %v, want 422", other, err)
	}
	second.kill()

	conn, err := openBackend(ctx, cfg.Backend)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.close()
	effects, err := conn.ledger.effects(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if effects[key] != want.effects {
		t.Errorf("%d effects, want %d", effects[key], want.effects)
	}
}
