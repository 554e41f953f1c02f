// Package dedup makes an operation happen once, however often it is asked for.
//
// Its heart is the dedup table: one row per ([Key.Scope], [Key.ID]) that says
// whether the operation is running, finished (and with what answer), or ended
// without anybody knowing how. A [Store] keeps the table; an [Engine] claims a
// row, runs the work, and stores its answer before anyone sees it. Every later
// request with the same key gets that stored answer.
//
// The engine works in one of two modes:
//
//   - [Transaction]: claim, the work's own writes and the stored answer commit
//     together, so there is exactly one effect, crash or not. Use it wherever
//     the effect is in the same database as the table.
//   - [Lease]: claim and completion are separate commits, for effects that
//     happen elsewhere (a payment provider, another service). After a crash in
//     between, [Engine.Abandoned] decides what the next request is told.
//
// The package knows no HTTP and imports no driver. Stores live in
// dedup/memstore, dedup/sqlstore and in the drivers/ modules; dedup/storetest
// checks any store against the contract of [Store].
package dedup
