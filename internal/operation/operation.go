// Package operation carries the identity of a logical operation in a context.
//
// The server and the consumer put it there for their handlers, and the client
// derives the keys of the handler's own calls from it. It lives apart from the
// client so that neither side imports the other.
package operation

import "context"

type contextKey struct{}

// With returns a context that belongs to the operation id. An empty id means
// no operation and hides one that an outer context may carry.
func With(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, contextKey{}, id)
}

// From returns the operation that ctx belongs to, or "" if there is none.
func From(ctx context.Context) string {
	id, _ := ctx.Value(contextKey{}).(string)
	return id
}
