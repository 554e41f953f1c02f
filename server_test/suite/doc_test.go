// Package suite runs the server, as a black box, on every store: what clients
// and handlers were promised, and faults that users of other implementations
// have reported.
//
// Those faults, and the test that they don't happen here. storetest is run by
// every store's own module; tests with a package's name are in that package.
//
//	the client left, and the write was cancelled    TestServerClientDisconnects
//	a crash or panic answers 409 for the whole TTL  TestServerAbandoned, faults.TestKilledAtEveryStep
//	a failure after the effect freed the key        TestServerFailure
//	a swallowed heartbeat let two run on            TestServerFencing, dedup.TestSleeperIsFenced
//	the mismatch was checked only when finished     TestServerDuplicateOfRunning, TestKeyReuseDifferentBody
//	the loser of a race got 500, or won too         TestConcurrentDuplicates, storetest ConcurrentClaims
//	a repeated claim took itself for another        storetest ClaimRepeated, dedup.TestClaimWhoseAnswerWasLost
//	a late completion overwrote a running record    storetest WrongTokenWritesNothing, CompleteAgainstTakeover
//	Set-Cookie replayed, headers split or merged    TestServerReplay, server.TestHeadersNotStored
//	too large or streamed: not stored, so run again TestServerTombstone, server.TestStream
//	a truncated body stored as whole                server.TestIncompleteAnswer
//	a caught violation gave 25P02                   TestServerCaughtViolation, TestServerAbortedSuccess
//	INSERT IGNORE hid data errors                   mysqldb.TestDataErrorIsNoDuplicate
//	member order, large numbers, path, query        server.TestSameFingerprint, TestOtherFingerprint, FuzzCanonicalJSON
//	another tenant's answer                         server.TestScopes, storetest ScopesApart
//	Flusher and Unwrap hidden                       server.TestResponseController
//	5xx kept in transaction mode, lost in lease     TestServerFailure
//	a purge took live leases, dead-locked, locked   TestRetentionBounded, storetest PurgeKeepsLiveAndUnknown, PurgeConcurrent
//	an outer middleware's headers were stored       server.TestHeaderChanges
//	/orders/2/pay answered as /orders/1/pay         server.TestFingerprintOfPathAsSent
//	a renamed wildcard freed the keys               server.TestOperation
//	a duplicate hung on a row lock, or got 40001    TestServerDuplicateOfRunning, TestServerSerialization
//	what was told did not outlast a crash           mysqldb.TestOutcomeOutlastsCrash, faults.TestChaos
//
// Effects are counted where they happen, never by requests: net/http's client
// repeats requests that carry an Idempotency-Key by itself.
package suite
