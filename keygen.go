package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/uuid"

	"github.com/effectonce/idempotency/internal/operation"
)

// DefaultMaxKeyLength is the longest key, in bytes, that is sent to a provider
// that states no limit of its own. It is what most accept.
const DefaultMaxKeyLength = 255

// ErrInvalidKey is in the error of a request whose key cannot be sent.
var ErrInvalidKey = errors.New("idempotency: invalid key")

// KeyFunc makes the key of one operation, once, before its first send. It must
// not read the request's body. "" means that the request is sent without a key.
type KeyFunc func(req *http.Request) (string, error)

// RandomKey makes a random UUID (version 4), 122 random bits. It is what a
// Transport does where Key is nil.
func RandomKey(*http.Request) (string, error) {
	id, err := uuid.NewRandom()
	if err != nil {
		return "", fmt.Errorf("idempotency: %w", err)
	}
	return id.String(), nil
}

// TimeOrderedKey makes a UUID of version 7, which begins with the time. A
// server that keeps millions of keys writes much less to its log for them than
// for random ones, since new rows end up side by side. The time that an
// operation began can be read from it.
func TimeOrderedKey(*http.Request) (string, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return "", fmt.Errorf("idempotency: %w", err)
	}
	return id.String(), nil
}

// Deterministic returns the key that belongs to namespace and parts: the same
// for the same arguments, in any process, and another for any others, also
// where only the borders between parts differ. Use it where the operation has a
// name of its own, such as an order's number:
//
//	ctx = idempotency.WithKey(ctx, idempotency.Deterministic("capture", orderID))
//
// It is a UUID of version 8, made by SHA-256. Who can guess the arguments can
// compute the key.
func Deterministic(namespace string, parts ...string) string {
	size := 8 + len(namespace)
	for _, p := range parts {
		size += 8 + len(p)
	}
	data := make([]byte, 0, size)
	for _, p := range append([]string{namespace}, parts...) {
		data = binary.BigEndian.AppendUint64(data, uint64(len(p)))
		data = append(data, p...)
	}
	return uuid.NewHash(sha256.New(), keySpace, data, 8).String()
}

// keySpace keeps our derived keys apart from other UUIDs made by hashing. It
// is part of the format: another one would give every operation another key.
var keySpace = uuid.UUID{0x5e, 0x1c, 0x7d, 0x0a, 0x3b, 0x52, 0x4e, 0x0d, 0x9c, 0x41, 0x6f, 0x2e, 0x88, 0xd3, 0x17, 0xb4}

type keyContext struct{}

// WithKey gives the one request that is sent with the context this key: to
// repeat, in the application, an operation that was begun before. It must not
// be used for two different requests.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyContext{}, keySource{key: key})
}

// WithOperation says that what is done with the context belongs to the
// operation id. The server and consumer packages do so for their handlers. On
// its own it gives no request a key; see [WithStep].
func WithOperation(ctx context.Context, id string) context.Context {
	return operation.With(ctx, id)
}

// WithStep gives the one request that is sent with the context the key that
// belongs to the context's operation and the step's name. A handler that runs
// again after a crash so sends the same key again. Names must differ within an
// operation; a loop numbers its steps ("line-1", "line-2").
//
// The request's content is not part of the key: if it is another one in the
// second run, the receiver refuses it with 422 instead of acting twice.
//
// A request whose context has a step and no operation fails with
// [ErrNoOperation].
func WithStep(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, keyContext{}, keySource{step: name, isStep: true})
}

// ErrNoOperation is the error of a request with [WithStep] outside of any
// operation: a random key would silently give up what a step promises.
var ErrNoOperation = errors.New("idempotency: WithStep outside of an operation; see WithOperation")

// keySource is the innermost of WithKey and WithStep.
type keySource struct {
	key    string
	step   string
	isStep bool
}

// keyFromContext returns the key that the caller chose by the context.
func keyFromContext(ctx context.Context) (key string, ok bool, err error) {
	s, ok := ctx.Value(keyContext{}).(keySource)
	if !ok || !s.isStep {
		return s.key, ok, nil
	}
	id := operation.From(ctx)
	if id == "" {
		return "", false, ErrNoOperation
	}
	return Deterministic("step", id, s.step), true, nil
}

// validateKey reports whether a provider takes key: visible ASCII, up to a
// length. Other characters don't survive every proxy on the way.
func validateKey(key string, maxLength int) error {
	if key == "" {
		return fmt.Errorf("%w: it is empty", ErrInvalidKey)
	}
	if len(key) > maxLength {
		return fmt.Errorf("%w: it has %d bytes, the most is %d", ErrInvalidKey, len(key), maxLength)
	}
	for i := range len(key) {
		if c := key[i]; c < 0x20 || c > 0x7e {
			return fmt.Errorf("%w: byte %#02x at position %d is not printable ASCII", ErrInvalidKey, c, i)
		}
	}
	if key[0] == ' ' || key[len(key)-1] == ' ' {
		return fmt.Errorf("%w: it begins or ends with a space", ErrInvalidKey)
	}
	return nil
}
