package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/idempotency/outbox"
)

// IDHeader is the record header that has a message's id; see [HeaderID].
const IDHeader = "message-id"

// Publisher publishes the messages of an outbox to Kafka: the topic is the
// topic, the key the record's key, and the id the header [IDHeader]. Kafka itself
// drops only what one client sends twice, so consumers must deduplicate by the
// header.
type Publisher struct {
	client *kgo.Client
}

var _ outbox.Publisher = (*Publisher)(nil)

// NewPublisher returns a publisher on client, which stays the caller's to close.
// The client must have kgo.RecordDeliveryTimeout: it is what bounds Publish. It
// must not have kgo.AllowIdempotentProduceCancellation, by which records get lost
// unseen, nor acknowledge less than kgo.AllISRAcks.
func NewPublisher(client *kgo.Client) (*Publisher, error) {
	if client == nil {
		return nil, errors.New("kafkabroker: the client is nil")
	}
	if d, _ := client.OptValue(kgo.RecordDeliveryTimeout).(time.Duration); d <= 0 {
		return nil, errors.New("kafkabroker: the client has no RecordDeliveryTimeout, without which it would wait for a broker for ever")
	}
	if cancel, _ := client.OptValue(kgo.AllowIdempotentProduceCancellation).(bool); cancel {
		return nil, errors.New("kafkabroker: the client has AllowIdempotentProduceCancellation, by which records get lost")
	}
	if acks, ok := client.OptValue(kgo.RequiredAcks).(kgo.Acks); ok && acks != kgo.AllISRAcks() {
		return nil, errors.New("kafkabroker: the client's RequiredAcks is not AllISRAcks")
	}
	return &Publisher{client}, nil
}

// Publish implements outbox.Publisher. It waits for each record's outcome
// whatever becomes of ctx: of a record that was given up while it was on its way,
// nobody could say whether it will be published yet.
func (p *Publisher) Publish(ctx context.Context, msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	ctx = context.WithoutCancel(ctx)
	var wg sync.WaitGroup
	wg.Add(len(msgs))
	for i, m := range msgs {
		r := &kgo.Record{Topic: m.Topic, Value: m.Payload, Headers: make([]kgo.RecordHeader, 0, len(m.Header)+1)}
		if m.Key != "" {
			r.Key = []byte(m.Key)
		}
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: IDHeader, Value: []byte(m.ID)})
		for k, v := range m.Header {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: k, Value: []byte(v)})
		}
		p.client.Produce(ctx, r, func(_ *kgo.Record, err error) {
			errs[i] = classify(err)
			wg.Done()
		})
	}
	wg.Wait()
	return errs
}

func classify(err error) error {
	var answer *kerr.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge),
		errors.Is(err, kerr.InvalidTopicException), errors.Is(err, kerr.InvalidRecord):
		return fmt.Errorf("kafkabroker: %w: %w", outbox.ErrPermanent, err)
	case errors.As(err, &answer) && !answer.Retriable:
		return fmt.Errorf("kafkabroker: %w", err)
	}
	// No connection, no answer, no leader, no such topic as yet.
	return fmt.Errorf("kafkabroker: %w: %w", outbox.ErrUnreachable, err)
}
