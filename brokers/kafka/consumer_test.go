package kafkabroker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	kafkabroker "github.com/effectonce/idempotency/brokers/kafka"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup/memstore"
)

var errHandler = errors.New("the handler failed")

const topic = "events"

func newCluster(t *testing.T, partitions int32) []kgo.Opt {
	t.Helper()
	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(partitions, topic))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return []kgo.Opt{kgo.SeedBrokers(c.ListenAddrs()...)}
}

func produce(t *testing.T, cluster []kgo.Opt, records ...*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(append(cluster[:len(cluster):len(cluster)],
		kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
}

func record(partition int32, id string) *kgo.Record {
	r := &kgo.Record{Partition: partition, Value: []byte(id), Headers: []kgo.RecordHeader{{Key: "traceparent", Value: []byte("00-trace")}}}
	if id != "" {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: "id", Value: []byte(id)})
	}
	return r
}

// start runs h as a member of the group until stop is called.
func start(t *testing.T, cluster []kgo.Opt, h *kafkabroker.Handler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	opts := append(cluster[:len(cluster):len(cluster)], kgo.ConsumerGroup("g"), kgo.ConsumeTopics(topic))
	go func() { done <- h.Run(ctx, opts...) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-ctx.Done():
			t.Fatalf("did not happen: %s", what)
		case <-tick.C:
		}
	}
}

// journal notes what was handled, in order.
type journal struct {
	mu  sync.Mutex
	ids []string
}

func (j *journal) add(r *kgo.Record) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ids = append(j.ids, string(r.Value))
	n := 0
	for _, id := range j.ids {
		if id == string(r.Value) {
			n++
		}
	}
	return n
}

func (j *journal) get() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.ids)
}

func newHandler(handle func(context.Context, *kgo.Record) error) *kafkabroker.Handler {
	return &kafkabroker.Handler{
		Consumer: &consumer.Lease{Store: memstore.New()},
		ID:       kafkabroker.HeaderID("id"),
		Handle:   handle,
	}
}

// One that fails is tried again before the ones behind it; other partitions go
// on; duplicates have no effect.
func TestHandlerOrderAndOneEffect(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 2)
	var tries, effects journal
	h := newHandler(func(_ context.Context, r *kgo.Record) error {
		if len(r.Headers) == 0 || string(r.Headers[0].Value) != "00-trace" {
			t.Error("the trace context was not handed on")
		}
		if tries.add(r) == 1 && string(r.Value) == "b" {
			return errHandler
		}
		effects.add(r)
		return nil
	})
	produce(t, cluster, record(0, "a"), record(0, "b"), record(0, "a"), record(0, "c"), record(0, "b"), record(0, "d"), record(1, "other"))
	start(t, cluster, h)
	waitFor(t, "all events handled", func() bool {
		ids := effects.get()
		return slices.Contains(ids, "d") && slices.Contains(ids, "other")
	})
	got := slices.DeleteFunc(effects.get(), func(id string) bool { return id == "other" })
	if want := []string{"a", "b", "c", "d"}; !slices.Equal(got, want) {
		t.Errorf("effects %v, want %v", got, want)
	}
}

// What was not handled is not committed: another member gets it, and what was
// handled stays so.
func TestHandlerCommitsOnlyWhatIsDone(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 1)
	produce(t, cluster, record(0, "a"), record(0, "b"), record(0, "c"))
	var first journal
	stop := start(t, cluster, newHandler(func(ctx context.Context, r *kgo.Record) error {
		first.add(r)
		if string(r.Value) == "b" {
			return errHandler
		}
		return nil
	}))
	waitFor(t, "b failed", func() bool { return slices.Contains(first.get(), "b") })
	stop()

	// Another store, so that only the committed offset can be why a does not
	// come again.
	var second journal
	start(t, cluster, newHandler(func(_ context.Context, r *kgo.Record) error {
		second.add(r)
		return nil
	}))
	waitFor(t, "c handled", func() bool { return slices.Contains(second.get(), "c") })
	if got, want := second.get(), []string{"b", "c"}; !slices.Equal(got, want) {
		t.Errorf("after the restart %v, want %v", got, want)
	}
}

func TestHandlerPoison(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 1)
	produce(t, cluster, record(0, "bad"), record(0, ""), record(0, "good"))
	var tries, dead, good journal
	h := newHandler(func(_ context.Context, r *kgo.Record) error {
		if string(r.Value) == "good" {
			good.add(r)
			return nil
		}
		tries.add(r)
		return errHandler
	})
	h.MaxDeliveries = 2
	h.DeadLetter = func(_ context.Context, r *kgo.Record, res consumer.Result) error {
		if !errors.Is(res.Err, consumer.ErrPoison) {
			t.Errorf("dead because of %v", res.Err)
		}
		if dead.add(r) == 1 && string(r.Value) == "bad" {
			return errHandler // the letter is lost: the record must not be passed over
		}
		return nil
	}
	start(t, cluster, h)
	waitFor(t, "the good one handled", func() bool { return len(good.get()) == 1 })
	if got, want := dead.get(), []string{"bad", "bad", ""}; !slices.Equal(got, want) {
		t.Errorf("dead letters %q, want %q", got, want)
	}
	if n := len(tries.get()); n != 2 {
		t.Errorf("%d tries, want 2", n)
	}
}

// Members come and go: partitions move, and no event is handled twice or lost.
func TestHandlerRebalance(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 4)
	const each = 300
	var effects journal
	shared := &consumer.Lease{Store: memstore.New()}
	member := func() func() {
		h := newHandler(func(_ context.Context, r *kgo.Record) error {
			effects.add(r)
			return nil
		})
		h.Consumer = shared
		return start(t, cluster, h)
	}
	send := func(round int) {
		var rs []*kgo.Record
		for p := range int32(4) {
			for i := range each {
				rs = append(rs, record(p, fmt.Sprintf("%d-%d-%d", round, p, i)))
			}
		}
		produce(t, cluster, rs...)
	}
	send(1)
	stopFirst := member()
	waitFor(t, "first events", func() bool { return len(effects.get()) > each })
	member()
	send(2)
	waitFor(t, "second events", func() bool { return len(effects.get()) > 5*each })
	stopFirst()
	send(3)
	waitFor(t, "all events", func() bool { return len(effects.get()) >= 3*4*each })
	ids := effects.get()
	slices.Sort(ids)
	if n := len(slices.Compact(ids)); n != 3*4*each || len(effects.get()) != n {
		t.Errorf("%d effects of %d events, want %d", len(effects.get()), n, 3*4*each)
	}
}

// More records than are held in memory at once.
func TestHandlerPausesAndResumes(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 1)
	const n = 3500
	rs := make([]*kgo.Record, n)
	for i := range rs {
		rs[i] = record(0, fmt.Sprint(i))
	}
	produce(t, cluster, rs...)
	var mu sync.Mutex
	next, release := 0, make(chan struct{})
	h := newHandler(func(_ context.Context, r *kgo.Record) error {
		<-release
		mu.Lock()
		defer mu.Unlock()
		if string(r.Value) != fmt.Sprint(next) {
			t.Errorf("record %s where %d was due", r.Value, next)
		}
		next++
		return nil
	})
	start(t, cluster, h)
	time.AfterFunc(300*time.Millisecond, func() { close(release) }) // the queue fills meanwhile
	waitFor(t, "all records", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return next == n
	})
}

func TestIDs(t *testing.T) {
	t.Parallel()
	r := &kgo.Record{Topic: "t", Partition: 2, Offset: 7, Headers: []kgo.RecordHeader{
		{Key: "ce_source", Value: []byte("/orders")}, {Key: "ce_id", Value: []byte("1")},
	}}
	if id, err := kafkabroker.CloudEventsID(r); id != consumer.ID("/orders", "1") || err != nil {
		t.Errorf("CloudEventsID: %q, %v", id, err)
	}
	if id, err := kafkabroker.Offset(r); id != "t/2/7" || err != nil {
		t.Errorf("Offset: %q, %v", id, err)
	}
	if _, err := kafkabroker.HeaderID("id")(r); !errors.Is(err, consumer.ErrNoID) {
		t.Errorf("HeaderID: %v", err)
	}
}

func TestHandlerConfig(t *testing.T) {
	t.Parallel()
	full := func() *kafkabroker.Handler {
		return newHandler(func(context.Context, *kgo.Record) error { return nil })
	}
	for name, edit := range map[string]func(*kafkabroker.Handler){
		"no consumer":         func(h *kafkabroker.Handler) { h.Consumer = nil },
		"no handler":          func(h *kafkabroker.Handler) { h.Handle = nil },
		"no id":               func(h *kafkabroker.Handler) { h.ID = nil },
		"negative deliveries": func(h *kafkabroker.Handler) { h.MaxDeliveries = -1 },
	} {
		h := full()
		edit(h)
		if err := h.Run(t.Context()); !errors.Is(err, consumer.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := full().Run(t.Context(), kgo.ConsumeTopics(topic)); err == nil {
		t.Error("a client without a group was accepted")
	}
}
