// Package consumer processes messages and webhooks that are delivered at least
// once, so that the effect of each event happens once.
//
// An event is known by the id that its sender gave it and by the name of the
// consumer group, since each group processes every event. Three types remember
// which events were processed; all have the method
// Handle(ctx, id, handler) [Result]:
//
//   - [Inbox]: the mark is a row written in the handler's own database
//     transaction, so that effect and mark commit together. There is exactly
//     one effect, crash or not. Use it wherever the effect is in a database.
//   - [Lease]: claim, run, complete, over a dedup.Store, for effects elsewhere.
//     A crash in between makes the next delivery run the handler again; starts
//     are counted, so that an event that kills its process stops at a limit.
//   - [Window]: two small commands to Redis, and forgotten after a while, for
//     senders that stop redelivering after a known time.
//
// The result says what to tell the broker: [Done] is acknowledged, [Busy] and
// [Failed] are asked for again later, [Poison] goes to the dead letters.
// Nothing is marked before its work is durable, and what failed is not marked.
//
// [Webhook] is an http.Handler on top of any of them. The brokers/ modules hold
// adapters for message brokers.
package consumer
