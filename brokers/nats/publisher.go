package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/effectonce/idempotency/outbox"
)

// Publisher publishes the messages of an outbox to JetStream: the topic is the
// subject, and the id the header Nats-Msg-Id, by which the stream drops a message
// that it had within its duplicate window (two minutes unless the stream says
// otherwise). JetStream is required.
//
// Everything that does not tell against the message is outbox.ErrUnreachable: no
// connection, no answer, and no stream that has the subject, as while its leader
// is being elected.
type Publisher struct {
	JetStream jetstream.JetStream

	// Timeout is how long to wait for the stream's acknowledgement (5 s if 0).
	Timeout time.Duration
}

var _ outbox.Publisher = (*Publisher)(nil)

// apiUnavailable is the code of JetStream's errors that are about the cluster,
// such as having no leader.
const apiUnavailable = 503

// Publish implements outbox.Publisher. The messages are on their way together;
// it returns when all are acknowledged, or Timeout has passed.
func (p *Publisher) Publish(ctx context.Context, msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	switch {
	case p.JetStream == nil:
		return fill(errs, errors.New("natsbroker: JetStream is nil"))
	case p.Timeout < 0:
		return fill(errs, errors.New("natsbroker: Timeout is negative"))
	case !p.JetStream.Conn().IsConnected():
		// While it reconnects the client would keep the messages and send them
		// later, when they may have been published by other means.
		return fill(errs, fmt.Errorf("natsbroker: %w: %w", outbox.ErrUnreachable, nats.ErrDisconnected))
	}
	acks := make([]jetstream.PubAckFuture, len(msgs))
	for i, m := range msgs {
		msg := &nats.Msg{Subject: m.Topic, Data: m.Payload, Header: make(nats.Header, len(m.Header)+1)}
		for k, v := range m.Header {
			msg.Header[k] = []string{v} // as it is: Set would change its case
		}
		var err error
		if acks[i], err = p.JetStream.PublishMsgAsync(msg, jetstream.WithMsgID(m.ID)); err != nil {
			errs[i] = classify(err)
		}
	}
	timeout := p.Timeout
	if timeout == 0 {
		timeout = 5 * time.Second
	}
	t := time.NewTimer(timeout)
	defer t.Stop()
	expired := false
	for i, ack := range acks {
		if ack == nil {
			continue
		}
		if expired { // those that were answered in time count all the same
			select {
			case <-ack.Ok():
			case err := <-ack.Err():
				errs[i] = classify(err)
			default:
				errs[i] = classify(jetstream.ErrAsyncPublishTimeout)
			}
			continue
		}
		select {
		case <-ack.Ok(): // "duplicate" is as good
		case err := <-ack.Err():
			errs[i] = classify(err)
		case <-t.C:
			expired = true
			errs[i] = classify(jetstream.ErrAsyncPublishTimeout)
		}
	}
	return errs
}

func fill(errs []error, err error) []error {
	for i := range errs {
		errs[i] = err
	}
	return errs
}

func classify(err error) error {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, jetstream.ErrStreamMessageExceedsMaximum):
		return fmt.Errorf("natsbroker: %w: %w", outbox.ErrPermanent, err)
	case errors.As(err, &api) && api.Code != apiUnavailable:
		return fmt.Errorf("natsbroker: %w", err)
	}
	return fmt.Errorf("natsbroker: %w: %w", outbox.ErrUnreachable, err)
}
