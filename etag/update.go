package etag

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// Errors of [Update], wrapped in an *[UpdateError]. An error of the change
// function comes back wrapped in one, too.
var (
	// ErrConflict: other writers were faster, each time. Nothing was written.
	ErrConflict = errors.New("etag: other writers were faster each time")

	// ErrLostAnswer: the write was refused with 412, but had been sent more
	// than once, so an earlier sending, whose answer was lost, may have done
	// it. Read the resource to decide, or set [Updater.Key].
	ErrLostAnswer = errors.New("etag: refused, but an earlier sending may have been done")

	// ErrNoStrongTag: the server gives the resource no ETag, or a weak one,
	// which If-Match never matches. Nothing was written.
	ErrNoStrongTag = errors.New("etag: the resource has no strong ETag")

	// ErrTooLarge: the resource is larger than [Updater.MaxBody]. Nothing was
	// written.
	ErrTooLarge = errors.New("etag: the resource is too large")

	// ErrRedirected: the resource is elsewhere, so that its tag may be
	// another's, or a redirect came in answer to the write, which net/http may
	// have turned into a read. Use the address that it redirects to.
	ErrRedirected = errors.New("etag: redirected")

	// ErrStatus: the server answered a status that is neither success nor 412;
	// UpdateError.Status has it.
	ErrStatus = errors.New("etag: unexpected status")
)

// UpdateError says how far an update came.
type UpdateError struct {
	Method   string // of the request that failed, "GET" or "PUT"; empty if none did
	Attempts int    // rounds begun: reads, each with the write that follows
	Status   int    // of the last answer; 0 if there was none

	// Ambiguous: the write may have been done. Where it is false, nothing was
	// written.
	Ambiguous bool

	Err error
}

// Error says what failed, when, and what is known of the write.
func (e *UpdateError) Error() string {
	s := "etag: update"
	if e.Method != "" {
		s += ": " + e.Method
	}
	if e.Status != 0 {
		s += fmt.Sprintf(": status %d", e.Status)
	}
	s += fmt.Sprintf(", round %d: %v", e.Attempts, e.Err)
	if e.Ambiguous {
		s += " (the write may have been done)"
	}
	return s
}

// Unwrap returns the cause.
func (e *UpdateError) Unwrap() error { return e.Err }

// Representation is a resource as it was read, or is to be written.
type Representation struct {
	Exists      bool   // false for one that was answered 404 or 410
	Tag         Tag    // the ETag header; after a write, none if the server sent none
	ContentType string // the Content-Type header
	Body        []byte
}

// Change makes the content to write of the current one. It may run several
// times, each time with a newer one, so it should have no effects of its own;
// an error ends the update. Of what it returns, Body and ContentType count; an
// empty ContentType means the current one's. It must not modify current.Body.
type Change func(current Representation) (next Representation, err error)

// Update reads the resource at url (GET), and writes back (PUT) what change
// makes of it, if nobody else has written it in between (If-Match, or
// "If-None-Match: *" where there was none). If somebody has, it begins anew, 5
// times in all. If change leaves a resource as it is, nothing is sent. It
// returns what was written, with its new tag.
//
// client may be nil, for http.DefaultClient. It may retry by itself, also with
// this module's Transport; see the package's text on lost answers. For other
// settings, use an [Updater]. Every error is an *[UpdateError].
func Update(ctx context.Context, client *http.Client, url string, change Change) (Representation, error) {
	return Updater{Client: client}.Update(ctx, url, change)
}

// Updater has the settings of an update. The zero value works.
type Updater struct {
	Client   *http.Client // default: http.DefaultClient
	Attempts int          // rounds, the first included; default 5
	MaxBody  int64        // bytes of the largest resource to read; default 1 MiB
	Header   http.Header  // sent with each request, as it is

	// Key, if set, is asked for an idempotency key for each round's write, and
	// must return another each time: a new round is another request. Set it
	// only if the server guards PUT, as package server can. A write that is
	// sent again is then answered as it was the first time, and a 412 is taken
	// at its word.
	Key func() (string, error)
}

// Update is the function [Update] with u's settings.
func (u Updater) Update(ctx context.Context, url string, change Change) (Representation, error) {
	if u.Attempts < 0 || u.MaxBody < 0 {
		return Representation{}, &UpdateError{Err: errors.New("etag: Attempts and MaxBody must not be negative")}
	}
	if change == nil {
		return Representation{}, &UpdateError{Err: errors.New("etag: no change function")}
	}
	if u.Client == nil {
		u.Client = http.DefaultClient
	}
	if u.Attempts == 0 {
		u.Attempts = 5
	}
	if u.MaxBody == 0 {
		u.MaxBody = 1 << 20
	}
	for n := 1; ; n++ {
		next, done, err := u.round(ctx, url, change)
		if err != nil {
			err.Attempts = n
			return Representation{}, err
		}
		if done {
			return next, nil
		}
		refused := &UpdateError{Method: http.MethodPut, Attempts: n, Status: http.StatusPreconditionFailed}
		if n == u.Attempts {
			refused.Err = ErrConflict
			return Representation{}, refused
		}
		if err := pause(ctx, n); err != nil {
			refused.Err = err
			return Representation{}, refused
		}
	}
}

// round reads and writes once. done is false if the write was refused for sure.
func (u Updater) round(ctx context.Context, url string, change Change) (_ Representation, done bool, _ *UpdateError) {
	current, uerr := u.read(ctx, url)
	if uerr != nil {
		return Representation{}, false, uerr
	}
	next, err := change(current)
	if err != nil {
		return Representation{}, false, &UpdateError{Err: err}
	}
	if next.ContentType == "" {
		next.ContentType = current.ContentType
	}
	if current.Exists && next.ContentType == current.ContentType && bytes.Equal(next.Body, current.Body) {
		return current, true, nil
	}
	if current.Exists && (current.Tag.IsZero() || current.Tag.IsWeak()) {
		return Representation{}, false, &UpdateError{Method: http.MethodGet, Err: ErrNoStrongTag}
	}
	return u.write(ctx, url, current, next)
}

func (u Updater) read(ctx context.Context, url string) (Representation, *UpdateError) {
	fail := &UpdateError{Method: http.MethodGet}
	req, err := u.request(ctx, http.MethodGet, url, nil)
	if err != nil {
		fail.Err = err
		return Representation{}, fail
	}
	resp, err := u.Client.Do(req)
	if err != nil {
		fail.Err = err
		return Representation{}, fail
	}
	defer drain(resp.Body)
	fail.Status = resp.StatusCode
	// A redirected request has the answer that redirected it.
	if resp.Request != nil && resp.Request.Response != nil {
		fail.Err = ErrRedirected
		return Representation{}, fail
	}
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound, http.StatusGone:
		return Representation{}, nil
	default:
		fail.Err = ErrStatus
		return Representation{}, fail
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, u.MaxBody+1))
	if err == nil && int64(len(body)) > u.MaxBody {
		err = ErrTooLarge
	}
	if err != nil {
		fail.Err = err
		return Representation{}, fail
	}
	tag, _ := Parse(resp.Header.Get("ETag")) // none if malformed: ErrNoStrongTag
	return Representation{Exists: true, Tag: tag, ContentType: resp.Header.Get("Content-Type"), Body: body}, nil
}

func (u Updater) write(ctx context.Context, url string, current, next Representation) (_ Representation, done bool, _ *UpdateError) {
	fail := &UpdateError{Method: http.MethodPut}
	// A transport may send a request several times without telling, so count.
	var sent atomic.Int32
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Add(1) }})
	req, err := u.request(ctx, http.MethodPut, url, next.Body)
	if err == nil && u.Key != nil {
		var key string
		key, err = u.Key()
		req.Header.Set("Idempotency-Key", key)
	}
	if err != nil {
		fail.Err = err
		return Representation{}, false, fail
	}
	if next.ContentType != "" {
		req.Header.Set("Content-Type", next.ContentType)
	}
	if current.Exists {
		req.Header.Set("If-Match", current.Tag.String())
	} else {
		req.Header.Set("If-None-Match", "*")
	}
	resp, err := u.Client.Do(req)
	if err != nil {
		// What the transport did is not known, but for other transports than
		// net/http's a count of 0 proves nothing.
		fail.Err, fail.Ambiguous = err, true
		return Representation{}, false, fail
	}
	defer drain(resp.Body)
	fail.Status = resp.StatusCode
	switch {
	case resp.Request != nil && resp.Request.Method != http.MethodPut,
		resp.StatusCode >= 300 && resp.StatusCode < 400:
		fail.Err, fail.Ambiguous = ErrRedirected, true // 303 may mean "done, see there"
		return Representation{}, false, fail
	case resp.StatusCode == http.StatusPreconditionFailed:
		if sent.Load() > 1 && u.Key == nil {
			fail.Err, fail.Ambiguous = ErrLostAnswer, true
			return Representation{}, false, fail
		}
		return Representation{}, false, nil
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		fail.Err = ErrStatus
		fail.Ambiguous = resp.StatusCode >= 500 || sent.Load() > 1
		return Representation{}, false, fail
	}
	next.Exists = true
	next.Tag, _ = Parse(resp.Header.Get("ETag"))
	return next, true, nil
}

func (u Updater) request(ctx context.Context, method, url string, body []byte) (*http.Request, error) {
	var r io.Reader // a nil one, not a nil *bytes.Reader, for GET
	if method == http.MethodPut {
		r = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		return nil, err
	}
	if u.Header != nil {
		req.Header = u.Header.Clone()
	}
	// Servers and proxies that compress give the compressed form another tag,
	// or weaken it, and net/http asks for compression unless told otherwise.
	req.Header.Set("Accept-Encoding", "identity")
	return req, nil
}

// drain reads a little of what is left, so that the connection can be used
// again, and closes.
func drain(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, 64<<10)
	body.Close()
}

// pause keeps writers who were refused together from meeting again: up to 20 ms
// after the first round, twice that after each further one, at most 1 s.
func pause(ctx context.Context, round int) error {
	most := min(20*time.Millisecond<<min(round-1, 10), time.Second)
	t := time.NewTimer(rand.N(most))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
