package idempotency

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Defaults of [RetryPolicy].
const (
	DefaultMaxAttempts   = 4
	DefaultMinWait       = 200 * time.Millisecond
	DefaultMaxWait       = 10 * time.Second
	DefaultMaxRetryAfter = time.Minute
	DefaultMaxInProgress = time.Minute
)

// RetryPolicy says when and how often a request is sent again. The zero value
// works.
//
// Retried are failed connections and the statuses 408, 425, 429, 500, 502, 503
// and 504, and 409 where it says that an earlier request with the key is still
// in progress. Never: what the caller's context ended, certificate errors,
// requests that can't be sent as they are, and answers marked
// Idempotent-Replayed, which will not change.
type RetryPolicy struct {
	// MaxAttempts is how often a request is sent at the most (4 if 0; 1 for no
	// retries at all). Otherwise, waiting out a request in progress does not
	// count.
	MaxAttempts int

	// MinWait and MaxWait bound the pause before a retry (200 ms and 10 s if
	// 0). The bound starts at MinWait and doubles; the pause is drawn at random
	// from zero to the bound, so that clients don't come back in step.
	MinWait, MaxWait time.Duration

	// MaxRetryAfter is the longest Retry-After that is waited for (1 min if 0).
	// An answer that asks for more is returned at once.
	MaxRetryAfter time.Duration

	// MaxInProgress is how long a request that is still in progress is waited
	// for, in all (1 min if 0). Then the last answer is returned.
	MaxInProgress time.Duration

	// AttemptTimeout bounds one attempt until the response is there (0: no
	// bound), for a keyed request including its body as far as that is
	// buffered. Reading the returned body is bounded by the caller's context
	// alone.
	AttemptTimeout time.Duration

	// Budget stops retries when too many are needed. It may be shared by
	// Transports. nil: none.
	Budget *Budget
}

func (p RetryPolicy) withDefaults() (RetryPolicy, error) {
	if p.MaxAttempts < 0 {
		return p, fmt.Errorf("%w: MaxAttempts is negative", ErrConfig)
	}
	if p.MinWait < 0 || p.MaxWait < 0 || p.MaxRetryAfter < 0 || p.MaxInProgress < 0 || p.AttemptTimeout < 0 {
		return p, fmt.Errorf("%w: durations of a RetryPolicy must not be negative", ErrConfig)
	}
	if p.MaxAttempts == 0 {
		p.MaxAttempts = DefaultMaxAttempts
	}
	if p.MinWait == 0 {
		p.MinWait = DefaultMinWait
		if p.MaxWait != 0 {
			p.MinWait = min(p.MinWait, p.MaxWait)
		}
	}
	if p.MaxWait == 0 {
		p.MaxWait = max(DefaultMaxWait, p.MinWait)
	}
	if p.MaxWait < p.MinWait {
		return p, fmt.Errorf("%w: MaxWait %v is below MinWait %v", ErrConfig, p.MaxWait, p.MinWait)
	}
	if p.MaxRetryAfter == 0 {
		p.MaxRetryAfter = DefaultMaxRetryAfter
	}
	if p.MaxInProgress == 0 {
		p.MaxInProgress = DefaultMaxInProgress
	}
	return p, nil
}

// backOff draws the pauses of one operation. The growing bound is
// cenkalti/backoff's; the jitter is ours, since its own can exceed the maximum.
type backOff struct {
	bound *backoff.ExponentialBackOff // nil until the first retry
}

func (b *backOff) next(p *RetryPolicy) time.Duration {
	if b.bound == nil {
		b.bound = backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(p.MinWait),
			backoff.WithMaxInterval(p.MaxWait),
			backoff.WithMultiplier(2),
			backoff.WithRandomizationFactor(0),
			backoff.WithMaxElapsedTime(0),
		)
	}
	return 1 + rand.N(min(b.bound.NextBackOff(), p.MaxWait))
}

// verdict is what an answer or an error means for the operation.
type verdict uint8

const (
	final      verdict = iota // return it
	retry                     // send again, if the policy allows
	inProgress                // wait until the earlier request is done
)

// judgeResponse says what resp means. keyed says whether the request carried a
// key.
func (p *Provider) judgeResponse(resp *http.Response, keyed bool) verdict {
	if keyed && strings.EqualFold(resp.Header.Get(replayHeader), "true") {
		return final
	}
	if p.RetryHeader != "" {
		switch strings.ToLower(resp.Header.Get(p.RetryHeader)) {
		case "true":
			if keyed && p.isInProgress(resp) {
				return inProgress
			}
			return retry
		case "false":
			return final
		}
	}
	if keyed && p.isInProgress(resp) {
		return inProgress
	}
	switch resp.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return retry
	}
	return final
}

func (p *Provider) isInProgress(resp *http.Response) bool {
	if p.FinalConflict && resp.StatusCode == http.StatusConflict {
		return false
	}
	if slices.Contains(p.InProgress, resp.StatusCode) {
		return true
	}
	if resp.StatusCode != http.StatusConflict {
		return false
	}
	_, ok := retryAfter(resp.Header, time.Time{})
	return ok
}

// judgeError says whether the same request may succeed after err, and whether
// err shows that the request was not sent.
func judgeError(req *http.Request, err error) (v verdict, notSent bool) {
	var (
		unknownCA x509.UnknownAuthorityError
		hostname  x509.HostnameError
		invalid   x509.CertificateInvalidError
		roots     x509.SystemRootsError
		verify    *tls.CertificateVerificationError
	)
	if errors.As(err, &verify) || errors.As(err, &unknownCA) || errors.As(err, &hostname) ||
		errors.As(err, &invalid) || errors.As(err, &roots) {
		return final, true
	}
	if errors.Is(err, http.ErrSchemeMismatch) || !sendable(req) {
		return final, true
	}
	if req.URL == nil || req.URL.Scheme != "http" && req.URL.Scheme != "https" || req.URL.Host == "" {
		// net/http refuses it, but a base of another kind may have sent it. What
		// has the shape of an I/O error shows that.
		var netErr net.Error
		return final, !errors.As(err, &netErr) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF)
	}
	var op *net.OpError
	if errors.As(err, &op) && (op.Op == "dial" || op.Op == "proxyconnect" || op.Op == "socks connect") {
		return retry, true
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return retry, true
	}
	var stream streamError
	if errors.As(err, &stream) && stream.Code == refusedStream {
		return retry, true
	}
	return retry, false
}

// streamError is net/http's error of an HTTP/2 stream, which is not exported
// but converts itself to any struct of the same shape.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (e streamError) Error() string { return "stream error " + strconv.Itoa(int(e.Code)) }

// refusedStream is REFUSED_STREAM: nothing was processed (RFC 9113, section 8.7).
const refusedStream = 7

// sendable reports whether method and header can be sent at all. What net/http
// refuses comes back as an error like any other, and is no different the next
// time.
func sendable(req *http.Request) bool {
	if req.Method != "" && !isToken(req.Method) || req.Body == nil && req.ContentLength != 0 {
		return false
	}
	for name, values := range req.Header {
		if !isToken(name) {
			return false
		}
		for _, v := range values {
			for i := range len(v) {
				if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
					return false
				}
			}
		}
	}
	return true
}

// isToken reports whether s is a token of RFC 9110, section 5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0) {
			return false
		}
	}
	return s != ""
}

// retryAfter returns how long the answer asks to wait, from now on: by
// Retry-After-Ms in milliseconds, or by Retry-After (RFC 9110, section 10.2.3)
// in seconds or as a date. Fractions are taken as well, and what exceeds a
// Duration is the longest one. ok is false where there is neither, or nothing
// that could be read.
func retryAfter(h http.Header, now time.Time) (d time.Duration, ok bool) {
	if v := h.Get("Retry-After-Ms"); v != "" {
		if d, ok := parseDecimal(v, time.Millisecond); ok {
			return d, true
		}
	}
	v := strings.TrimSpace(h.Get("Retry-After"))
	if v == "" {
		return 0, false
	}
	if d, ok := parseDecimal(v, time.Second); ok {
		return d, true
	}
	if t, err := http.ParseTime(v); err == nil { // all three forms of a date
		return max(0, t.Sub(now)), true
	}
	return 0, false
}

// parseDecimal reads a number that is not negative, such as "120" or "0.5".
func parseDecimal(s string, unit time.Duration) (time.Duration, bool) {
	s = strings.TrimSpace(s)
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && c != '.' {
			return 0, false // no signs, exponents, "inf" or "0x"
		}
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, false
	}
	if f *= float64(unit); f >= math.MaxInt64 {
		return math.MaxInt64, true
	}
	return time.Duration(f), true
}
