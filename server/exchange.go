package server

import (
	"bytes"
	"context"
	"errors"
	"log"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/internal/operation"
)

// exchange is one guarded request on its way to an answer.
type exchange struct {
	g    *Guard
	w    http.ResponseWriter
	r    *http.Request
	next http.Handler

	body        []byte
	key         dedup.Key
	fingerprint fingerprint

	// Of the last run, if any.
	rec        *recorder
	first      recorder // rec of the first run, which is mostly the only one
	cut        bool     // the connection is to be cut instead of ending the answer
	recovered  bool     // Options.Recover ran, not the handler
	recoverErr error    // what it returned
}

// prepare does all that comes before the claim. Its problem means that nothing
// was claimed.
func (x *exchange) prepare(id string) *Problem {
	o := &x.g.opts
	tenant, err := o.Scope(x.r)
	if err == nil && tenant == "" {
		err = errors.New("Options.Scope returned no tenant")
	}
	if err != nil {
		return problemOr(err, &Problem{Type: TypeScopeUnknown, Status: http.StatusInternalServerError,
			Title: "The server can't tell on whose behalf the request is made", Err: err})
	}
	x.key = dedup.Key{Scope: scope(tenant, o.Operation, x.r), ID: id}

	var p *Problem
	if x.body, p = readBody(x.r, o.MaxRequestBody); p != nil {
		return p
	}
	if o.Fingerprint == nil {
		x.fingerprint = x.g.prints.sum(x.r, x.body)
		return nil
	}
	content, err := o.Fingerprint(x.r, x.body)
	if err != nil {
		return problemOr(err, unreadable(http.StatusBadRequest, err))
	}
	x.fingerprint = custom(content)
	return nil
}

// problemOr returns the problem that err is or wraps, or else p.
func problemOr(err error, p *Problem) *Problem {
	errors.As(err, &p)
	return p
}

type exchangeKey struct{}

// do claims and answers.
func (x *exchange) do() {
	ctx := x.r.Context()
	if x.g.engine.Recover != nil {
		ctx = context.WithValue(ctx, exchangeKey{}, x)
	}
	out, err := x.g.engine.Do(ctx, dedup.Request{Key: x.key, Fingerprint: x.fingerprint[:]}, x.work)
	if err != nil {
		x.failed(err)
		return
	}
	switch out.State {
	case dedup.Won:
		x.answer(out)
	case dedup.Completed:
		x.replay(out.Response)
	case dedup.Mismatch:
		x.fail(&Problem{Type: TypeKeyReused, Status: http.StatusUnprocessableEntity,
			Title:  "The idempotency key belongs to another request",
			Detail: "A request with this key was made before, and asked for something else. Use a new key for a new operation."})
	case dedup.InProgress:
		retryAfter(x.w.Header(), out.RetryAfter)
		x.fail(&Problem{Type: TypeInProgress, Status: http.StatusConflict,
			Title:  "The request is still being processed",
			Detail: "An earlier request with this key has not ended. Send this one again later to get its answer."})
	case dedup.Unknown:
		x.w.Header().Set(replayedHeader, "true") // it will not change by itself
		x.fail(&Problem{Type: TypeOutcomeUnknown, Status: http.StatusInternalServerError,
			Title:  "It is not known whether the request took effect",
			Detail: "An earlier run of it was interrupted. It will not be run again with this key; its outcome has to be found out."})
	}
}

// work is the dedup.Work of the handler. In transaction mode it may be called
// several times; nothing of an earlier run is left over.
func (x *exchange) work(ctx context.Context) (dedup.Answer, error) {
	rec := x.record(x.g.opts.Mode == dedup.Lease)
	r := x.request(ctx)
	defer removeFiles(r, x.r)
	if v, stack := call(x.next, rec, r); v != nil {
		return x.panicked(r, v, stack), nil
	}
	rec.finish()
	ans := dedup.Answer{Free: x.free(rec)}
	if !ans.Free {
		ans.Response = rec.response(x.g.dropped)
	}
	return ans, nil
}

// record starts a new recorder.
func (x *exchange) record(mayStream bool) *recorder {
	rec := &x.first
	if x.rec != nil {
		rec = new(recorder)
	}
	rec.start(x)
	rec.mayStream = mayStream
	x.rec, x.cut = rec, false
	return rec
}

// request returns the request for one run of a handler.
func (x *exchange) request(ctx context.Context) *http.Request {
	ctx = operation.With(ctx, strconv.Itoa(len(x.key.Scope))+":"+x.key.Scope+x.key.ID)
	var r *http.Request
	if x.g.opts.Mode == dedup.Transaction {
		r = x.r.Clone(ctx) // another run must not see what this one does to it
	} else {
		r = x.r.WithContext(ctx)
	}
	r.Body = http.NoBody
	if len(x.body) > 0 {
		b := new(bodyReader)
		b.Reset(x.body)
		r.Body = b
	}
	return r
}

// removeFiles removes the files that hold the parts of r's form. net/http's
// server does that for the request that it made itself, but not for others.
func removeFiles(r, original *http.Request) {
	if r.MultipartForm != nil && original.MultipartForm == nil {
		_ = r.MultipartForm.RemoveAll()
	}
}

type bodyReader struct{ bytes.Reader }

func (*bodyReader) Close() error { return nil }

// free reports whether the handler's answer leaves the key free.
func (x *exchange) free(rec *recorder) bool {
	o := &x.g.opts
	return o.Mode == dedup.Transaction && rec.status >= 500 ||
		o.NotExecuted != nil && o.NotExecuted(rec.status, rec.header)
}

// call runs h, and returns the value and the stack of its panic.
func call(h http.Handler, w http.ResponseWriter, r *http.Request) (v any, stack []byte) {
	defer func() {
		if v = recover(); v != nil && v != http.ErrAbortHandler {
			stack = debug.Stack()
		}
	}()
	h.ServeHTTP(w, r)
	return nil, nil
}

// panicked makes the answer of a handler that panicked. It may have had its
// effect, so in lease mode that is the answer for good.
func (x *exchange) panicked(r *http.Request, v any, stack []byte) dedup.Answer {
	if v != http.ErrAbortHandler {
		x.logPanic(v, stack)
	}
	broken := x.rec
	rec := x.record(false)
	x.cut = v == http.ErrAbortHandler || broken.stream
	if broken.stream {
		rec.entry, rec.header = broken.entry, broken.entry.Clone()
	}
	x.g.fail(rec, r, &Problem{Type: TypePanic, Status: http.StatusInternalServerError,
		Title: "The request failed", Detail: "The server failed while it processed the request."})
	rec.finish()
	return dedup.Answer{Response: rec.response(x.g.dropped), Free: x.g.opts.Mode == dedup.Transaction}
}

// logPanic reports a panic where net/http would, if there is no logger.
func (x *exchange) logPanic(v any, stack []byte) {
	if x.g.opts.Logger != nil {
		x.g.log(x.r.Context(), slog.LevelError, "a guarded handler panicked",
			slog.Any("panic", v), slog.String("stack", string(stack)), slog.Any("key", x.key))
		return
	}
	printf := log.Printf
	if srv, ok := x.r.Context().Value(http.ServerContextKey).(*http.Server); ok && srv.ErrorLog != nil {
		printf = srv.ErrorLog.Printf
	}
	printf("server: panic in a guarded handler: %v\n%s", v, stack)
}

// recoverOutcome is the Recover function of the engine.
func recoverOutcome(ctx context.Context, _ dedup.Key, _ dedup.Record) (dedup.Response, error) {
	x := ctx.Value(exchangeKey{}).(*exchange)
	x.recovered = true
	rec := x.record(false)
	r := x.request(ctx)
	defer removeFiles(r, x.r)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x.recoverErr = x.g.opts.Recover(w, r)
	})
	x.recoverErr = errRecoverPanicked // unless it returns
	if v, stack := call(h, rec, r); v != nil {
		x.logPanic(v, stack)
	}
	if x.recoverErr != nil {
		return dedup.Response{}, x.recoverErr
	}
	rec.finish()
	return rec.response(x.g.dropped), nil
}

var errRecoverPanicked = errors.New("server: Options.Recover panicked")

// answer sends the answer of the run that has just ended.
func (x *exchange) answer(out dedup.Outcome) {
	switch {
	case x.cut:
		panic(http.ErrAbortHandler)
	case out.Aborted && x.rec.status < 400:
		// It speaks of success, but all that was done has been undone.
		x.fail(&Problem{Type: TypeRolledBack, Status: http.StatusInternalServerError,
			Title: "The request had no effect", Detail: "Its database transaction failed and was rolled back."})
		return
	case x.recovered:
		x.w.Header().Set(replayedHeader, "true")
	}
	x.rec.send()
}

// replay sends a stored answer.
func (x *exchange) replay(stored dedup.Response) {
	h := x.w.Header()
	h.Set(replayedHeader, "true")
	var rec record
	var err error
	if len(stored.Header) > 0 { // none: an operator's answer may have no headers
		rec, err = decodeRecord(stored.Header)
	}
	if err == nil && (stored.Code < 200 || stored.Code > 999) {
		err = errRecord
	}
	if err != nil {
		x.g.log(x.r.Context(), slog.LevelError, "a stored answer can't be read", slog.Any("err", err), slog.Any("key", x.key))
		x.fail(&Problem{Type: TypeOutcomeUnknown, Status: http.StatusInternalServerError,
			Title: "The answer to the request can't be read", Detail: "The request was processed and will not be run again.", Err: err})
		return
	}
	for _, c := range rec.header {
		c.apply(h)
	}
	if rec.tombstone {
		x.fail(&Problem{Type: TypeResponseGone, Status: http.StatusGone, OriginalStatus: stored.Code,
			Title: "The request is done; its response was not kept", Detail: "The response was too large to keep. The request will not be run again."})
		return
	}
	for _, c := range rec.trailer {
		if strings.HasPrefix(c.name, http.TrailerPrefix) {
			c.apply(h)
		}
	}
	x.w.WriteHeader(stored.Code)
	if len(stored.Body) > 0 {
		_, _ = x.w.Write(stored.Body)
	}
	for _, c := range rec.trailer {
		c.apply(h)
	}
}

// failed answers where the engine has no outcome.
func (x *exchange) failed(err error) {
	if x.rec != nil && x.rec.stream {
		panic(http.ErrAbortHandler) // the rest would look like success
	}
	pending := x.recoverErr != nil || errors.Is(err, dedup.ErrLeaseLost) || errors.Is(err, dedup.ErrNotStored)
	switch {
	case errors.Is(err, dedup.ErrConfig) || errors.Is(err, dedup.ErrInvalidKey):
		x.fail(misconfigured(err))
	case errors.Is(err, dedup.ErrTxEnded):
		x.fail(&Problem{Type: TypeOutcomeUnknown, Status: http.StatusInternalServerError,
			Title: "It is not known whether the request took effect", Err: err})
	case pending && !errors.Is(err, dedup.ErrNotCommitted):
		retryAfter(x.w.Header(), time.Second)
		x.fail(&Problem{Type: TypeOutcomePending, Status: http.StatusServiceUnavailable,
			Title:  "The outcome of the request is not known yet",
			Detail: "Send it again with the same key to learn it.", Err: err})
	default:
		retryAfter(x.w.Header(), time.Second)
		x.fail(&Problem{Type: TypeUnavailable, Status: http.StatusServiceUnavailable,
			Title: "The request can't be processed now", Detail: "Nothing was done. Send it again with the same key.", Err: err})
	}
}

func (x *exchange) fail(p *Problem) { x.g.fail(x.w, x.r, p) }

func (x *exchange) warn(msg string) {
	x.g.log(x.r.Context(), slog.LevelWarn, msg, slog.Any("key", x.key))
}
