package server

import (
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
)

// readAhead is the most memory that a request gets for its announced length
// alone.
const readAhead = 64 << 10

// readBody reads the body of r, of which nothing must have been read.
func readBody(r *http.Request, limit int64) ([]byte, *Problem) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit) // without inviting a client that waits to send it
	}
	if r.Body == nil || r.Body == http.NoBody {
		return nil, consumed(r)
	}
	// One byte more than was announced, so that the end is seen without growing.
	announced := r.ContentLength
	if announced <= 0 {
		announced = 511
	}
	body := make([]byte, 0, min(announced, readAhead)+1)
	for {
		n, err := r.Body.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case int64(len(body)) > limit:
			return nil, tooLarge(limit) // net/http sees to what was not read
		case err == io.EOF && len(body) == 0:
			return nil, consumed(r)
		case err == io.EOF:
			return body, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, unreadable(http.StatusRequestTimeout, err)
		case err != nil:
			return nil, unreadable(http.StatusBadRequest, err)
		case len(body) == cap(body):
			body = slices.Grow(body, len(body))
		}
	}
}

func tooLarge(limit int64) *Problem {
	return &Problem{Type: TypeBodyTooLarge, Status: http.StatusRequestEntityTooLarge,
		Title: "The request's body is too large", Detail: "The most is " + strconv.FormatInt(limit, 10) + " bytes."}
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
