package idempotency

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// operationRun is one logical operation on its way. go-retryablehttp runs the
// loop; what it is told by its hooks and by the round tripper beneath it is
// decided here, since the hooks don't get the request and what was answered
// before.
//
// The loop is given an empty request and no body, and attempt puts the real one
// in its place. So neither the loop nor the http.Client in it can count, copy,
// buffer or redirect anything, which they would do.
type operationRun struct {
	t          *Transport
	ctx        context.Context // the caller's
	req        http.Request    // as it is sent
	body       requestBody
	policy     RetryPolicy
	key        string
	idempotent bool // sending it again does no harm

	attempts  int  // attempts that were sent
	counted   int  // of these, the ones that count against MaxAttempts
	begun     bool // the base was given the last attempt
	ambiguous bool
	pauses    backOff
	wait      time.Duration // before the next attempt
	waitUntil time.Time     // end of the patience with a request in progress
	retried   bool          // a token of the budget was taken
	began     time.Time     // of the attempt

	status  int   // of the last answer
	err     error // of the last attempt
	refused error // why there was no further attempt, where that matters
	cancel  context.CancelCauseFunc
	timer   *time.Timer // of the attempt's timeout, nil once it is over

	// What the loop needs, here so that it is one allocation with the rest.
	loop   retryablehttp.Client
	client http.Client
	asked  http.Request // what the loop sends

	// The base may repeat a request by itself, as net/http does on a stale
	// connection. Then an error from dialling says nothing about the send
	// before, so what is seen of it is kept: that it asked for the body once
	// more, or, without one, that it had a connection. Atomic since a base may
	// go on in the background.
	touched atomic.Bool
}

func (o *operationRun) run() (*http.Response, error) {
	o.client.Transport = (*attempt)(o)
	o.loop.HTTPClient = &o.client
	o.loop.RetryMax = math.MaxInt
	o.loop.CheckRetry = o.checkRetry
	// The wait comes with the minimum, and the error is ours already.
	o.loop.Backoff = func(wait, _ time.Duration, _ int, _ *http.Response) time.Duration { return wait }
	o.loop.ErrorHandler = func(_ *http.Response, err error, _ int) (*http.Response, error) { return nil, err }

	o.asked = o.req // for its context, method and URL
	o.asked.Header = http.Header{}
	o.asked.Body, o.asked.GetBody, o.asked.ContentLength, o.asked.Trailer = nil, nil, 0, nil

	resp, err := o.loop.Do(&retryablehttp.Request{Request: &o.asked})
	o.body.close()
	if err != nil {
		return nil, o.fail(err)
	}
	return o.restore(resp), nil
}

// bodyForBase is the GetBody that the base sees.
func (o *operationRun) bodyForBase() (io.ReadCloser, error) {
	o.touched.Store(true)
	return o.body.getBody()
}

// fail returns the operation's error.
func (o *operationRun) fail(err error) error {
	if o.err != nil {
		err = o.err // without what the layers between have wrapped around it
	}
	if cerr := ended(o.ctx); cerr != nil && !errors.Is(err, o.ctx.Err()) {
		err = fmt.Errorf("%w (last attempt: %w)", cerr, err)
	}
	if o.refused != nil {
		err = fmt.Errorf("%w; %w", err, o.refused)
	}
	return &Error{Key: o.key, Attempts: o.attempts, Ambiguous: o.ambiguous, Err: err}
}

// restore makes the response what the base has returned.
func (o *operationRun) restore(resp *http.Response) *http.Response {
	resp.Request = &o.req // where a redirect finds the key
	if o.cancel != nil && resp.Body != nil {
		if w, ok := resp.Body.(io.ReadWriteCloser); ok {
			resp.Body = &cancelPipe{w, o.cancel}
		} else {
			resp.Body = &cancelBody{resp.Body, o.cancel}
		}
	}
	return resp
}

// checkRetry decides what becomes of an attempt. The error it returns ends the
// operation.
func (o *operationRun) checkRetry(_ context.Context, resp *http.Response, err error) (bool, error) {
	if err != nil {
		return o.afterError(err)
	}
	resp.StatusCode = o.status
	v := o.t.Provider.judgeResponse(resp, o.key != "")
	if v != final && o.plan(v, resp.Header, nil) {
		if c := resp.StatusCode; c != http.StatusTooManyRequests && c != http.StatusTooEarly {
			o.ambiguous = true // the server, or one before it, has seen the request
		}
		o.observe(resp.StatusCode, nil, true)
		drain(resp.Body)
		resp.Body = http.NoBody
		o.endAttempt(nil)
		o.loop.RetryWaitMin = o.wait
		return true, nil
	}
	if berr := o.bufferResponse(resp); berr != nil {
		// The server has acted and its answer is lost: as good as none.
		resp.Body = http.NoBody
		o.touched.Store(true)
		return o.afterError(berr)
	}
	if _, kept := resp.Body.(*bufferedBody); o.stopTimer() && !kept {
		// Its time was up just now, and reading the body would fail by it.
		_ = resp.Body.Close()
		resp.Body = http.NoBody
		if o.err = ended(o.ctx); o.err == nil {
			o.err = ErrAttemptTimeout
		}
		return o.afterError(o.err)
	}
	o.observe(resp.StatusCode, nil, false)
	if resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests {
		o.policy.Budget.succeeded(o.retried)
	}
	return false, nil
}

func (o *operationRun) afterError(err error) (bool, error) {
	if o.err == nil { // else it is the base's own, without wrapping
		o.err = err
	}
	v, notSent := judgeError(&o.req, o.err)
	notSent = !o.begun || notSent && !o.touched.Load()
	o.ambiguous = o.ambiguous || !notSent
	o.endAttempt(nil)
	again := false
	if v == retry && o.begun && o.ctx.Err() == nil {
		again = o.plan(retry, nil, &notSent)
	}
	if o.begun {
		o.observe(0, o.err, again)
	}
	if !again {
		return false, o.err
	}
	o.loop.RetryWaitMin = o.wait
	return true, nil
}

// plan reports whether there is to be another attempt, and sets the wait. For
// an attempt that failed, notSent says whether it certainly was not sent.
func (o *operationRun) plan(v verdict, h http.Header, notSent *bool) bool {
	if !o.idempotent && (notSent == nil || !*notSent) {
		return false // repeating it might do it twice
	}
	if o.policy.MaxAttempts == 1 {
		return false
	}
	if o.body.once {
		if o.idempotent {
			o.refused = ErrBodyNotRepeatable
		}
		return false
	}
	now := time.Now()
	o.wait = max(minWait, o.pauses.next(&o.policy))
	if asked, ok := retryAfter(h, now); ok {
		if asked > o.policy.MaxRetryAfter {
			return false
		}
		if asked >= minWait { // "0" and dates gone by leave it to us
			o.wait = asked
		}
	}
	if v == inProgress {
		o.counted-- // is waited out by time, not by number
		if o.waitUntil.IsZero() {
			o.waitUntil = now.Add(o.policy.MaxInProgress)
		}
		if now.Add(o.wait).After(o.waitUntil) {
			return false
		}
	} else if o.counted >= o.policy.MaxAttempts {
		return false
	}
	if deadline, ok := o.ctx.Deadline(); ok && now.Add(o.wait).After(deadline) {
		return false
	}
	if v == inProgress {
		return true
	}
	if !o.policy.Budget.take() {
		o.refused = ErrBudgetSpent
		return false
	}
	o.retried = o.policy.Budget != nil
	return true
}

// minWait keeps "Retry-After: 0" and a lucky draw of the jitter from becoming a
// busy loop.
const minWait = time.Millisecond

func (o *operationRun) bufferResponse(resp *http.Response) error {
	limit := sizeOr(o.t.MaxBufferedResponse, DefaultMaxBufferedResponse)
	if o.key == "" || limit < 0 || !hasBody(resp) || streams(resp) || o.t.Stream != nil && o.t.Stream(&o.req) {
		return nil
	}
	err := buffer(resp, limit)
	if err != nil && o.timedOut() {
		err = ErrAttemptTimeout
	}
	if err != nil {
		o.err = fmt.Errorf("the answer broke off: %w", err)
		return o.err
	}
	return nil
}

func (o *operationRun) observe(status int, err error, again bool) {
	wait := o.wait
	if !again {
		wait = 0
	}
	if o.t.OnAttempt != nil {
		o.t.OnAttempt(o.ctx, Attempt{
			Request: &o.req, Key: o.key, Number: o.attempts, Status: status, Err: err,
			Elapsed: time.Since(o.began), Retry: again, Wait: wait,
		})
	}
	if o.t.Logger != nil && again {
		o.t.Logger.LogAttrs(o.ctx, slog.LevelInfo, "idempotency: retrying",
			slog.String("method", methodOf(&o.req)), slog.String("host", o.req.URL.Host),
			slog.Int("attempt", o.attempts), slog.Int("status", status), slog.Any("error", err), slog.Duration("wait", wait))
	}
}

// attempt is the round tripper beneath the loop.
type attempt operationRun

// RoundTrip implements [http.RoundTripper].
func (a *attempt) RoundTrip(*http.Request) (*http.Response, error) {
	o := (*operationRun)(a)
	o.err, o.begun = nil, false
	if err := o.ctx.Err(); err != nil { // while it waited, just as the wait was over
		return nil, err
	}
	req := &o.req
	if o.attempts > 0 {
		// The one before may still be in use: net/http goes on writing a request
		// while it returns an answer.
		again := o.req
		again.Header = o.req.Header.Clone() // some wrappers write to it
		req = &again
	}
	if !o.body.none {
		body, err := o.body.next()
		if err != nil {
			o.err = fmt.Errorf("the request's body for the next attempt: %w", err)
			return nil, o.err
		}
		req.Body = body
	}
	o.attempts++
	o.counted++
	o.begun = true
	o.touched.Store(false)
	if o.t.OnAttempt != nil {
		o.began = time.Now()
	}
	if o.body.none && o.key != "" {
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
			GotConn: func(httptrace.GotConnInfo) { o.touched.Store(true) },
		}))
	}
	if d := o.policy.AttemptTimeout; d > 0 {
		ctx, cancel := context.WithCancelCause(req.Context())
		o.cancel = cancel
		o.timer = time.AfterFunc(d, func() { cancel(ErrAttemptTimeout) })
		req = req.WithContext(ctx)
	}
	resp, err := o.t.base().RoundTrip(req)
	if err != nil {
		if resp != nil && resp.Body != nil { // not allowed, but seen
			_ = resp.Body.Close()
		}
		var noTLS tls.RecordHeaderError
		switch {
		case o.timedOut():
			err = ErrAttemptTimeout
		case errors.As(err, &noTLS) && noTLS.Conn != nil && string(noTLS.RecordHeader[:]) == "HTTP/":
			err = http.ErrSchemeMismatch // http.Client's own, which doesn't look into an Error
		}
		o.err = err
		return nil, err
	}
	if resp == nil {
		o.err = errors.New("the base RoundTripper returned neither response nor error")
		return nil, o.err
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	// The caller's client follows redirects, or does not. The inner one must not
	// know of them: it would open another body, or complain of the Location.
	o.status, resp.StatusCode = resp.StatusCode, http.StatusOK
	return resp, nil
}

// timedOut reports whether it was AttemptTimeout that ended the attempt. It ends
// the attempt's time.
func (o *operationRun) timedOut() bool {
	return o.stopTimer() && o.ctx.Err() == nil
}

// endAttempt frees what an attempt holds that nobody will read from.
func (o *operationRun) endAttempt(cause error) {
	o.stopTimer()
	if o.cancel != nil {
		o.cancel(cause)
		o.cancel = nil
	}
}

// stopTimer ends the attempt's time and reports whether it was over already.
func (o *operationRun) stopTimer() bool {
	t := o.timer
	o.timer = nil
	return t != nil && !t.Stop()
}

// cancelPipe is cancelBody for a connection that was upgraded.
type cancelPipe struct {
	io.ReadWriteCloser
	cancel context.CancelCauseFunc
}

// Close implements [io.Closer].
func (p *cancelPipe) Close() error {
	err := p.ReadWriteCloser.Close()
	p.cancel(nil)
	return err
}
