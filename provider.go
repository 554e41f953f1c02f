package idempotency

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// Provider says how the other side does idempotency. It is data only; the zero
// value sends a bare Idempotency-Key on POST and PATCH.
type Provider struct {
	// Header carries the key ("": Idempotency-Key).
	Header string

	// Quoted sends the key as a String of Structured Fields, in quotation
	// marks (RFC 9651, section 3.3.3).
	Quoted bool

	// Methods get a key (nil: POST and PATCH).
	Methods []string

	// MaxKeyLength is the longest key that is taken, in bytes (255 if 0).
	MaxKeyLength int

	// InProgress are statuses that mean that an earlier request with the key
	// is still being worked on, also without Retry-After. Such an answer is
	// waited out with the same key.
	InProgress []int

	// FinalConflict says that a 409 is an answer like any other, also where it
	// has a Retry-After.
	FinalConflict bool

	// RetryHeader names a header by which an answer says itself whether it is
	// to be retried ("true" or "false"), over all other rules.
	RetryHeader string
}

// IETF sends the key as the draft standard has it, as a quoted String.
// https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
func IETF() Provider { return Provider{Quoted: true} }

// Stripe's keys have up to 255 characters and belong to POST. Its answers say
// by Stripe-Should-Retry whether to retry, and 409 is a key in use.
// https://docs.stripe.com/api/idempotent_requests
// https://docs.stripe.com/error-low-level
func Stripe() Provider {
	return Provider{
		Methods:     []string{http.MethodPost},
		InProgress:  []int{http.StatusConflict},
		RetryHeader: "Stripe-Should-Retry",
	}
}

// PayPal has a header of its own, for keys of up to 108 characters on POST. Not
// every one of its APIs honours it, see their references.
// https://developer.paypal.com/api/rest/reference/idempotency/
func PayPal() Provider {
	return Provider{Header: "PayPal-Request-Id", Methods: []string{http.MethodPost}, MaxKeyLength: 108}
}

// Adyen takes keys of up to 64 characters on POST, and says by Transient-Error
// whether the same request with the same key may succeed.
// https://docs.adyen.com/development-resources/api-idempotency/
func Adyen() Provider {
	return Provider{Methods: []string{http.MethodPost}, MaxKeyLength: 64, RetryHeader: "Transient-Error"}
}

// CheckoutCom is Checkout.com, with a header of its own on POST. It keeps
// successes only: a request that failed is carried out again under its key.
// https://www.checkout.com/docs/payments/manage-payments/idempotency
func CheckoutCom() Provider {
	return Provider{Header: "Cko-Idempotency-Key", Methods: []string{http.MethodPost}}
}

// MercadoPago has a header of its own, for keys of up to 64 characters on POST,
// and answers 423 while a request with the key is in progress. Its 409 is final.
// https://www.mercadopago.com.mx/developers/en/docs/wallet-connect/payment-flow/idempotency/responses
func MercadoPago() Provider {
	return Provider{
		Header: "X-Idempotency-Key", Methods: []string{http.MethodPost}, MaxKeyLength: 64,
		InProgress: []int{http.StatusLocked}, FinalConflict: true,
	}
}

// ModernTreasury takes keys on POST in the standard header, ignores them on
// PATCH, and answers 409 while a request with the key is in progress.
// https://docs.moderntreasury.com/reference/idempotent-requests
func ModernTreasury() Provider {
	return Provider{Methods: []string{http.MethodPost}, InProgress: []int{http.StatusConflict}}
}

// Increase takes keys of up to 200 characters on POST, marks a repeated answer
// by Idempotent-Replayed, and answers a key that was used for another request
// with 409, which is final.
// https://increase.com/documentation/idempotency-keys
func Increase() Provider {
	return Provider{Methods: []string{http.MethodPost}, MaxKeyLength: 200, FinalConflict: true}
}

// GoCardless takes keys of up to 128 characters on POST. Its 409 names the
// resource that the key made before, and is final.
// https://developer.gocardless.com/api-reference/#making-requests-idempotency-keys
func GoCardless() Provider {
	return Provider{Methods: []string{http.MethodPost}, MaxKeyLength: 128, FinalConflict: true}
}

const (
	standardHeader = "Idempotency-Key"
	replayHeader   = "Idempotent-Replayed"

	// netHTTPHeader makes net/http repeat a request by itself when a kept
	// connection turns out to be stale, even with an empty list of values, in
	// which case nothing is sent. See http.Transport's documentation.
	netHTTPHeader = "X-Idempotency-Key"
)

func (p *Provider) header() string {
	if p.Header == "" {
		return standardHeader
	}
	return http.CanonicalHeaderKey(p.Header)
}

// in returns the values of the header in h, and its name there: a caller may
// have set it without Header.Set, in other letters, and a second one beside it
// would be a second key.
func (p *Provider) in(h http.Header) (name string, values []string) {
	header := p.header()
	if values := h[header]; len(values) > 0 {
		return header, values
	}
	for name, values := range h {
		if len(name) == len(header) && len(values) > 0 && strings.EqualFold(name, header) {
			return name, values
		}
	}
	return header, nil
}

func (p *Provider) maxKeyLength() int {
	if p.MaxKeyLength == 0 {
		return DefaultMaxKeyLength
	}
	return p.MaxKeyLength
}

func (p *Provider) validate() error {
	switch h := p.header(); {
	case p.MaxKeyLength < 0:
		return fmt.Errorf("%w: Provider.MaxKeyLength is negative", ErrConfig)
	case p.Header == "":
	case h == "Host" || h == "Content-Length" || h == "Transfer-Encoding" || h == "Trailer" || h == "Connection":
		return fmt.Errorf("%w: Provider.Header %q has a meaning of its own", ErrConfig, p.Header)
	case !isToken(h):
		return fmt.Errorf("%w: Provider.Header %q is not the name of a header", ErrConfig, p.Header)
	}
	return nil
}

// keyed reports whether requests of the method get a key.
func (p *Provider) keyed(method string) bool {
	if p.Methods == nil {
		return method == http.MethodPost || method == http.MethodPatch
	}
	return slices.Contains(p.Methods, method)
}

// format returns the header's value for key.
func (p *Provider) format(key string) string {
	if !p.Quoted {
		return key
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
}

// parse returns the key in the header's value, as format made it or as the
// caller wrote it. Where keys are sent bare, quotation marks are part of them:
// sent with WithKey, the key must become the same value again.
func (p *Provider) parse(value string) string {
	if n := len(value); p.Quoted && n >= 2 && value[0] == '"' && value[n-1] == '"' {
		return strings.NewReplacer(`\\`, `\`, `\"`, `"`).Replace(value[1 : n-1])
	}
	return value
}
