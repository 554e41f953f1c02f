// Package idempotency makes HTTP requests safe to repeat.
//
// [Transport] is an [http.RoundTripper]. For each logical operation it makes
// one Idempotency-Key before the first send and sends the same key on every
// retry, so that a server which honours it (package server is one) acts once,
// however often the network made us ask:
//
//	client := &http.Client{Transport: &idempotency.Transport{}}
//
// An operation is one call of the client. To go on with it later, also in
// another process, keep the key of the [Error] and use [WithKey]. Inside of an
// operation that a server or a consumer of this module runs, [WithStep] derives
// the keys of its own calls, so that a handler that runs again after a crash
// sends the same keys as before.
//
// What counts as a header, which status means "in progress" and so on differs
// between providers; a [Provider] says it, and there are ready ones.
package idempotency
