// Package outbox publishes messages that were written in a business transaction:
// a message is published if, and only if, its transaction committed.
//
//	box := &outbox.Outbox{DB: db, Dialect: outbox.Postgres}
//	err := box.InTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
//		// the business writes, and then
//		return box.Enqueue(ctx, tx, outbox.Message{Topic: "orders", Key: id, Payload: body})
//	})
//
// A [Relay] reads the table and hands the messages to a [Publisher]. What it
// promises:
//
//   - Every committed message is published at least once. It may be more than
//     once after a crash or a lost answer, always with the same ID, which the
//     broker or the consumer deduplicates by.
//   - The messages of one key are published in the order of their sequence
//     numbers, through retries and whatever number of relays. That is the order
//     of the business transactions where the application serialises those on
//     the key, for one by locking the row that the key names.
//   - A broker that can't be reached costs no attempts. A message that the
//     broker refuses costs one, and after the last holds its key back, or is put
//     aside, as [Poison] says. Other keys go on.
//   - No transaction is open while messages are being published.
package outbox
