package server

import (
	"encoding/json"
	"net/http"
)

// Names of the headers that the guard sends.
const (
	replayedHeader   = "Idempotent-Replayed"
	retryAfterHeader = "Retry-After"
)

// The types of the problems that a guard answers with. They are identifiers to
// compare, stable across versions, and not addresses. What a client may do:
//
//	type             status  the same request again, with the same key
//	...:key-missing     400  will not work without a key
//	...:key-invalid     400  will not work
//	...:body-unreadable 400  may work; nothing was done
//	...:body-too-large  413  will not work; nothing was done
//	...:key-reused      422  will not work: the key is another request's
//	...:in-progress     409  will get the answer; wait for Retry-After
//	...:unavailable     503  may work; nothing was done
//	...:outcome-pending 503  will get the definite answer; something may have been done
//	...:rolled-back     500  may work; what was done was undone
//	...:outcome-unknown 500  will get the same until somebody resolves it
//	...:response-gone   410  will get the same: it was done, its answer is not kept
//	...:panic           500  will get the same in lease mode; may work in transaction mode
//	...:scope-unknown   500  may work; nothing was done
//	...:misconfigured   500  will not work until the server is set right; nothing was done
const (
	TypeKeyMissing     = problemType + "key-missing"
	TypeKeyInvalid     = problemType + "key-invalid"
	TypeBodyUnreadable = problemType + "body-unreadable"
	TypeBodyTooLarge   = problemType + "body-too-large"
	TypeKeyReused      = problemType + "key-reused"
	TypeInProgress     = problemType + "in-progress"
	TypeUnavailable    = problemType + "unavailable"
	TypeOutcomePending = problemType + "outcome-pending"
	TypeRolledBack     = problemType + "rolled-back"
	TypeOutcomeUnknown = problemType + "outcome-unknown"
	TypeResponseGone   = problemType + "response-gone"
	TypePanic          = problemType + "panic"
	TypeScopeUnknown   = problemType + "scope-unknown"
	TypeMisconfigured  = problemType + "misconfigured"
)

const problemType = "urn:effectonce:idempotency:"

// Problem says why a guarded request has no answer of its handler. It is sent
// as application/problem+json (RFC 9457).
//
// It is an error, so that [Options.Scope] and [Options.Fingerprint] can return
// one of their own, such as 401, to be sent as it is.
type Problem struct {
	Type   string `json:"type"` // a URI; TypeKeyMissing and so on for those of this package
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`

	// OriginalStatus is the status of an answer that was not kept, for
	// TypeResponseGone.
	OriginalStatus int `json:"original_status,omitempty"`

	// Err is the cause, for an error handler's log. Clients don't see it.
	Err error `json:"-"`
}

// Error returns the title and, if there is one, the cause.
func (p *Problem) Error() string {
	if p.Err != nil {
		return "server: " + p.Title + ": " + p.Err.Error()
	}
	return "server: " + p.Title
}

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// WriteProblem sends p. It is what a guard does without an error handler, and
// what an error handler may do with the problems that it leaves alone.
func WriteProblem(w http.ResponseWriter, _ *http.Request, p *Problem) {
	body, err := json.Marshal(p)
	if err != nil { // can't be: strings and numbers only
		http.Error(w, p.Title, p.Status)
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_, _ = w.Write(body)
}
