package server

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// Guard lets each operation of the handlers that it wraps happen once. It is
// safe for concurrent use.
type Guard struct {
	store   dedup.Store
	given   Options // as the caller gave them, for With
	opts    Options
	engine  *dedup.Engine
	prints  *fingerprinter
	dropped dropped
	err     error // why no request can be served
}

// New returns a guard that keeps its table in store. It never fails: a setting
// that can't work is what every request is answered with (TypeMisconfigured),
// and what [Guard.Validate] returns at start-up.
func New(store dedup.Store, o Options) *Guard {
	g := &Guard{store: store, given: o, opts: o.withDefaults(), prints: new(fingerprinter)}
	g.dropped = newDropped(o.DropHeaders)
	g.engine = &dedup.Engine{
		Store:     store,
		Mode:      o.Mode,
		Lease:     o.Lease,
		TTL:       o.TTL,
		Wait:      o.Wait,
		Limit:     o.Limit,
		Abandoned: o.Abandoned,
		Retries:   o.Retries,
		Observer:  o.Observer,
		Logger:    o.Logger,
	}
	if o.Recover != nil {
		g.engine.Recover = recoverOutcome
	}
	if g.err = g.opts.validate(); g.err == nil {
		g.err = g.engine.Validate()
	}
	return g
}

// Validate returns why g can't work, or nil.
func (g *Guard) Validate() error {
	if g.err != nil {
		return fmt.Errorf("server: invalid options: %w", g.err)
	}
	return nil
}

// With returns a guard on the same store with some options changed, for a
// route that needs others:
//
//	guard.With(func(o *server.Options) { o.Required = true }).Handler(charge)
func (g *Guard) With(change func(o *Options)) *Guard {
	o := g.given
	change(&o)
	return New(g.store, o)
}

// Handler returns next behind the guard. It has the form that routers take as
// middleware.
//
// Authentication belongs before the guard, which needs to know the tenant, and
// which answers a replay without asking next again. So does what is to happen
// for every request (request ids, CORS, compression of responses): headers
// that were set before the guard are not stored.
func (g *Guard) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.serve(w, r, next)
	})
}

func (g *Guard) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if g.err != nil {
		// Also for methods that would pass, so that it can't be missed.
		g.fail(w, r, misconfigured(g.Validate()))
		return
	}
	if !slices.Contains(g.opts.Methods, r.Method) {
		next.ServeHTTP(w, r)
		return
	}
	key, err := keyOf(r.Header, g.opts.Header)
	switch {
	case err != nil:
		g.fail(w, r, &Problem{Type: TypeKeyInvalid, Status: http.StatusBadRequest,
			Title: "The idempotency key is malformed", Detail: err.Error(), Err: err})
		return
	case key == "" && g.opts.Required:
		g.fail(w, r, &Problem{Type: TypeKeyMissing, Status: http.StatusBadRequest,
			Title: "The request needs an idempotency key", Detail: "Send one in the " + g.opts.Header + " header."})
		return
	case key == "":
		next.ServeHTTP(w, r)
		return
	}
	x := &exchange{g: g, w: w, r: r, next: next}
	if p := x.prepare(key); p != nil {
		g.fail(w, r, p)
		return
	}
	x.do()
}

// fail sends p.
func (g *Guard) fail(w http.ResponseWriter, r *http.Request, p *Problem) {
	g.opts.ErrorHandler(w, r, p)
}

func (g *Guard) log(ctx context.Context, level slog.Level, msg string, attrs ...slog.Attr) {
	if g.opts.Logger != nil {
		g.opts.Logger.LogAttrs(ctx, level, "server: "+msg, attrs...)
	}
}

func misconfigured(err error) *Problem {
	return &Problem{Type: TypeMisconfigured, Status: http.StatusInternalServerError,
		Title: "The server is misconfigured", Err: err}
}

// retryAfter sets the header of that name to d, in whole seconds and at least
// one (RFC 9110, section 10.2.3, knows no less).
func retryAfter(h http.Header, d time.Duration) {
	h.Set(retryAfterHeader, strconv.Itoa(int(max(1, math.Ceil(d.Seconds())))))
}
