// Package consumer_test tests package consumer on real databases and brokers.
//
// What users of other libraries have met, and the test that it doesn't happen
// here:
//
//	an error after marking lost the event       TestFailedIsNotMarked, TestConsumerRedelivery
//	two copies at once ran the handler twice    TestConcurrentCopies
//	a finished duplicate was nacked for ever    TestFinishedDuplicateIsDone
//	events with one checksum were merged        TestIDsAreExact
//	a batch acked what was not handed out       TestBatchIsPositional, TestBatchThatIsNotCommitted
//	SETNX without its EXPIRE left a key         redis/window.TestStore: one command each, TestKilledInWindow
//	an event that kills its process went on     TestCrashLoopStopsAtTheLimit
//	a crash lost the event, or repeated it      TestKilledAtEveryStep, TestKilledInTransaction
//	a purge locked everything                   TestPurge, TestPurgeOnSeveralNodes
package consumer_test
