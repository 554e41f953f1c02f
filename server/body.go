package server

import (
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
)

// readAhead is the most memory that a request gets for its announced length
// alone.
const readAhead = 64 << 10

// readBody reads the body of r, of which nothing must have been read.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, *Problem) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit) // without inviting a client that waits to send it
	}
	if r.Body == nil || r.Body == http.NoBody {
		return nil, consumed(r)
	}
	in := http.MaxBytesReader(w, r.Body, limit)
	var body []byte
	if r.ContentLength > 0 {
		body = make([]byte, 0, min(r.ContentLength, readAhead))
	}
	for {
		n, err := in.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		var over *http.MaxBytesError
		switch {
		case err == io.EOF && len(body) == 0:
			return nil, consumed(r)
		case err == io.EOF:
			return body, nil
		case errors.As(err, &over):
			return nil, tooLarge(limit)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, unreadable(http.StatusRequestTimeout, err)
		case err != nil:
			return nil, unreadable(http.StatusBadRequest, err)
		case len(body) == cap(body):
			body = slices.Grow(body, max(512, len(body)))
		}
	}
}

func tooLarge(limit int64) *Problem {
	return &Problem{Type: TypeBodyTooLarge, Status: http.StatusRequestEntityTooLarge,
		Title: "The request's body is too large", Err: &http.MaxBytesError{Limit: limit}}
}

func unreadable(status int, err error) *Problem {
	return &Problem{Type: TypeBodyUnreadable, Status: status, Title: "The request's body could not be read", Err: err}
}

// consumed returns a problem if r had a body that somebody read before the
// guard. The fingerprint would then leave it out, and another body with the
// same key would get this one's answer.
func consumed(r *http.Request) *Problem {
	if r.ContentLength > 0 || len(r.PostForm) > 0 || r.MultipartForm != nil {
		return misconfigured(errors.New("server: the request's body was read before the guard"))
	}
	return nil
}
