package storetest

import (
	"time"

	"github.com/effectonce/idempotency/dedup"
)

var resolveTests = []test{
	{"ResolveWithResponse", resolveWithResponse},
	{"ResolveFrees", resolveFrees},
	{"ResolveRefuses", resolveRefuses},
}

func resolveWithResponse(e *env) {
	for name, makeRow := range map[string]func(dedup.Key) dedup.Token{"unknown": e.unknown, "abandoned": e.abandoned} {
		k := e.other("-" + name)
		token := makeRow(k)
		r := answer("by the operator")
		e.ok(e.s.Resolve(e.ctx, k, &r, 3*ttl), "Resolve", "a row that is "+name+" is an operator's to decide")
		res := e.want(k, dedup.Completed, "Resolve with a response completes the row")
		e.response(res.Record.Response, r, "later claims get the operator's answer")
		got := e.get(k)
		e.near("ExpiresAt", got.ExpiresAt, got.CreatedAt.Add(3*ttl)) // for ttl, from now
		e.fenced(k, token, "the operator has decided: the run that was in doubt must not give out an answer of its own")
		e.response(e.get(k).Response, r, "the operator's answer stays")
		e.is(e.s.Resolve(e.ctx, k, nil, 0), dedup.ErrNotResolvable, "a second Resolve", "a completed row is not in doubt")
	}
	k := e.other("-empty")
	e.unknown(k)
	e.ok(e.s.Resolve(e.ctx, k, &dedup.Response{}, ttl), "Resolve", "an empty response is a response")
	e.want(k, dedup.Completed, "an empty response is a response, not a removal")
}

func resolveFrees(e *env) {
	for name, makeRow := range map[string]func(dedup.Key) dedup.Token{"unknown": e.unknown, "abandoned": e.abandoned} {
		k := e.other("-" + name)
		token := makeRow(k)
		e.ok(e.s.Resolve(e.ctx, k, nil, 0), "Resolve", "nil frees a row that is "+name)
		e.absent(k, "Resolve with nil removes the row")
		e.fenced(k, token, "the row is gone")
		r := e.want(k, dedup.Won, "a freed operation may run again")
		if r.Record.Attempt != 1 {
			e.t.Errorf("Record.Attempt is %d, want 1: a new row counts from the start", r.Record.Attempt)
		}
	}
}

func resolveRefuses(e *env) {
	r := answer("by the operator")
	for _, response := range []*dedup.Response{nil, &r} {
		suffix := "-free"
		if response != nil {
			suffix = "-respond"
		}
		k := e.other("-absent" + suffix)
		e.is(e.s.Resolve(e.ctx, k, response, ttl), dedup.ErrNotFound, "Resolve", "there is no row")
		e.absent(k, "Resolve makes no row")

		k = e.other("-live" + suffix)
		token := e.won(k)
		e.is(e.s.Resolve(e.ctx, k, response, ttl), dedup.ErrNotResolvable, "Resolve", "a live row may still finish by itself")
		e.ok(e.s.Complete(e.ctx, k, token, done("by the run")), "Complete", "a refused Resolve changes nothing")
		e.is(e.s.Resolve(e.ctx, k, response, ttl), dedup.ErrNotResolvable, "Resolve", "a completed row is not in doubt")
		e.response(e.get(k).Response, answer("by the run"), "a refused Resolve changes nothing")

		k = e.other("-renewed" + suffix)
		token = e.abandoned(k)
		e.ok(e.s.Renew(e.ctx, k, token, time.Hour), "Renew", "nobody took the row over")
		e.is(e.s.Resolve(e.ctx, k, response, ttl), dedup.ErrNotResolvable, "Resolve", "a renewed row is live again")
	}
}
