package idempotency

import (
	"bytes"
	"io"
	"net/http"
)

// requestBody gives each attempt a body of its own. The body that the caller
// handed over serves the first attempt; later ones come from GetBody, or from
// a buffer where there is none.
type requestBody struct {
	first   io.ReadCloser
	getBody func() (io.ReadCloser, error)
	none    bool // the request has no body
	once    bool // it can't be sent again
	used    bool
}

// take takes over req.Body. Buffering is for requests that may be retried and
// have no GetBody.
func (b *requestBody) take(req *http.Request, mayRetry bool, limit int64) error {
	b.first, b.getBody = req.Body, req.GetBody
	switch {
	case req.Body == nil || req.Body == http.NoBody:
		b.none = true
	case req.GetBody != nil:
	case !mayRetry || limit < 0 || req.ContentLength > limit:
		b.once = true
	default:
		return b.buffer(limit)
	}
	return nil
}

// buffer reads the body into memory, unless it is longer than limit. A read
// error ends the operation before anything was sent.
func (b *requestBody) buffer(limit int64) error {
	original := b.first
	data, err := io.ReadAll(io.LimitReader(original, limit+1))
	if err != nil {
		return err
	}
	if int64(len(data)) > limit {
		b.once = true
		b.first = &prefixedBody{io.MultiReader(bytes.NewReader(data), original), original}
		return nil
	}
	_ = original.Close() // it was read to its end
	b.getBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
	b.first, _ = b.getBody()
	return nil
}

// next returns the body of the next attempt, for a request that has one.
func (b *requestBody) next() (io.ReadCloser, error) {
	if !b.used {
		b.used = true
		return b.first, nil
	}
	return b.getBody()
}

// close closes the caller's body if no attempt took it over.
func (b *requestBody) close() {
	if b.first != nil && !b.used {
		b.used = true
		_ = b.first.Close()
	}
}

// prefixedBody reads what was read before once more.
type prefixedBody struct {
	io.Reader
	io.Closer
}
