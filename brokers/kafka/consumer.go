package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/idempotency/consumer"
)

// Handler handles each record of the topics of a consumer group once. Consumer,
// ID and Handle are required.
//
// Kafka knows no redelivery of a single record. One that is busy or failed is
// tried again in place, after consumer.Result.Delay, and the records behind it
// in its partition wait. Other partitions go on.
type Handler struct {
	Consumer consumer.Consumer

	// Handle does the work of one record; see consumer.Handler. r has all
	// headers that were produced, trace context included.
	Handle func(ctx context.Context, r *kgo.Record) error

	// ID finds the event's id, such as [HeaderID] or [Offset].
	ID func(r *kgo.Record) (string, error)

	// MaxDeliveries is after how many failed tries in a row a record is poison
	// (0: never). They are counted in memory, and so anew after a crash;
	// consumer.Lease has a count that lasts.
	MaxDeliveries int

	// DeadLetter keeps a poison record, and returns nil once that is durable;
	// the partition then goes on behind it. Without it a poison record keeps
	// its partition waiting.
	DeadLetter func(ctx context.Context, r *kgo.Record, res consumer.Result) error

	// Logger gets a line for each record that was not done; nil for none.
	Logger *slog.Logger
}

// HeaderID returns an ID that reads the record's header of that name.
func HeaderID(name string) func(r *kgo.Record) (string, error) {
	return func(r *kgo.Record) (string, error) {
		id := header(r, name)
		if id == "" {
			return "", fmt.Errorf("%w: header %s is missing", consumer.ErrNoID, name)
		}
		return id, nil
	}
}

// CloudEventsID returns the id of a CloudEvent in binary mode. Source: Kafka
// protocol binding for CloudEvents 1.0.2 §3.2.
func CloudEventsID(r *kgo.Record) (string, error) {
	return consumer.CloudEvent(header(r, "ce_source"), header(r, "ce_id"))
}

// Offset returns the record's place; see consumer.Kafka for what that can't do.
func Offset(r *kgo.Record) (string, error) {
	return consumer.Kafka(r.Topic, r.Partition, r.Offset), nil
}

func header(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

const (
	// A partition with so many records waiting is not fetched from until half
	// of them are done.
	highWater = 1000

	pollRecords   = 500
	commitTimeout = 10 * time.Second
)

// Run makes a client with opts, which name the brokers, the consumer group and
// the topics, and handles records until ctx ends. It then lets the running
// handlers end, commits, leaves the group, and returns ctx's error. Any other
// error is that of the client's settings.
//
// It sets the options AutoCommitMarks, BlockRebalanceOnPoll, OnPartitionsRevoked
// and OnPartitionsLost itself.
func (h *Handler) Run(ctx context.Context, opts ...kgo.Opt) error {
	switch {
	case h.Consumer == nil:
		return fmt.Errorf("kafkabroker: %w: Consumer is nil", consumer.ErrConfig)
	case h.Handle == nil:
		return fmt.Errorf("kafkabroker: %w: Handle is nil", consumer.ErrConfig)
	case h.ID == nil:
		return fmt.Errorf("kafkabroker: %w: ID is nil", consumer.ErrConfig)
	case h.MaxDeliveries < 0:
		return fmt.Errorf("kafkabroker: %w: MaxDeliveries must not be negative", consumer.ErrConfig)
	}
	g := &group{h: h, ctx: ctx, workers: map[partition]*worker{}}
	client, err := kgo.NewClient(append(opts[:len(opts):len(opts)],
		kgo.AutoCommitMarks(),
		// Rebalances wait while records are on their way to their workers, so
		// that none reaches a partition that was taken away.
		kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsRevoked(g.revoked),
		kgo.OnPartitionsLost(g.lost),
	)...)
	if err != nil {
		return fmt.Errorf("kafkabroker: %w", err)
	}
	defer client.CloseAllowingRebalance()
	g.client = client
	return g.run()
}

func (g *group) run() error {
	defer g.end()
	for {
		fetches := g.client.PollRecords(g.ctx, pollRecords)
		if err := g.ctx.Err(); err != nil {
			return err // what was fetched is not committed and comes again
		}
		for _, e := range fetches.Errors() {
			if errors.Is(e.Err, kgo.ErrClientClosed) {
				return fmt.Errorf("kafkabroker: %w", e.Err)
			}
			g.h.log(g.ctx, "fetch failed", e.Topic, e.Partition, -1, e.Err)
		}
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			if len(p.Records) > 0 {
				g.worker(partition{p.Topic, p.Partition}).push(p.Records)
			}
		})
		g.client.AllowRebalance()
	}
}

// handle handles one record until it is settled. It returns false if ctx ended
// before that.
func (h *Handler) handle(ctx context.Context, rec *kgo.Record) bool {
	for failures := 1; ; {
		d := consumer.Delivery{
			ID:            func() (string, error) { return h.ID(rec) },
			Handle:        func(ctx context.Context) error { return h.Handle(ctx, rec) },
			Deliveries:    failures,
			MaxDeliveries: h.MaxDeliveries,
		}
		if h.DeadLetter != nil {
			d.DeadLetter = func(ctx context.Context, r consumer.Result) error { return h.DeadLetter(ctx, rec, r) }
		}
		r := consumer.Deliver(ctx, h.Consumer, d)
		if r.Err != nil {
			h.log(ctx, "record "+r.Status.String(), rec.Topic, rec.Partition, rec.Offset, r.Err)
		}
		if r.Status == consumer.Done || r.Status == consumer.Poison {
			return true
		}
		wait := r.Delay(failures)
		if r.Status == consumer.Failed {
			failures++
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return false
		case <-t.C:
		}
	}
}

func (h *Handler) log(ctx context.Context, msg, topic string, partition int32, offset int64, err error) {
	if h.Logger == nil {
		return
	}
	h.Logger.LogAttrs(ctx, slog.LevelWarn, "kafkabroker: "+msg, slog.String("topic", topic),
		slog.Int("partition", int(partition)), slog.Int64("offset", offset), slog.Any("err", err))
}
