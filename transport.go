package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"
)

// Defaults of [Transport].
const (
	DefaultMaxBufferedBody     = 1 << 20
	DefaultMaxBufferedResponse = 1 << 20
)

// Transport sends each logical operation under one key, and retries it with
// that key. The zero value works. Its fields must not be changed once it is in
// use; it is safe for concurrent use.
//
// POST and PATCH requests get a key and are retried with it. GET, HEAD,
// OPTIONS, TRACE, PUT and DELETE are retried without one, being idempotent by
// themselves (RFC 9110, section 9.2.2). Others are sent again only where they
// were certainly not sent before.
//
// The key of an operation is the first of: the header that the caller set; the
// key of the request that a 307 or 308 redirected; that of [WithKey] or
// [WithStep], whichever is inner; what Key makes. Two sends of one
// [http.Request] are two operations. The caller's header counts for every
// method, the other sources for those of the Provider.
//
// A request gets a response or an error, never both. Where retries are
// exhausted, the response is the last one, its body intact; the error is an
// [*Error].
type Transport struct {
	// Base sends the single attempts (nil: http.DefaultTransport).
	Base http.RoundTripper

	// Key makes the keys (nil: RandomKey).
	Key KeyFunc

	// Provider says how the other side does idempotency.
	Provider Provider

	// Retry says when and how often a request is sent again.
	Retry RetryPolicy

	// MaxBufferedBody is how many bytes of a body without GetBody are read into
	// memory so that it can be sent again (1 MiB if 0, none if negative). A
	// longer one is sent once. Bodies with GetBody are never read ahead.
	MaxBufferedBody int64

	// MaxBufferedResponse is how many bytes of the answer to a keyed request
	// are read before it is returned (1 MiB if 0, none if negative), so that an
	// answer that breaks off is retried like one that never came. Of a longer
	// one the rest is read by the caller, and can break off.
	MaxBufferedResponse int64

	// Stream reports whether the answer to req is to be read as it comes, and
	// so not buffered. Event streams and newline-delimited JSON never are.
	Stream func(req *http.Request) bool

	// OnAttempt is told of each attempt when it has ended, synchronously.
	OnAttempt func(ctx context.Context, a Attempt)

	// Logger gets a line for each retry, and none for what goes well. URLs,
	// headers and keys are not logged. nil: silent.
	Logger *slog.Logger
}

// Attempt is what [Transport.OnAttempt] is told.
type Attempt struct {
	Request *http.Request // as it was sent, to be left alone
	Key     string        // "" for requests without one
	Number  int           // from 1
	Status  int           // of the response, 0 without one
	Err     error         // why there is no response
	Elapsed time.Duration // from the send until it was judged, what was buffered of the answer included
	Retry   bool          // whether there will be another attempt
	Wait    time.Duration // the pause until then
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	op, err := t.newOperation(req)
	if err != nil {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, err
	}
	return op.run()
}

// CloseIdleConnections closes those of the base, as [http.Client] asks for.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

func (t *Transport) newOperation(req *http.Request) (*operationRun, error) {
	policy, err := t.Retry.withDefaults()
	if err == nil {
		err = policy.Budget.validate()
	}
	if err == nil {
		err = t.Provider.validate()
	}
	if err != nil {
		return nil, err
	}
	key, err := t.keyFor(req)
	if err != nil {
		return nil, err
	}
	if err := ended(req.Context()); err != nil {
		return nil, &Error{Key: key, Err: err}
	}
	o := &operationRun{t: t, ctx: req.Context(), policy: policy, key: key, idempotent: key != "" || idempotentMethod(req.Method)}
	if err := o.body.take(req, o.idempotent && policy.MaxAttempts > 1, sizeOr(t.MaxBufferedBody, DefaultMaxBufferedBody)); err != nil {
		return nil, &Error{Key: key, Err: fmt.Errorf("reading the request's body: %w", err)}
	}
	o.prepare(req)
	return o, nil
}

func sizeOr(n, def int64) int64 {
	if n == 0 {
		return def
	}
	return n
}

// keyFor returns the operation's key, "" for a request that gets none.
func (t *Transport) keyFor(req *http.Request) (string, error) {
	p := &t.Provider
	_, own := p.in(req.Header)
	if redirectedToOther(req) || !p.keyed(methodOf(req)) && own == nil {
		return "", nil
	}
	key, chosen, err := t.chosenKey(req, own)
	if err != nil {
		return "", err
	}
	if !chosen {
		make := t.Key
		if make == nil {
			make = RandomKey
		}
		if key, err = make(req); err != nil {
			return "", fmt.Errorf("idempotency: making a key: %w", err)
		}
		if key == "" {
			return "", nil
		}
	}
	return key, validateKey(key, p.maxKeyLength())
}

// chosenKey returns the key that was there before the request came to us.
// own are the values of its header.
func (t *Transport) chosenKey(req *http.Request, own []string) (key string, ok bool, err error) {
	p := &t.Provider
	switch len(own) {
	case 0:
	case 1:
		return p.parse(own[0]), true, nil
	default:
		return "", false, fmt.Errorf("%w: the request has %d %s headers", ErrInvalidKey, len(own), p.header())
	}
	// A redirect that keeps method and body is the same operation. net/http
	// makes a new request for it, from the caller's, which has no key.
	if prev := req.Response; prev != nil && prev.Request != nil {
		if v := prev.Request.Header.Get(p.header()); v != "" {
			return p.parse(v), true, nil
		}
	}
	return keyFromContext(req.Context())
}

// prepare makes the request that is sent. The caller's is left alone.
func (o *operationRun) prepare(req *http.Request) {
	p := &o.t.Provider
	o.req = *req
	out := &o.req
	out.Header = req.Header.Clone()
	if out.Header == nil {
		out.Header = make(http.Header, 2)
	}
	out.RequestURI = "" // set where a server's request is passed on
	header := p.header()
	switch own, values := p.in(out.Header); {
	case redirectedToOther(req):
		delete(out.Header, own) // net/http has copied it, where the caller set it
	case o.key != "" && values == nil:
		out.Header[header] = []string{p.format(o.key)}
	case own != header:
		delete(out.Header, own)
		out.Header[header] = values
	}
	repeatable := o.body.none || o.body.getBody != nil
	if o.key != "" && repeatable && header != standardHeader && header != netHTTPHeader && out.Header[netHTTPHeader] == nil {
		out.Header[netHTTPHeader] = []string{}
	}
	out.GetBody = nil
	if o.body.getBody != nil && !o.body.none {
		out.GetBody = o.bodyForBase
	}
}

// redirectedToOther reports whether req follows a redirect that changed the
// method, such as 303 from POST to GET: that is another request, and not part
// of the operation, nor is what it is redirected to in turn.
func redirectedToOther(req *http.Request) bool {
	for r := req; r.Response != nil && r.Response.Request != nil; r = r.Response.Request {
		if methodOf(r.Response.Request) != methodOf(req) {
			return true
		}
	}
	return false
}

func methodOf(req *http.Request) string {
	if req.Method == "" {
		return http.MethodGet
	}
	return req.Method
}

// idempotentMethod reports whether repeating a request of the method has no
// further effect (RFC 9110, section 9.2.2).
func idempotentMethod(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

// ended returns the error of ctx, if it has ended, with its cause.
func ended(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
