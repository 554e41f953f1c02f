package outbox_test

import (
	"testing"

	"github.com/effectonce/idempotency/outbox/outboxtest"
)

func TestMemory(t *testing.T) {
	t.Parallel()
	outboxtest.Run(t, func(t *testing.T) outboxtest.Fixture {
		m := &outboxtest.Memory{}
		return outboxtest.Fixture{Store: m, Enqueue: m.Enqueue, Expire: m.Expire}
	})
}
