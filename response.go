package idempotency

import (
	"bytes"
	"context"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"
)

// How much of a refused answer's body is read so that its connection can serve
// the retry, and for how long.
const (
	maxDrain  = 256 << 10
	drainTime = 500 * time.Millisecond
)

// drain reads and closes the body of an answer that nobody will see.
func drain(body io.ReadCloser) {
	if body == http.NoBody {
		return
	}
	// A stalled body is cut off by closing it, which ends the read.
	cut := time.AfterFunc(drainTime, func() { _ = body.Close() })
	_, _ = io.CopyN(io.Discard, body, maxDrain)
	if cut.Stop() {
		_ = body.Close()
	}
}

// hasBody reports whether the answer has a body that may be worth keeping.
func hasBody(resp *http.Response) bool {
	return resp.Body != nil && resp.Body != http.NoBody && resp.ContentLength != 0 &&
		resp.StatusCode != http.StatusSwitchingProtocols &&
		(resp.Request == nil || resp.Request.Method != http.MethodHead)
}

// streams reports whether the answer is of a kind that is read as it comes.
func streams(resp *http.Response) bool {
	ct := resp.Header.Get("Content-Type")
	if ct == "" || strings.HasPrefix(ct, "application/json") {
		return false
	}
	media, _, err := mime.ParseMediaType(ct)
	if err != nil {
		media = strings.ToLower(strings.TrimSpace(ct))
	}
	switch media {
	case "text/event-stream", "application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-seq", "multipart/x-mixed-replace":
		return true
	}
	return false
}

// buffer reads the body before the caller sees the answer, so that one that is
// cut half way counts as lost. Of a body longer than limit the rest is left to
// the caller.
func buffer(resp *http.Response, limit int64) error {
	body := resp.Body
	// To the end, and not just to ContentLength: trailers come with it, and
	// the connection is free only then.
	size := int64(bytes.MinRead)
	if n := resp.ContentLength; n > 0 {
		size += min(n, limit)
	}
	kept := bytes.NewBuffer(make([]byte, 0, size))
	_, err := kept.ReadFrom(&io.LimitedReader{R: body, N: limit + 1})
	if err == nil && int64(kept.Len()) > limit {
		resp.Body = &prefixedBody{io.MultiReader(kept, body), body}
		return nil
	}
	_ = body.Close()
	if err != nil {
		return err
	}
	resp.Body = &bufferedBody{*bytes.NewReader(kept.Bytes())}
	return nil
}

// bufferedBody is a body in memory.
type bufferedBody struct{ bytes.Reader }

// Close implements [io.Closer].
func (*bufferedBody) Close() error { return nil }

// cancelBody ends an attempt's context when its body is closed.
type cancelBody struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

// Close implements [io.Closer].
func (b *cancelBody) Close() error {
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}
