// Package outbox_test tests package outbox on real databases and brokers.
//
// What users of other outboxes have met, and the test that it doesn't happen
// here. outboxtest is run by TestStores on every database.
//
//	rows acked that were never handed out      outboxtest SettleIsPositional, outbox.TestRelayPositional
//	an error in mid-batch loses the rest       outboxtest SettleIsPositional
//	a second relay publishes everything twice  TestRelaysShareTheWork, outboxtest ConcurrentClaims
//	a lease shorter than publishing            TestLeaseShorterThanPublishing, outboxtest TokenFences
//	a retry breaks the order                   TestRetryKeepsOrder, outboxtest FailureHoldsItsKeyAlone
//	a poison message blocks everything         TestPoisonBlocksItsKey, outboxtest BlockedHoldsItsKeyAlone
//	a late commit is skipped, an idle
//	transaction stops the relay                TestLateCommit
//	a broker that is down makes dead letters   TestBrokerDown
//	a resend that JetStream had already        natsbroker.TestPublisherResend
//	a cancelled produce loses a record         kafkabroker.TestPublisher
//	a purge deletes unsent rows, or waits      TestPurgeBesideOpenTransactions, outboxtest PurgeLeavesUnpublished
//	rows of a transaction come out mixed up    outboxtest OrderWithinATransaction
//	killed between commit and publishing       TestOutboxAtomicity
package outbox_test
