// Package httppublisher publishes the messages of an outbox over HTTP: each as a
// POST, through [idempotency.Transport], with the message's id as its
// Idempotency-Key. For webhooks, and for calls to other services that must not
// get lost with the process that makes them: enqueued in the transaction that
// decides on it, a call is repeated under one key through crashes and restarts.
//
//	pub := &httppublisher.Publisher{}
//	relay, err := outbox.New(box, pub, outbox.Options{})
package httppublisher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/effectonce/idempotency"
	"github.com/effectonce/idempotency/outbox"
)

// Publisher is an [outbox.Publisher]. The zero value posts to the topics, which
// are then URLs.
type Publisher struct {
	// Client sends the requests. If nil, it is one with an
	// [idempotency.Transport] that follows no redirects. One of your own should
	// have such a Transport, which is what repeats a request at once; the relay
	// repeats it later.
	Client *http.Client

	// URL says where a message goes. If nil, its topic is the URL.
	URL func(m outbox.Message) (string, error)

	// ContentType is that of messages whose headers have none
	// ("application/json" if "").
	ContentType string

	// Prepare changes a request before it is sent, for one to sign it; nil for
	// nothing. An error costs the message an attempt.
	Prepare func(req *http.Request, m outbox.Message) error

	// Parallel is how many requests are under way at once (8 if 0).
	Parallel int

	// Timeout bounds one message, its repetitions included (30 s if 0).
	Timeout time.Duration

	once sync.Once
	own  *http.Client
}

var _ outbox.Publisher = (*Publisher)(nil)

// StatusError is for an answer that is not 2xx. It wraps
// [outbox.ErrUnreachable] where the other side was too busy or down for any
// message (429, 502, 503, 504, and a 409 that says "in progress"), and
// [outbox.ErrPermanent] where this message will never be taken: every other 4xx
// but 401, 403, 408 and 425, of which the sender may yet be put right.
type StatusError struct {
	Code int
	Body string // its first 500 bytes
	kind error
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("httppublisher: answered %d %s: %q", e.Code, http.StatusText(e.Code), e.Body)
}

// Unwrap returns what kind of failure it is, or nil.
func (e *StatusError) Unwrap() error { return e.kind }

// Publish implements [outbox.Publisher].
func (p *Publisher) Publish(ctx context.Context, msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	n := p.Parallel
	if n <= 0 {
		n = 8
	}
	next := make(chan int)
	var all sync.WaitGroup
	for range min(n, len(msgs)) {
		all.Go(func() {
			for i := range next {
				errs[i] = p.send(ctx, msgs[i])
			}
		})
	}
	for i := range msgs {
		next <- i
	}
	close(next)
	all.Wait()
	return errs
}

func (p *Publisher) client() *http.Client {
	if p.Client != nil {
		return p.Client
	}
	p.once.Do(func() {
		p.own = &http.Client{
			Transport: &idempotency.Transport{},
			// A signed body must not go wherever the other side says.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	})
	return p.own
}

func (p *Publisher) send(ctx context.Context, m outbox.Message) error {
	timeout := p.Timeout
	if timeout <= 0 {
		timeout = 30 * time.Second
	}
	ctx, cancel := context.WithTimeout(idempotency.WithKey(ctx, m.ID), timeout)
	defer cancel()
	req, err := p.request(ctx, m)
	if err != nil {
		return err
	}
	resp, err := p.client().Do(req)
	if err != nil {
		if errors.Is(err, idempotency.ErrInvalidKey) || errors.Is(err, idempotency.ErrConfig) {
			return fmt.Errorf("httppublisher: %w", err)
		}
		return fmt.Errorf("httppublisher: %w: %w", outbox.ErrUnreachable, err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return nil
	}
	return &StatusError{Code: resp.StatusCode, Body: string(body), kind: kind(resp)}
}

func (p *Publisher) request(ctx context.Context, m outbox.Message) (*http.Request, error) {
	url := m.Topic
	if p.URL != nil {
		var err error
		if url, err = p.URL(m); err != nil {
			return nil, fmt.Errorf("httppublisher: URL: %w", err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(m.Payload))
	if err != nil {
		return nil, fmt.Errorf("httppublisher: %w: %w", outbox.ErrPermanent, err)
	}
	if req.URL.Scheme != "http" && req.URL.Scheme != "https" || req.URL.Host == "" {
		return nil, fmt.Errorf("httppublisher: %w: %q is no http or https URL", outbox.ErrPermanent, url)
	}
	for k, v := range m.Header {
		req.Header.Set(k, v)
	}
	if req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", p.contentType())
	}
	req.Header.Del("Idempotency-Key") // WithKey has it
	if p.Prepare != nil {
		if err := p.Prepare(req, m); err != nil {
			return nil, fmt.Errorf("httppublisher: Prepare: %w", err)
		}
	}
	return req, nil
}

func (p *Publisher) contentType() string {
	if p.ContentType != "" {
		return p.ContentType
	}
	return "application/json"
}

func kind(resp *http.Response) error {
	switch code := resp.StatusCode; code {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return outbox.ErrUnreachable
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusTooEarly:
		return nil
	case http.StatusConflict:
		if resp.Header.Get("Retry-After") != "" {
			return outbox.ErrUnreachable
		}
		return outbox.ErrPermanent
	default:
		if code >= 400 && code < 500 {
			return outbox.ErrPermanent
		}
		return nil
	}
}
