package rabbitbroker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/effectonce/idempotency/consumer"
)

// Handler handles each message of a queue once. Consumer and Handle are
// required. The deliveries must be such that want acknowledgement (autoAck
// false).
//
// RabbitMQ puts a requeued message back at once. So that it does not come back
// at once, a message that is to be delivered again is held for
// consumer.Result.Delay before it is requeued. Meanwhile its worker waits: let
// prefetch and Workers have room for that.
type Handler struct {
	Consumer consumer.Consumer

	// Handle does the work of one message; see consumer.Handler. d has all
	// headers that were published, trace context included. The acknowledgement
	// is not its affair.
	Handle func(ctx context.Context, d amqp.Delivery) error

	// ID finds the event's id ([MessageID] if nil).
	ID func(d amqp.Delivery) (string, error)

	// MaxDeliveries is after how many deliveries a message is poison (0:
	// never); see consumer.Limit for what it counts. Only quorum queues count
	// deliveries; in others a message never reaches it, and consumer.Lease has
	// a count of its own.
	MaxDeliveries int

	// DeadLetter keeps a poison message, and returns nil once that is durable;
	// the message is then acknowledged. Without it, and without
	// DeadLetterExchange, a poison message goes on being delivered.
	DeadLetter func(ctx context.Context, d amqp.Delivery, r consumer.Result) error

	// DeadLetterExchange says that the queue has one, so that a poison message
	// is rejected and RabbitMQ moves it there. It must be true: RabbitMQ drops
	// what is rejected from a queue that has none. DeadLetter goes before it.
	DeadLetterExchange bool

	// Workers is how many messages Serve handles at the same time (1 if 0).
	// With more than one the queue's order is not kept.
	Workers int

	// Logger gets a line for each message that was not done; nil for none.
	Logger *slog.Logger
}

// MessageID returns the message's property message-id.
func MessageID(d amqp.Delivery) (string, error) { return consumer.AMQP(d.MessageId) }

// CloudEventsID returns the id of a CloudEvent in binary mode. Source: AMQP
// protocol binding for CloudEvents 1.0.2 §3.1.3.1, which names the application
// properties with a colon or an underscore.
func CloudEventsID(d amqp.Delivery) (string, error) {
	get := func(name string) string {
		for _, prefix := range []string{"cloudEvents:", "cloudEvents_"} {
			if s, ok := d.Headers[prefix+name].(string); ok {
				return s
			}
		}
		return ""
	}
	return consumer.CloudEvent(get("source"), get("id"))
}

// ErrClosed: the channel of deliveries was closed, as happens when the
// connection is lost. Consume anew; what was not settled is delivered again.
var ErrClosed = errors.New("rabbitbroker: the deliveries have ended")

// Serve handles deliveries until ctx ends, and returns its error, or until the
// channel is closed, and returns [ErrClosed]. Either way it returns once the
// handlers that were running have ended.
func (h *Handler) Serve(ctx context.Context, deliveries <-chan amqp.Delivery) error {
	if err := h.check(); err != nil {
		return err
	}
	var workers sync.WaitGroup
	for range max(h.Workers, 1) {
		workers.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case d, ok := <-deliveries:
					if !ok {
						return
					}
					h.Deliver(ctx, d)
				}
			}
		})
	}
	workers.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	return ErrClosed
}

func (h *Handler) check() error {
	switch {
	case h.Consumer == nil:
		return fmt.Errorf("rabbitbroker: %w: Consumer is nil", consumer.ErrConfig)
	case h.Handle == nil:
		return fmt.Errorf("rabbitbroker: %w: Handle is nil", consumer.ErrConfig)
	case h.Workers < 0 || h.MaxDeliveries < 0:
		return fmt.Errorf("rabbitbroker: %w: neither Workers nor MaxDeliveries may be negative", consumer.ErrConfig)
	}
	return nil
}

// Deliver handles one message and settles it. h must be one that Serve accepts.
func (h *Handler) Deliver(ctx context.Context, d amqp.Delivery) consumer.Result {
	id := h.ID
	if id == nil {
		id = MessageID
	}
	deliveries := deliveryCount(d)
	cd := consumer.Delivery{
		ID:            func() (string, error) { return id(d) },
		Handle:        func(ctx context.Context) error { return h.Handle(ctx, d) },
		Deliveries:    deliveries,
		MaxDeliveries: h.MaxDeliveries,
	}
	reject := h.DeadLetter == nil && h.DeadLetterExchange
	switch {
	case h.DeadLetter != nil:
		cd.DeadLetter = func(ctx context.Context, r consumer.Result) error { return h.DeadLetter(ctx, d, r) }
	case reject:
		cd.DeadLetter = func(context.Context, consumer.Result) error { return nil } // below
	}
	r := consumer.Deliver(ctx, h.Consumer, cd)

	// A settlement that is lost brings the message back, and then it is found
	// to be done.
	var err error
	switch {
	case r.Status == consumer.Poison && reject:
		err = d.Reject(false)
	case r.Status == consumer.Done, r.Status == consumer.Poison:
		err = d.Ack(false)
	default:
		hold(ctx, r.Delay(deliveries))
		err = d.Nack(false, true)
	}
	if h.Logger != nil && (r.Err != nil || err != nil) {
		h.Logger.LogAttrs(ctx, slog.LevelWarn, "rabbitbroker: message "+r.Status.String(),
			slog.String("routing_key", d.RoutingKey), slog.Int("deliveries", deliveries),
			slog.Any("err", r.Err), slog.Any("settle_err", err))
	}
	return r
}

// deliveryCount is 0 if the queue does not count. A quorum queue's header
// x-delivery-count says how often the message was delivered before.
func deliveryCount(d amqp.Delivery) int {
	switch n := d.Headers["x-delivery-count"].(type) {
	case int64:
		return int(n) + 1
	case int32:
		return int(n) + 1
	}
	return 0
}

func hold(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
