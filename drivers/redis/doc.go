// Package redisstore keeps the dedup table in Redis, Redis Cluster or Valkey.
//
//	store, err := redisstore.New(ctx, client, redisstore.Options{})
//
// Each call is one Lua script and one round trip, by the server's clock. A row is
// one hash, so it sits in one slot of a cluster. Redis removes expired rows by
// itself, never live or unknown ones. It needs Redis 5 or later, or any Valkey.
//
// # What it cannot promise
//
// Redis answers before its replicas have the write, and by default before its
// disk has it. If the primary dies in between, a key that was claimed or
// completed is forgotten, and a duplicate runs the operation again. How likely
// that is can be lowered:
//   - Options.Replicas makes each write wait until so many replicas have it, and
//     fail with [ErrNotReplicated] otherwise. A replica without the write may
//     still be the one that is promoted, if there are more replicas than that.
//   - appendfsync always keeps writes over a crash of the process or machine.
//   - min-replicas-to-write makes a primary refuse writes (seen as
//     [dedup.ErrBusy]) while it has lost its replicas.
//
// None of them makes it a certainty. Where running twice costs money, keep the
// table in the database that the effect is in, by the transaction mode of another
// store. Redis has no transaction that the work's writes could share, so [Store]
// is no [dedup.TxStore].
//
// A server that evicts keys forgets too, so [New] refuses one whose
// maxmemory-policy is not noeviction.
package redisstore
