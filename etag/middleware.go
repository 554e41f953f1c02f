package etag

import (
	"context"
	"net/http"
)

// Require refuses requests that would write without saying which state of the
// resource they are meant for: 428 (RFC 6585, section 3), or 400 if a condition
// is malformed. A request says so by If-Match, or by "If-None-Match: *" for a
// resource that must not exist yet; "If-Match: *" counts as well, for clients
// that mean it. GET, HEAD, OPTIONS and TRACE pass, and all other methods need a
// condition, so put it around the routes that have one, not around a whole mux.
//
// Require looks at no resource: use it with [Check], or with a handler that
// checks.
func Require(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if safe(r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		c, err := ParseConditions(r.Header)
		if err != nil {
			WriteProblem(w, invalid(err))
			return
		}
		if !c.Guards() {
			WriteProblem(w, required())
			return
		}
		next.ServeHTTP(w, r)
	})
}

func safe(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// Lookup reads the state of the resource that a request is for. An error that
// is, or wraps, a *[Problem] is answered as it is (404, say); any other with
// 500.
type Lookup func(*http.Request) (State, error)

// Check answers 412 where a condition of the request doesn't hold, 304 where a
// GET or HEAD has the current version already, 400 if a condition is malformed,
// and else runs the handler. Requests without conditions are looked up, too.
//
// The resource may change after the lookup, so Check alone doesn't stop two
// writers at the same moment. The handler does, by writing only if the resource
// is still in the state that was checked, which [Checked] gives it:
//
//	state, _ := etag.Checked(r.Context())
//	version, _ := state.Tag.Version()
//	… UPDATE … SET …, version = version + 1 WHERE id = $1 AND version = $2
//
// and by answering [Failed] if no row was. That is right for every condition
// that the request can carry, several tags and "*" among them.
//
// Put authentication outside of Check: conditions are for requests that would
// succeed without them (RFC 9110, section 13.2.1). For that reason, too, a GET
// or HEAD of what doesn't exist goes to the handler, for its 404. Headers that
// a 304 should have (Cache-Control, Vary) are to be set outside as well. Other
// methods than GET, HEAD, PUT, PATCH, POST and DELETE pass unchecked, if they
// are safe.
func Check(lookup Lookup, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		read := r.Method == http.MethodGet || r.Method == http.MethodHead
		if safe(r.Method) && !read { // section 13.2.1: CONNECT, OPTIONS, TRACE have no conditions
			next.ServeHTTP(w, r)
			return
		}
		c, err := ParseConditions(r.Header)
		if err != nil {
			WriteProblem(w, invalid(err))
			return
		}
		state, err := lookup(r)
		if err != nil {
			WriteProblem(w, lookupFailed(err))
			return
		}
		if state.Exists || !read {
			switch c.Evaluate(r.Method, state) {
			case http.StatusPreconditionFailed:
				WriteProblem(w, Failed(nil))
				return
			case http.StatusNotModified:
				notModified(w, state)
				return
			}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), stateKey{}, state)))
	})
}

type stateKey struct{}

// Checked returns the state that [Check] found the request's conditions to hold
// in, and whether there was a Check.
func Checked(ctx context.Context) (State, bool) {
	s, ok := ctx.Value(stateKey{}).(State)
	return s, ok
}

func notModified(w http.ResponseWriter, s State) {
	if !s.Tag.IsZero() {
		w.Header().Set("ETag", s.Tag.String())
	}
	if !s.Modified.IsZero() {
		w.Header().Set("Last-Modified", s.Modified.UTC().Format(http.TimeFormat))
	}
	w.WriteHeader(http.StatusNotModified)
}
