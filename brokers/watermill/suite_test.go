package watermillbroker_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	watermillbroker "github.com/effectonce/idempotency/brokers/watermill"
	"github.com/effectonce/idempotency/consumer"
	"github.com/effectonce/idempotency/dedup/memstore"
)

// Watermill's own suite, over a subscriber of ours.
func TestWatermillSuite(t *testing.T) {
	tests.TestPubSub(t,
		tests.Features{
			ExactlyOnceDelivery:   true,
			RequireSingleInstance: true,
		},
		func(*testing.T) (message.Publisher, message.Subscriber) {
			inner := gochannel.NewGoChannel(gochannel.Config{
				OutputChannelBuffer: 10000, Persistent: true,
			}, watermill.NopLogger{})
			store := memstore.New()
			return inner, &watermillbroker.Subscriber{
				Inner: inner,
				// GoChannel gives every message to every subscription.
				Consumer: func(string) consumer.Consumer {
					return &consumer.Lease{Store: store, Group: watermill.NewUUID()}
				},
				CloseTimeout: 100 * time.Millisecond,
			}
		},
		nil,
	)
}
