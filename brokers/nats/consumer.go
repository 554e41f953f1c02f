package natsbroker

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/effectonce/idempotency/consumer"
)

// Handler handles each message of a JetStream consumer once. Consumer and Handle
// are required. The JetStream consumer must have explicit acknowledgement
// (jetstream.AckExplicitPolicy), and no MaxDeliver: messages that reached it
// would just not come again.
type Handler struct {
	Consumer consumer.Consumer

	// Handle does the work of one message; see consumer.Handler. msg has all
	// headers that were published, trace context included. The acknowledgement
	// is not its affair.
	Handle func(ctx context.Context, msg jetstream.Msg) error

	// ID finds the event's id ([MsgID] if nil).
	ID func(msg jetstream.Msg) (string, error)

	// MaxDeliveries is after how many deliveries a message is poison (0:
	// never); see consumer.Limit for what it counts.
	MaxDeliveries int

	// DeadLetter keeps a poison message, and returns nil once that is durable;
	// the message is then terminated. Without it a poison message goes on
	// being delivered, once a minute at most.
	DeadLetter func(ctx context.Context, msg jetstream.Msg, r consumer.Result) error

	// KeepAlive is how often the server is told that a message is still being
	// worked on (0: never). A third of the consumer's AckWait is a good choice
	// for handlers that may take longer than that.
	KeepAlive time.Duration

	// Logger gets a line for each message that was not done; nil for none.
	Logger *slog.Logger
}

// MsgID returns the message's header Nats-Msg-Id.
func MsgID(msg jetstream.Msg) (string, error) { return consumer.NATS(msg.Headers()) }

// CloudEventsID returns the id of a CloudEvent in binary mode. Source: NATS
// protocol binding for CloudEvents 1.0.2 §3.1.
func CloudEventsID(msg jetstream.Msg) (string, error) {
	h := msg.Headers()
	return consumer.CloudEvent(h.Get("ce-source"), h.Get("ce-id"))
}

// StreamSequence returns the message's stream and its place there. That is the
// last resort: it tells a message delivered twice, but not one that was
// published twice, and the places begin anew when a stream is made anew.
func StreamSequence(msg jetstream.Msg) (string, error) {
	m, err := msg.Metadata()
	if err != nil {
		return "", fmt.Errorf("%w: %w", consumer.ErrNoID, err)
	}
	return fmt.Sprintf("%s/%s/%d", m.Domain, m.Stream, m.Sequence.Stream), nil
}

// Func is h as the handler of jetstream.Consumer.Consume. Handlers get contexts
// made from ctx. Settings that can't work are reported here.
func (h *Handler) Func(ctx context.Context) (jetstream.MessageHandler, error) {
	switch {
	case h.Consumer == nil:
		return nil, fmt.Errorf("natsbroker: %w: Consumer is nil", consumer.ErrConfig)
	case h.Handle == nil:
		return nil, fmt.Errorf("natsbroker: %w: Handle is nil", consumer.ErrConfig)
	case h.KeepAlive < 0 || h.MaxDeliveries < 0:
		return nil, fmt.Errorf("natsbroker: %w: neither KeepAlive nor MaxDeliveries may be negative", consumer.ErrConfig)
	}
	return func(msg jetstream.Msg) { h.Deliver(ctx, msg) }, nil
}

// Deliver handles one message and settles it with the server. It is for those
// who fetch messages themselves; h must be one that Func accepts.
func (h *Handler) Deliver(ctx context.Context, msg jetstream.Msg) consumer.Result {
	deliveries := 0
	if m, err := msg.Metadata(); err == nil {
		deliveries = int(min(m.NumDelivered, 1<<30))
	}
	id := h.ID
	if id == nil {
		id = MsgID
	}
	d := consumer.Delivery{
		ID:            func() (string, error) { return id(msg) },
		Handle:        func(ctx context.Context) error { return h.Handle(ctx, msg) },
		Deliveries:    deliveries,
		MaxDeliveries: h.MaxDeliveries,
	}
	if h.DeadLetter != nil {
		d.DeadLetter = func(ctx context.Context, r consumer.Result) error { return h.DeadLetter(ctx, msg, r) }
	}
	stop := h.keepAlive(msg)
	r := consumer.Deliver(ctx, h.Consumer, d)
	stop()

	// A settlement that is lost brings the message back, and then it is found
	// to be done.
	var err error
	switch r.Status {
	case consumer.Done:
		err = msg.Ack()
	case consumer.Poison:
		err = msg.Term()
	default:
		err = msg.NakWithDelay(r.Delay(deliveries))
	}
	if h.Logger != nil && (r.Err != nil || err != nil) {
		h.Logger.LogAttrs(ctx, slog.LevelWarn, "natsbroker: message "+r.Status.String(),
			slog.String("subject", msg.Subject()), slog.Int("deliveries", deliveries),
			slog.Any("err", r.Err), slog.Any("settle_err", err))
	}
	return r
}

// keepAlive tells the server about the message until stop is called.
func (h *Handler) keepAlive(msg jetstream.Msg) (stop func()) {
	if h.KeepAlive <= 0 {
		return func() {}
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(h.KeepAlive)
		defer t.Stop()
		for {
			select {
			case <-quit:
				return
			case <-t.C:
				_ = msg.InProgress() // the next one comes soon
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}
