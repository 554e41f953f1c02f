package etag

import (
	"fmt"
	"net/http"
	"time"
)

// State is what a server knows of a resource when it decides on a condition.
// The zero State is a resource that doesn't exist.
type State struct {
	Exists bool
	Tag    Tag // none if the resource has no tags; If-Match then fails

	// Modified is when the resource last changed, for If-Modified-Since and
	// If-Unmodified-Since, which are ignored where it is zero. They know whole
	// seconds only, so two writes within one can't be told apart.
	Modified time.Time
}

// Conditions are the conditions of a request (RFC 9110, section 13.1). The zero
// value is a request without any. If-Range is not among them: it decides about
// the part of a GET to send, which http.ServeContent does.
type Conditions struct {
	IfMatch           List
	IfNoneMatch       List
	IfModifiedSince   time.Time
	IfUnmodifiedSince time.Time
}

// ParseConditions reads the conditions of a request. The error is ErrInvalid
// for a malformed If-Match or If-None-Match. Malformed dates are ignored, as
// sections 13.1.3 and 13.1.4 say.
func ParseConditions(h http.Header) (Conditions, error) {
	var c Conditions
	var err error
	if c.IfMatch, err = ParseList(h.Values("If-Match")); err != nil {
		return Conditions{}, fmt.Errorf("If-Match: %w", err)
	}
	if c.IfNoneMatch, err = ParseList(h.Values("If-None-Match")); err != nil {
		return Conditions{}, fmt.Errorf("If-None-Match: %w", err)
	}
	c.IfModifiedSince = date(h.Values("If-Modified-Since"))
	c.IfUnmodifiedSince = date(h.Values("If-Unmodified-Since"))
	return c, nil
}

// date reads the one line of a date header. Zero means absent or malformed.
func date(lines []string) time.Time {
	if len(lines) != 1 {
		return time.Time{}
	}
	t, err := http.ParseTime(lines[0])
	if err != nil {
		return time.Time{}
	}
	return t
}

// Guards reports whether the conditions tell the server which state a write is
// meant for: If-Match, or "If-None-Match: *" for a resource that must not exist
// yet. A date doesn't, since it can't tell two changes in one second apart.
func (c Conditions) Guards() bool { return !c.IfMatch.IsZero() || c.IfNoneMatch.Any }

// Evaluate decides, in the order of RFC 9110, section 13.2.2, and returns the
// status to answer with: 0 to go on with the request, 304 (Not Modified, for
// GET and HEAD only) or 412 (Precondition Failed).
func (c Conditions) Evaluate(method string, s State) int {
	read := method == http.MethodGet || method == http.MethodHead
	if !c.IfMatch.IsZero() {
		if !c.IfMatch.strong(s) {
			return http.StatusPreconditionFailed
		}
	} else if !c.IfUnmodifiedSince.IsZero() && changedSince(s, c.IfUnmodifiedSince) {
		return http.StatusPreconditionFailed
	}
	if !c.IfNoneMatch.IsZero() {
		if !c.IfNoneMatch.weak(s) {
			return 0
		}
		if read {
			return http.StatusNotModified
		}
		return http.StatusPreconditionFailed
	}
	if read && !c.IfModifiedSince.IsZero() && s.Exists && !s.Modified.IsZero() && !changedSince(s, c.IfModifiedSince) {
		return http.StatusNotModified
	}
	return 0
}

// changedSince compares whole seconds: all that the headers carry.
func changedSince(s State, t time.Time) bool {
	return s.Exists && !s.Modified.IsZero() && s.Modified.Truncate(time.Second).After(t)
}
