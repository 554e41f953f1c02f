package consumer_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/effectonce/idempotency/consumer"
)

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

func TestExtractors(t *testing.T) {
	t.Parallel()
	cloud := consumer.ID("/orders", "a b")
	tests := []struct {
		name   string
		id     consumer.IDFunc
		header http.Header
		body   string
		want   string // "" for ErrNoID
	}{
		{"standard webhooks", consumer.StandardWebhooksID, header("webhook-id", "msg_1"), "", "msg_1"},
		{"standard webhooks: missing", consumer.StandardWebhooksID, header(), "", ""},
		{"standard webhooks: same twice", consumer.StandardWebhooksID, header("webhook-id", "a", "webhook-id", "a"), "", "a"},
		{"standard webhooks: two ids", consumer.StandardWebhooksID, header("webhook-id", "a", "webhook-id", "b"), "", ""},
		{"github", consumer.GitHubID, header("X-GitHub-Delivery", "72d3162e"), "", "72d3162e"},
		{"github: missing", consumer.GitHubID, header("X-GitHub-Event", "push"), "", ""},
		{"stripe", consumer.StripeID, nil, `{"object":"event","id":"evt_1","data":{"id":"ch_1"}}`, "evt_1"},
		{"stripe: other case is another field", consumer.StripeID, nil, `{"id":"evt_1","ID":"evt_2"}`, "evt_1"},
		{"stripe: nested only", consumer.StripeID, nil, `{"data":{"id":"ch_1"}}`, ""},
		{"stripe: twice", consumer.StripeID, nil, `{"id":"evt_1","id":"evt_2"}`, ""},
		{"stripe: not a string", consumer.StripeID, nil, `{"id":7}`, ""},
		{"stripe: null", consumer.StripeID, nil, `{"id":null}`, ""},
		{"stripe: not an object", consumer.StripeID, nil, `["id"]`, ""},
		{"stripe: cut off", consumer.StripeID, nil, `{"id":"evt_1"`, ""},
		{"stripe: two objects", consumer.StripeID, nil, `{"id":"evt_1"}{"id":"evt_2"}`, ""},
		{"cloudevents: binary", consumer.CloudEventsID, header("ce-source", "/orders", "ce-id", "a%20b"), "", cloud},
		{"cloudevents: structured", consumer.CloudEventsID, header("Content-Type", "application/cloudevents+json; charset=utf-8"), `{"source":"/orders","id":"a b"}`, cloud},
		{"cloudevents: no source", consumer.CloudEventsID, header("ce-id", "1"), "", ""},
		{"cloudevents: bad encoding", consumer.CloudEventsID, header("ce-source", "/o", "ce-id", "%zz"), "", ""},
		{"cloudevents: batch", consumer.CloudEventsID, header("Content-Type", "application/cloudevents-batch+json", "ce-source", "/o", "ce-id", "1"), `[]`, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := tt.id(tt.header, []byte(tt.body))
			if got != tt.want || (tt.want == "") != errors.Is(err, consumer.ErrNoID) {
				t.Errorf("got %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

func TestBrokerIDs(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		get  func() (string, error)
		want string
	}{
		{"sqs: deduplication id first", func() (string, error) { return consumer.SQS("order-1", "m-1") }, "order-1"},
		{"sqs: else the message's", func() (string, error) { return consumer.SQS("", "m-1") }, "m-1"},
		{"sqs: neither", func() (string, error) { return consumer.SQS("", "") }, ""},
		{"nats", func() (string, error) { return consumer.NATS(map[string][]string{"Nats-Msg-Id": {"n1"}}) }, "n1"},
		{"nats: another spelling", func() (string, error) { return consumer.NATS(map[string][]string{"nats-msg-id": {"n1"}}) }, ""},
		{"amqp", func() (string, error) { return consumer.AMQP("m1") }, "m1"},
		{"amqp: none", func() (string, error) { return consumer.AMQP("") }, ""},
		{"kafka", func() (string, error) { return consumer.Kafka("orders", 3, 42), nil }, "orders/3/42"},
		{"cloudevent: no id", func() (string, error) { return consumer.CloudEvent("/o", "") }, ""},
	}
	for _, tt := range tests {
		got, err := tt.get()
		if got != tt.want || (tt.want == "") != errors.Is(err, consumer.ErrNoID) {
			t.Errorf("%s: got %q, %v; want %q", tt.name, got, err, tt.want)
		}
	}
}

func TestIDKeepsPartsApart(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	ids := map[string][]string{}
	for _, parts := range [][]string{
		{"ab", "c"}, {"a", "bc"}, {"abc"}, {"abc", ""}, {"", "abc"}, {"a", "b", "c"},
		{long}, {long + "y"}, {long, "a"}, {"nul\x00"}, {"nul"}, {"bad\xff"}, {"bad\xfe"},
	} {
		id := consumer.ID(parts...)
		if other, ok := ids[id]; ok {
			t.Errorf("%q and %q have the same id %q", parts, other, id)
		}
		ids[id] = parts
		if len(id) > 255 || !utf8.ValidString(id) || strings.Contains(id, "\x00") {
			t.Errorf("ID(%q) = %q can't be stored", parts, id)
		}
		if again := consumer.ID(id); again != id {
			t.Errorf("ID(ID(%q)) is another id", parts)
		}
	}
	if id := consumer.ID("evt_1"); id != "evt_1" {
		t.Errorf("a plain id became %q", id)
	}
}

func FuzzStripeID(f *testing.F) {
	f.Add([]byte(`{"id":"evt_1"}`))
	f.Add([]byte(`{"x":{"id":"a"},"id":"\u0061"}`))
	f.Add([]byte(`{"id":"a","id":"b"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		id, err := consumer.StripeID(nil, body)
		if (id == "") != errors.Is(err, consumer.ErrNoID) {
			t.Errorf("id %q with error %v", id, err)
		}
	})
}

func FuzzCloudEventsID(f *testing.F) {
	f.Add("/orders", "1", "application/cloudevents+json", []byte(`{"source":"/o","id":"1"}`))
	f.Add("/o%20", "%zz", "", []byte(nil))
	f.Fuzz(func(t *testing.T, source, id, contentType string, body []byte) {
		h := http.Header{"Ce-Source": {source}, "Ce-Id": {id}, "Content-Type": {contentType}}
		got, err := consumer.CloudEventsID(h, body)
		if (got == "") != errors.Is(err, consumer.ErrNoID) {
			t.Errorf("id %q with error %v", got, err)
		}
		if len(got) > 255 {
			t.Errorf("id of %d bytes", len(got))
		}
	})
}
