package etag

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
)

// The types of the problems that this package answers with. They are
// identifiers to compare, stable across versions, and not addresses.
const (
	// TypeRequired, 428: send the request with If-Match, or If-None-Match: *.
	TypeRequired = problemType + "precondition-required"
	// TypeFailed, 412: the resource is not in the state that the request is
	// meant for. Read it again, and decide again.
	TypeFailed = problemType + "precondition-failed"
	// TypeInvalid, 400: a condition is malformed.
	TypeInvalid = problemType + "precondition-invalid"
	// TypeLookup, 500: the resource's state could not be read; nothing was done.
	TypeLookup = problemType + "state-unknown"
)

const problemType = "urn:effectonce:idempotency:"

// Problem is an answer of this package that is not the handler's, sent as
// application/problem+json (RFC 9457).
//
// It is an error, so that a [Lookup] can return one of its own, such as 404 or
// 403, to be sent as it is.
type Problem struct {
	Type   string `json:"type"` // a URI
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`

	// Err is the cause. Clients don't see it.
	Err error `json:"-"`
}

// Error returns the title and, if there is one, the cause.
func (p *Problem) Error() string {
	if p.Err != nil {
		return "etag: " + p.Title + ": " + p.Err.Error()
	}
	return "etag: " + p.Title
}

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// Failed returns the problem of a write that came too late, status 412. It is
// what a handler answers when the write itself finds the resource changed:
//
//	if errors.Is(err, sqlwrite.ErrStale) || errors.Is(err, sqlwrite.ErrGone) {
//		etag.WriteProblem(w, etag.Failed(err))
//	}
func Failed(err error) *Problem {
	return &Problem{
		Type: TypeFailed, Title: "Precondition failed", Status: http.StatusPreconditionFailed, Err: err,
		Detail: "The resource is not in the state that the request is meant for. It was not changed by this request.",
	}
}

// WriteProblem sends p, never to be cached (RFC 6585, section 3).
func WriteProblem(w http.ResponseWriter, p *Problem) {
	body, err := json.Marshal(p)
	if err != nil { // can't be: strings and a number
		http.Error(w, p.Title, p.Status)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(body)
}

func required() *Problem {
	return &Problem{
		Type: TypeRequired, Title: "Precondition required", Status: http.StatusPreconditionRequired,
		Detail: "Read the resource and send its ETag in If-Match, or send If-None-Match: * to create it.",
	}
}

func invalid(err error) *Problem {
	return &Problem{Type: TypeInvalid, Title: "Malformed precondition", Status: http.StatusBadRequest, Detail: err.Error(), Err: err}
}

// lookupFailed is the problem that a Lookup returned, or else a 500.
func lookupFailed(err error) *Problem {
	if p, ok := errors.AsType[*Problem](err); ok && p != nil && p.Status >= 400 && p.Status <= 599 {
		return p
	}
	return &Problem{Type: TypeLookup, Title: "The state of the resource could not be read", Status: http.StatusInternalServerError, Err: err}
}
