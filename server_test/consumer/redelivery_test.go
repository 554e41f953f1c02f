package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/effectonce/idempotency/consumer"
)

// trace is what the events' headers carry, and the handler must see.
const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// payload is the same for every event: only ids tell them apart.
const payload = `{"amount":1000}`

// job is what a broker's adapter is to do: have each event handled by handle,
// through consumer, and give the dead ones to dead.
type job struct {
	consumer func() consumer.Consumer // another worker's each time
	handle   func(ctx context.Context, id, trace string) error
	dead     func(id string)
}

// broker sends the events, some of them several times, and returns once nothing
// is left to deliver.
type broker func(t *testing.T, ids []string, j job)

var brokers = map[string]broker{
	"jetstream": overJetStream,
	"rabbitmq":  overRabbitMQ,
	"kafka":     overKafka,
	"watermill": overWatermill,
	"webhook":   overWebhook,
}

// TestConsumerRedelivery: events that are delivered several times, in copies at
// the same time, again after their handler failed, and for ever if nobody
// stopped it, have one effect each, and every delivery ends. Over every store
// and every broker.
func TestConsumerRedelivery(t *testing.T) {
	t.Parallel()
	for name, b := range brokers {
		for _, kind := range allKinds {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				testRedelivery(t, b, newFixture(t, kind))
			})
		}
	}
}

func testRedelivery(t *testing.T, send broker, f *fixture) {
	var ids, good []string
	for i := range 6 {
		good = append(good, fmt.Sprintf("e%d", i))
	}
	good = append(good, "fails-once")
	for range 3 {
		ids = append(ids, good...)
	}
	ids = append(ids, "never-works")

	var mu sync.Mutex
	tries, dead := map[string]int{}, []string{}
	send(t, ids, job{
		consumer: func() consumer.Consumer { return f.consumer("g") },
		handle: func(ctx context.Context, id, got string) error {
			if got != trace {
				t.Errorf("trace context %q", got)
			}
			mu.Lock()
			tries[id]++
			n := tries[id]
			mu.Unlock()
			switch {
			case id == "never-works":
				return fmt.Errorf("%w: it never works", consumer.ErrPoison)
			case id == "fails-once" && n == 1:
				if f.loaded != nil { // a transaction takes it back
					if err := f.write(ctx, id); err != nil {
						return err
					}
				}
				return errHandler
			}
			return f.write(ctx, id)
		},
		dead: func(id string) {
			mu.Lock()
			defer mu.Unlock()
			dead = append(dead, id)
		},
	})
	want := map[string]int{}
	for _, id := range good {
		want[id] = 1
	}
	f.wantEffects(t, want)
	mu.Lock()
	defer mu.Unlock()
	if tries["fails-once"] < 2 {
		t.Error("the event that failed was not handled again")
	}
	if !slices.Equal(dead, []string{"never-works"}) {
		t.Errorf("dead letters: %q", dead)
	}
}

// waitFor asks until f is true.
func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-ctx.Done():
			t.Fatalf("did not happen: %s", what)
		case <-tick.C:
		}
	}
}
