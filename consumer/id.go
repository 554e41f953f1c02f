package consumer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/internal/operation"
)

const hashedPrefix = "sha256:"

// ID makes one event id of the parts that together name an event (CloudEvents
// has two: source and id), in a form that every store can hold. Different parts
// make different ids: several parts are each prefixed with their length, and
// what is too long, not UTF-8 or has a NUL byte is replaced by its SHA-256,
// marked as such. A single part that can be stored stays as it is.
//
// Handle passes its id through ID, so that a caller needs it only for several
// parts.
func ID(parts ...string) string {
	if len(parts) == 1 {
		// An id that looks like one of our hashes stays as it is, so that ID
		// may be applied twice. Nobody gains by sending one: who knows the id
		// behind it could send that.
		if storable(parts[0]) {
			return parts[0]
		}
		return hashed(parts[0])
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(strconv.Itoa(len(p)))
		b.WriteByte(':')
		b.WriteString(p)
	}
	return ID(b.String())
}

func storable(s string) bool {
	return len(s) <= dedup.MaxKeyLength && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}

func hashed(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hashedPrefix + hex.EncodeToString(sum[:])
}

// OperationContext returns the context that a handler of the event gets: it
// names the operation, so that the handler's own calls derive their keys from
// it. The three modes of this package do it themselves; it is for other
// implementations of [Consumer].
func OperationContext(ctx context.Context, group, id string) context.Context {
	return operation.With(ctx, ID("consumer", group, ID(id)))
}
