package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Defaults of [Options]; those of time are package dedup's.
const (
	DefaultHeader            = "Idempotency-Key"
	DefaultMaxRequestBody    = 1 << 20
	DefaultMaxStoredResponse = 1 << 20
)

// Options say how a [Guard] works. Only Scope is required. All of it may differ
// by route, see [Guard.With].
type Options struct {
	// Scope returns the tenant on whose behalf a request is made, such as the
	// account that authentication found, and never "". Tenants do not see each
	// other's keys. It must be the same for each try of an operation, so an
	// access token, which may be renewed in between, does not do.
	//
	// An error refuses the request: with the [Problem] that it is or wraps,
	// otherwise with TypeScopeUnknown. [SingleTenant] is for services whose
	// callers may all see each other's answers.
	Scope func(r *http.Request) (tenant string, err error)

	// Operation names the operation that the route stands for. Keys of
	// different operations are apart. "": method and route, see [http.Request]
	// Pattern, without the names of its wildcards; method and path where there
	// is no pattern, since the guard is around the router.
	Operation string

	// Methods are guarded, others pass. nil: POST and PATCH, as the others are
	// idempotent by themselves.
	Methods []string

	// Header is where the key is ("": Idempotency-Key).
	Header string

	// Required refuses requests without a key. Otherwise they run unguarded.
	Required bool

	// Mode, Lease, TTL, Wait, Limit, Abandoned and Retries are those of
	// [dedup.Engine].
	Mode      dedup.Mode
	Lease     time.Duration
	TTL       time.Duration
	Wait      time.Duration
	Limit     time.Duration
	Abandoned dedup.Policy
	Retries   int

	// Recover runs in place of the handler for an operation that an earlier run
	// abandoned, under the policy [dedup.Recover]. It finds out what happened
	// and writes the answer that the handler would have given. An error, also
	// one of a panic, says that it can't be known now: the client is asked to
	// come back, and what was written is discarded.
	Recover func(w http.ResponseWriter, r *http.Request) error

	// NotExecuted reports whether an answer says that nothing was done, such as
	// the 503 of a load shedder behind the guard. Such an answer is sent but not
	// stored, the transaction is rolled back if there is one, and the key is
	// free. It must not change header. nil: only what the handler says by
	// [dedup.NotExecuted].
	NotExecuted func(status int, header http.Header) bool

	// MaxRequestBody is how many bytes the body of a guarded request may have
	// (1 MiB if 0). It is read into memory before anything is claimed.
	MaxRequestBody int64

	// MaxStoredResponse is how many bytes of an answer's body, and likewise of
	// its headers, are stored (1 MiB if 0). A larger answer is sent whole to the
	// client whose request it is; later ones get TypeResponseGone. In
	// transaction mode it is held in memory until the commit all the same.
	MaxStoredResponse int64

	// DropHeaders are not stored, beside those that belong to a connection and
	// Date. nil: [DefaultDropHeaders].
	DropHeaders []string

	// Fingerprint replaces what identifies a request's content: two requests
	// with one key are the same if it returns the same bytes for both. It must
	// not change body. nil: method, path, query, media type and body. An error
	// refuses the request: with the [Problem] that it is or wraps, otherwise
	// with TypeBodyUnreadable.
	Fingerprint func(r *http.Request, body []byte) ([]byte, error)

	// ErrorHandler sends a problem. Status, Retry-After and the other headers
	// that belong to the problem are for it to keep: the headers are set before
	// it is called. nil: [WriteProblem].
	ErrorHandler func(w http.ResponseWriter, r *http.Request, p *Problem)

	// Observer is told of every step; see [dedup.Engine].
	Observer func(ctx context.Context, e dedup.Event)

	// Logger gets what an operator should look into. Keys are logged by a piece
	// of their hash; bodies and headers never. nil for none, but a handler's
	// panic is reported as net/http does it.
	Logger *slog.Logger
}

// validate returns why o can't work.
func (o *Options) validate() error {
	if o.Scope == nil {
		return errors.New("option Scope is nil; set server.SingleTenant if all callers may see each other's answers")
	}
	if o.MaxRequestBody < 0 || o.MaxStoredResponse < 0 {
		return errors.New("options MaxRequestBody and MaxStoredResponse must not be negative")
	}
	if !validToken(o.Header) {
		return fmt.Errorf("option Header: %q is not the name of a header", o.Header)
	}
	for _, m := range o.Methods {
		if !validToken(m) {
			return fmt.Errorf("option Methods: %q is not a method", m)
		}
	}
	return nil
}

// withDefaults returns o with defaults in place of zero values.
func (o Options) withDefaults() Options {
	if o.Methods == nil {
		o.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	if o.Header == "" {
		o.Header = DefaultHeader
	}
	if o.MaxRequestBody == 0 {
		o.MaxRequestBody = DefaultMaxRequestBody
	}
	if o.MaxStoredResponse == 0 {
		o.MaxStoredResponse = DefaultMaxStoredResponse
	}
	if o.ErrorHandler == nil {
		o.ErrorHandler = WriteProblem
	}
	o.Header = textproto.CanonicalMIMEHeaderKey(o.Header)
	o.Methods = slices.Clone(o.Methods)
	return o
}

// validToken reports whether s is a token of RFC 9110, section 5.6.2.
func validToken(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case isDigit(c), 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
		case strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}
