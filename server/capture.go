package server

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/effectonce/idempotency/dedup"
)

// ErrHijack is what Hijack returns in a guarded handler: a connection that was
// taken over, or upgraded to another protocol, has no answer to store. Serve
// such a route without the guard.
var ErrHijack = errors.New("server: a guarded handler can't hijack or upgrade its connection")

// recorder is the http.ResponseWriter of a guarded handler. It keeps the
// answer, so that it can be stored before the client sees any of it.
//
// Where the mode allows it, an answer becomes a stream when the handler flushes
// it, or when it grows over the limit: what there is goes out and the rest
// passes through. Nothing that happens to the client is shown to the handler,
// since its outcome counts, connected or not.
//
// Like every http.ResponseWriter it is not for concurrent use.
type recorder struct {
	w         http.ResponseWriter // the client's
	entry     http.Header         // its header as the guard found it
	limit     int64               // how much of the body may be stored
	mayStream bool
	head      bool // net/http drops the body, after having looked at it
	warner    interface{ warn(msg string) }

	header   http.Header // the handler's view
	status   int         // 0 before WriteHeader
	changes  []change    // to the header, as of WriteHeader
	declared []string    // names of trailers
	length   int64       // declared Content-Length, or -1
	written  int64       // what the handler wrote of the body
	body     []byte      // what of it is kept
	tooLarge bool
	stream   bool // the answer's head has been sent
}

var (
	_ http.Flusher  = (*recorder)(nil)
	_ http.Hijacker = (*recorder)(nil)
)

// start makes rec, which must be new, the recorder for a run of x's handler. The
// client's header is left alone until the answer, or an informational one, is
// sent.
func (rec *recorder) start(x *exchange) {
	header := x.w.Header().Clone()
	if header == nil {
		header = make(http.Header)
	}
	rec.w, rec.warner = x.w, x
	rec.entry, rec.header = x.w.Header(), header
	rec.limit, rec.length = x.g.opts.MaxStoredResponse, -1
	rec.head = x.r.Method == http.MethodHead
}

// Unwrap lets http.ResponseController reach the connection's deadlines.
func (rec *recorder) Unwrap() http.ResponseWriter { return rec.w }

// Header returns the headers that an outer handler set, with the changes of
// this one. They take effect when the answer is sent.
func (rec *recorder) Header() http.Header { return rec.header }

// WriteHeader sets the status as that of net/http does. Informational answers
// are sent at once, but not in transaction mode, in which nothing leaves before
// the commit.
func (rec *recorder) WriteHeader(status int) {
	switch {
	case status < 100 || status > 999:
		// net/http's server panics here too, and the handler's stack says where.
		panic(fmt.Sprintf("server: invalid WriteHeader code %d", status))
	case rec.status != 0:
		rec.warner.warn("superfluous WriteHeader call in a guarded handler")
		return
	case status == http.StatusSwitchingProtocols:
		rec.warner.warn(ErrHijack.Error())
		status = http.StatusInternalServerError
	case status < 200:
		rec.inform(status)
		return
	}
	rec.status = status
	if cl := rec.header.Get("Content-Length"); cl != "" {
		n, err := strconv.ParseInt(cl, 10, 64)
		if err == nil && n >= 0 {
			rec.length = n
		} else {
			rec.warner.warn("invalid Content-Length in a guarded handler")
			rec.header.Del("Content-Length")
		}
	}
	rec.declared = declaredTrailers(rec.header)
	rec.changes = diff(rec.entry, rec.header)
}

// inform passes an informational answer on.
func (rec *recorder) inform(status int) {
	// A client that waits for "100 Continue" had it when the body was read.
	if !rec.mayStream || status == http.StatusContinue {
		return
	}
	h := rec.w.Header()
	before := h.Clone()
	for _, c := range diff(h, rec.header) {
		c.apply(h)
	}
	rec.w.WriteHeader(status)
	clear(h)
	for name, values := range before {
		h[name] = values
	}
}

// Write keeps p, and sends it if the answer is a stream.
func (rec *recorder) Write(p []byte) (int, error) { return write(rec, p) }

// WriteString is Write for strings, so that io.WriteString need not copy.
func (rec *recorder) WriteString(s string) (int, error) { return write(rec, s) }

func write[T string | []byte](rec *recorder, p T) (int, error) {
	if err := rec.grow(len(p)); err != nil {
		return 0, err
	}
	if !rec.tooLarge || !rec.stream {
		rec.body = append(rec.body, p...)
	}
	if rec.stream {
		_, _ = rec.w.Write([]byte(p)) // whether the client is still there changes nothing
	}
	return len(p), nil
}

// grow prepares for n more bytes of body.
func (rec *recorder) grow(n int) error {
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	if n == 0 {
		return nil
	}
	if !bodyAllowed(rec.status) {
		return http.ErrBodyNotAllowed
	}
	rec.written += int64(n)
	if rec.length >= 0 && rec.written > rec.length {
		return http.ErrContentLength
	}
	if rec.written > rec.limit && !rec.tooLarge {
		rec.tooLarge = true
		if rec.mayStream {
			rec.begin() // rather than hold all of it in memory
			rec.body = nil
		}
	}
	return nil
}

// Flush is FlushError for those who don't ask for an error.
func (rec *recorder) Flush() { _ = rec.FlushError() }

// FlushError sends what there is. In transaction mode it does nothing, since
// nothing may leave before the commit.
func (rec *recorder) FlushError() error {
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
	if rec.mayStream {
		rec.begin()
		_ = http.NewResponseController(rec.w).Flush()
	}
	return nil
}

// begin makes the answer a stream.
func (rec *recorder) begin() {
	if rec.stream {
		return
	}
	rec.sniff()
	rec.stream = true
	rec.entry = rec.entry.Clone() // the map itself changes now
	rec.sendHead()
}

// sendHead sends status, headers and what there is of the body.
func (rec *recorder) sendHead() {
	h := rec.w.Header()
	for _, c := range rec.changes {
		c.apply(h)
	}
	rec.w.WriteHeader(rec.status)
	if len(rec.body) > 0 {
		_, _ = rec.w.Write(rec.body)
	}
}

// sniff sets the Content-Type that net/http is going to guess from the first
// piece of a stream, since a replay, which is in one piece, could be guessed to
// be something else.
func (rec *recorder) sniff() {
	if len(rec.body) == 0 {
		return
	}
	for _, name := range [...]string{"Content-Type", "Content-Encoding", "Transfer-Encoding"} {
		_, changed := find(rec.changes, name)
		if _, ok := rec.entry[name]; ok || changed {
			return
		}
	}
	i, _ := find(rec.changes, "Content-Type")
	c := change{name: "Content-Type", values: []string{http.DetectContentType(rec.body)}}
	rec.changes = append(rec.changes[:i:i], append([]change{c}, rec.changes[i:]...)...)
}

// Hijack returns ErrHijack.
func (rec *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, ErrHijack }

// finish ends the answer after the handler returned.
func (rec *recorder) finish() {
	if rec.status == 0 {
		rec.WriteHeader(http.StatusOK)
	}
}

// incomplete reports whether the handler wrote less than it had announced.
// net/http cuts the connection then.
func (rec *recorder) incomplete() bool {
	return rec.length > rec.written && !rec.head && bodyAllowed(rec.status)
}

// response returns what is to be stored.
func (rec *recorder) response(drop dropped) dedup.Response {
	if !rec.tooLarge && !rec.incomplete() {
		header := record{
			header:  drop.stored(rec.changes),
			trailer: drop.stored(trailers(rec.header, rec.declared)),
		}.encode()
		if int64(len(header)) <= rec.limit {
			return dedup.Response{Code: rec.status, Header: header, Body: rec.body}
		}
	}
	return tombstone(rec.status, rec.changes, rec.limit)
}

// tombstone returns what is stored in place of an answer that can't be kept:
// that it was given, its status, and the headers that name its result.
func tombstone(status int, changes []change, limit int64) dedup.Response {
	r := record{tombstone: true}
	size := 0
	for _, name := range [...]string{"Etag", "Location"} {
		if i, ok := find(changes, name); ok {
			r.header = append(r.header, changes[i])
			for _, v := range changes[i].values {
				size += len(v)
			}
		}
	}
	if int64(size) > limit {
		r.header = nil
	}
	return dedup.Response{Code: status, Header: r.encode()}
}

// send sends the answer, or what is left of it to send.
func (rec *recorder) send() {
	late := trailers(rec.header, rec.declared)
	h := rec.w.Header()
	if !rec.stream {
		for _, c := range late {
			if strings.HasPrefix(c.name, http.TrailerPrefix) {
				c.apply(h) // before the head, for net/http to choose chunks
			}
		}
		rec.sendHead()
	}
	for _, c := range late {
		c.apply(h)
	}
}

func find(changes []change, name string) (int, bool) {
	return slices.BinarySearchFunc(changes, name, func(c change, name string) int { return strings.Compare(c.name, name) })
}

// bodyAllowed reports whether an answer with this status may have a body (RFC
// 9110, section 6.4.1).
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
