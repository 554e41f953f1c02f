// Package server makes the handlers of net/http answer a repeated request with
// the answer of the first one, instead of doing its work again.
//
//	guard := server.New(store, server.Options{Scope: tenantOf})
//	mux.Handle("POST /charges", guard.Handler(charge))
//
// A client names its operation by the Idempotency-Key header. For each tenant
// and operation, a [Guard] lets the handler run once per key, stores what it
// answered, and gives every later request with that key the same status,
// headers and body, marked "Idempotent-Replayed: true". A key that comes with
// another request is refused, one whose request is still running too, and
// where a crash left it open what happened, the answer says so: nothing runs
// twice by a guess. The constants of the problem types list all these answers.
//
// In [dedup.Transaction] mode the handler's writes to the database, through the
// transaction in its request's context, commit together with the stored answer.
// In [dedup.Lease] mode, for effects elsewhere, see [dedup.Policy].
//
// A guarded handler may use [dedup.Attempt], [dedup.NotExecuted] and
// [dedup.Rollback], and its own calls through this module's client derive their
// keys from the operation (idempotency.WithStep).
package server
