// Package etag makes writes conditional, so that a writer who has not seen the
// last change is refused instead of overwriting it, and so that a write that
// is sent twice is done once.
//
// A server names each version of a resource by an entity tag ([FromVersion],
// [FromContent]) and a client sends the tag of the version it saw in If-Match.
// [Require] refuses writes that carry no condition (428), [Check] those whose
// condition doesn't hold (412). Since a resource can change between the check
// and the write, the write must check again, in the statement that writes:
// package sqlwrite does that, and tells what to answer. The rules are those of
// RFC 9110, sections 8.8.3 and 13, and of RFC 6585, section 3.
//
// On the client's side, [Update] reads, changes and writes back a resource.
//
// # When the answer gets lost
//
// A PUT with If-Match is done at most once, but that is not to say that its
// sender learns so: if the answer is lost after the write, the same request,
// sent again, is answered 412, because the tag is no longer the current one.
// The 412 then says "not done" of something that was done. Clients repeat such
// requests unasked: retrying transports do, and net/http itself does where a
// reused connection breaks, since PUT is idempotent. Three ways out:
//
//   - Send the PUT with an idempotency key, to a server that guards PUT: the
//     repeated request gets the stored answer of the first ([Updater.Key]).
//   - Write what doesn't depend on the current state ("set to 7", not "add 1"),
//     and after a 412 read and look.
//   - Let the server answer 2xx where the state that the request asks for is
//     the current one already, as RFC 9110, section 13.1.1 allows.
//
// [Update] counts how often its request was sent, and reports a 412 that might
// be such a one as [ErrLostAnswer] instead of writing a second time.
package etag
