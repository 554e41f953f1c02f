package rabbitbroker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/effectonce/idempotency/outbox"
)

// ErrUnroutable is for a message that no queue takes: the exchange has no
// binding for its topic. It counts as a failed attempt.
var ErrUnroutable = errors.New("rabbitbroker: no queue takes the message")

// Publisher publishes the messages of an outbox to RabbitMQ: the topic is the
// routing key, and the id the property message-id. A message is published when
// the broker has confirmed it, which for a durable queue means that it is on
// disk. RabbitMQ deduplicates nothing, so consumers must, by the message-id.
//
// It is safe for concurrent use, but its calls wait for each other: use one
// Publisher for each relay. Close it when the relay has stopped.
type Publisher struct {
	// Dial opens a connection; required. It is called again when the
	// connection is lost. For one: amqp.Dial with an URL.
	Dial func() (*amqp.Connection, error)

	// Exchange is where to; "" is the default exchange, in which a topic is a
	// queue's name.
	Exchange string

	// ContentType of the messages; "" for none.
	ContentType string

	// Timeout is how long to wait for the broker's confirmations (30 s if 0).
	Timeout time.Duration

	mu      sync.Mutex
	conn    *amqp.Connection
	ch      *amqp.Channel
	returns chan amqp.Return
	closed  chan *amqp.Error
}

var _ outbox.Publisher = (*Publisher)(nil)

// maxInFlight bounds the messages that wait for their confirmation, and so those
// that can be returned at once.
const maxInFlight = 1000

// Publish implements outbox.Publisher.
func (p *Publisher) Publish(_ context.Context, msgs []outbox.Message) []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	errs := make([]error, 0, len(msgs))
	for len(errs) < len(msgs) {
		n := min(len(msgs)-len(errs), maxInFlight)
		errs = append(errs, p.publish(msgs[len(errs):len(errs)+n])...)
	}
	return errs
}

func (p *Publisher) publish(msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	if err := p.open(); err != nil {
		for i := range errs {
			errs[i] = unreachable(err)
		}
		return errs
	}
	timeout := p.Timeout
	if timeout == 0 {
		timeout = 30 * time.Second
	}
	// Not the caller's: a message that is on its way is waited for.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	confirms := make([]*amqp.DeferredConfirmation, len(msgs))
	for i, m := range msgs {
		headers := make(amqp.Table, len(m.Header))
		for k, v := range m.Header {
			headers[k] = v
		}
		confirms[i], errs[i] = p.ch.PublishWithDeferredConfirm(p.Exchange, m.Topic, true, false, amqp.Publishing{
			MessageId: m.ID, Headers: headers, ContentType: p.ContentType, DeliveryMode: amqp.Persistent, Timestamp: m.Created, Body: m.Payload,
		})
		if errs[i] != nil {
			errs[i] = unreachable(errs[i])
		}
	}
	var unconfirmed []int
	for i, c := range confirms {
		if c == nil {
			continue
		}
		acked, err := c.WaitContext(ctx)
		switch {
		case err != nil:
			errs[i] = unreachable(err)
		case !acked:
			unconfirmed = append(unconfirmed, i)
		}
	}
	p.returned(msgs, errs)
	if len(unconfirmed) > 0 {
		p.refused(msgs, errs, unconfirmed)
	}
	if ctx.Err() != nil {
		p.shut() // what is confirmed later must not be taken for an answer to something else
	}
	return errs
}

// returned gives their error to the messages that came back. A message comes
// back before its confirmation.
func (p *Publisher) returned(msgs []outbox.Message, errs []error) {
	back := map[string]error{}
	for len(p.returns) > 0 {
		r, ok := <-p.returns
		if !ok {
			break
		}
		back[r.MessageId] = fmt.Errorf("%w: %s (%d)", ErrUnroutable, r.ReplyText, r.ReplyCode)
	}
	for i, m := range msgs {
		if err, ok := back[m.ID]; ok && errs[i] == nil {
			errs[i] = err
		}
	}
}

// refused gives their error to messages without a confirmation. Either the
// broker said no to each, or it closed the channel: over one of them, it does not
// say over which, so they are published again one by one.
func (p *Publisher) refused(msgs []outbox.Message, errs []error, at []int) {
	if !p.ch.IsClosed() && !p.conn.IsClosed() {
		for _, i := range at {
			errs[i] = errors.New("rabbitbroker: the broker did not accept the message")
		}
		return
	}
	var reason error = amqp.ErrClosed
	fault := false
	select {
	case e := <-p.closed:
		if e != nil {
			reason = e
			fault = e.Server && !p.conn.IsClosed() && e.Code != amqp.NotFound && e.Code != amqp.AccessRefused
		}
	default:
	}
	p.shut()
	for _, i := range at {
		switch {
		case !fault:
			errs[i] = unreachable(reason)
		case len(msgs) > 1:
			errs[i] = p.publish(msgs[i : i+1])[0]
		default:
			errs[i] = fmt.Errorf("rabbitbroker: %w", reason)
		}
	}
}

func unreachable(err error) error {
	return fmt.Errorf("rabbitbroker: %w: %w", outbox.ErrUnreachable, err)
}

// open makes sure that there is a channel in confirm mode.
func (p *Publisher) open() (err error) {
	if p.Dial == nil {
		return errors.New("rabbitbroker: Dial is nil")
	}
	if p.ch != nil && !p.ch.IsClosed() && !p.conn.IsClosed() {
		return nil
	}
	p.ch = nil
	if p.conn == nil || p.conn.IsClosed() {
		if p.conn, err = p.Dial(); err != nil {
			p.conn = nil
			return err
		}
	}
	ch, err := p.conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Confirm(false); err != nil {
		_ = ch.Close()
		return err
	}
	p.ch = ch
	// So large that the connection's reader never waits for us.
	p.returns = ch.NotifyReturn(make(chan amqp.Return, maxInFlight))
	p.closed = ch.NotifyClose(make(chan *amqp.Error, 1))
	return nil
}

// shut gives the channel up.
func (p *Publisher) shut() {
	if p.ch != nil {
		_ = p.ch.Close()
		p.ch = nil
	}
}

// Close closes the connection. Publish opens it again.
func (p *Publisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut()
	if p.conn == nil || p.conn.IsClosed() {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	if err != nil {
		return fmt.Errorf("rabbitbroker: close: %w", err)
	}
	return nil
}
