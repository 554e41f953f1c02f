package dedup

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxKeyLength is the most bytes that each part of a [Key] may have. It is what
// every store can index.
const MaxKeyLength = 255

// Key names one operation. Two keys are the same only if both parts are equal,
// byte for byte.
type Key struct {
	// Scope keeps callers apart who must not see each other's answers: tenant
	// and operation for a server, the consumer group for a consumer. At most
	// [MaxKeyLength] bytes of valid UTF-8 without NUL.
	Scope string

	// ID is the idempotency key or the event's id. At least one and at most
	// [MaxKeyLength] bytes of valid UTF-8 without NUL.
	ID string
}

// Validate reports whether every store can hold k. The error wraps
// [ErrInvalidKey].
func (k Key) Validate() error {
	if k.ID == "" {
		return fmt.Errorf("%w: id is empty", ErrInvalidKey)
	}
	if err := validatePart("scope", k.Scope); err != nil {
		return err
	}
	return validatePart("id", k.ID)
}

func validatePart(name, s string) error {
	switch {
	case len(s) > MaxKeyLength:
		return fmt.Errorf("%w: %s has %d bytes, the most is %d", ErrInvalidKey, name, len(s), MaxKeyLength)
	case !utf8.ValidString(s):
		return fmt.Errorf("%w: %s is not valid UTF-8", ErrInvalidKey, name)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("%w: %s has a NUL byte", ErrInvalidKey, name)
	}
	return nil
}

// Token fences one run of an operation: only the holder of the row's current
// token may renew, complete or release it.
type Token [16]byte

// NewToken returns a random token.
func NewToken() Token {
	var t Token
	rand.Read(t[:]) // never fails, see crypto/rand
	return t
}

// String returns t in hexadecimal.
func (t Token) String() string { return hex.EncodeToString(t[:]) }
