package consumer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
)

// IDFunc finds the event's id in a webhook's headers and body. An error wraps
// [ErrNoID] where the event carries none, or more than one.
//
// Only an id that the sender gave the event will do. A checksum of the payload
// takes two equal events (a customer who buys the same thing twice) for one.
type IDFunc func(header http.Header, body []byte) (string, error)

// StandardWebhooksID reads the header webhook-id, which stays the same when a
// message is sent again. Source: Standard Webhooks specification, "Webhook
// headers", https://www.standardwebhooks.com.
func StandardWebhooksID(header http.Header, _ []byte) (string, error) {
	return headerID(header, "Webhook-Id")
}

// GitHubID reads the header X-GitHub-Delivery, which stays the same when a
// delivery is redelivered. Source: GitHub documentation, "Webhook events and
// payloads", "Delivery headers".
func GitHubID(header http.Header, _ []byte) (string, error) {
	return headerID(header, "X-GitHub-Delivery")
}

// StripeID reads the field id of Stripe's event object. Source: Stripe
// documentation, "Receive Stripe events in your webhook endpoint", "Handle
// duplicate events". Stripe may also make two events of one happening; those
// have an object and a type in common, and differ in their id.
func StripeID(_ http.Header, body []byte) (string, error) {
	fields, err := topLevel(body, "id")
	if err != nil {
		return "", err
	}
	return fields[0], nil
}

// CloudEventsID reads source and id of a CloudEvent, which together name it, in
// the HTTP binding's binary mode (headers ce-source and ce-id) and structured
// mode (Content-Type application/cloudevents+json). A batch holds several
// events and is refused. Sources: CloudEvents 1.0.2 §3.1.1; HTTP protocol
// binding 1.0.2 §3.1 (percent-encoded values, §3.1.3.2) and §3.2.
func CloudEventsID(header http.Header, body []byte) (string, error) {
	mediaType, _, _ := mime.ParseMediaType(header.Get("Content-Type"))
	switch mediaType {
	case "application/cloudevents+json":
		fields, err := topLevel(body, "source", "id")
		if err != nil {
			return "", err
		}
		return CloudEvent(fields[0], fields[1])
	case "application/cloudevents-batch+json":
		return "", fmt.Errorf("%w: a CloudEvents batch has an id for each of its events", ErrNoID)
	}
	var values [2]string
	for i, name := range []string{"Ce-Source", "Ce-Id"} {
		v, err := headerID(header, name)
		if err != nil {
			return "", err
		}
		if values[i], err = url.PathUnescape(v); err != nil {
			return "", fmt.Errorf("%w: header %s: %w", ErrNoID, name, err)
		}
	}
	return CloudEvent(values[0], values[1])
}

// CloudEvent returns the event id of a CloudEvent, for bindings other than
// HTTP: Kafka's headers ce_source and ce_id, NATS's ce-source and ce-id, AMQP's
// application properties cloudEvents:source and cloudEvents:id.
func CloudEvent(source, id string) (string, error) {
	if source == "" || id == "" {
		return "", fmt.Errorf("%w: a CloudEvent needs a source and an id", ErrNoID)
	}
	return ID(source, id), nil
}

// SQS returns the event id of an Amazon SQS message: its
// MessageDeduplicationId, by which the producer names the message in a FIFO
// queue, else its MessageId. Source: Amazon SQS Developer Guide, "Using the
// message deduplication ID".
//
// With content-based deduplication switched on, SQS sets the
// MessageDeduplicationId to a hash of the body, and two equal events are one.
// Pass "" for it then.
func SQS(deduplicationID, messageID string) (string, error) {
	switch {
	case deduplicationID != "":
		return deduplicationID, nil
	case messageID != "":
		return messageID, nil
	}
	return "", fmt.Errorf("%w: neither MessageDeduplicationId nor MessageId", ErrNoID)
}

// NATS returns the header Nats-Msg-Id, by which JetStream itself drops a
// message that is published twice within its window. NATS's header names are
// case-sensitive, and only this spelling is it.
func NATS(header map[string][]string) (string, error) {
	return single("Nats-Msg-Id", header["Nats-Msg-Id"])
}

// AMQP returns the basic property message-id of AMQP 0-9-1. There is nothing to
// fall back on: a delivery tag is another one at each delivery.
func AMQP(messageID string) (string, error) {
	if messageID == "" {
		return "", fmt.Errorf("%w: message-id is not set", ErrNoID)
	}
	return messageID, nil
}

// Kafka returns the record's place as its event id. That is the last resort: it
// tells a record delivered twice, but not one that its producer sent twice, and
// the places begin anew when a topic is made anew. Prefer an id in a header.
func Kafka(topic string, partition int32, offset int64) string {
	// A topic's name holds no slash.
	return topic + "/" + strconv.Itoa(int(partition)) + "/" + strconv.FormatInt(offset, 10)
}

func headerID(h http.Header, name string) (string, error) {
	return single(name, h.Values(name))
}

func single(name string, values []string) (string, error) {
	if len(values) == 0 || values[0] == "" {
		return "", fmt.Errorf("%w: header %s is missing", ErrNoID, name)
	}
	for _, v := range values[1:] {
		if v != values[0] {
			return "", fmt.Errorf("%w: header %s is there twice, with different values", ErrNoID, name)
		}
	}
	return values[0], nil
}

// topLevel returns the named string fields of a JSON object. Unlike
// json.Unmarshal it takes no field whose name differs in case, and none that is
// there twice, since then two readers of one event may see two ids.
func topLevel(body []byte, names ...string) ([]string, error) {
	values := make([]string, len(names))
	seen := make([]bool, len(names))
	dec := json.NewDecoder(bytes.NewReader(body))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("%w: the body is not a JSON object", ErrNoID)
	}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNoID, err)
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNoID, err)
		}
		for i, name := range names {
			if t != name {
				continue
			}
			if seen[i] {
				return nil, fmt.Errorf("%w: the body has two fields %q", ErrNoID, name)
			}
			seen[i] = true
			if err := json.Unmarshal(raw, &values[i]); err != nil {
				return nil, fmt.Errorf("%w: field %q is not a string", ErrNoID, name)
			}
		}
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoID, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: the body goes on after the JSON object", ErrNoID)
	}
	for i, name := range names {
		if values[i] == "" {
			return nil, fmt.Errorf("%w: field %q is missing or empty", ErrNoID, name)
		}
	}
	return values, nil
}
