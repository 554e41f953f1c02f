package server

import (
	"crypto/sha256"
	"encoding/binary"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// The first byte of a stored fingerprint says how it was made, so that a later
// version of this package can go on checking rows that an earlier one wrote.
const (
	fingerprintCustom byte = 0 // SHA-256 of what Options.Fingerprint returned
	fingerprintV1     byte = 1 // SHA-256 of the parts that fingerprinter.sum lists
)

// How a body went into a fingerprint. It is part of what is hashed, so that no
// body can pass for the canonical form of another one.
const (
	bodyRaw  byte = 0
	bodyJSON byte = 1
	bodyForm byte = 2
)

// fingerprinter makes the fingerprints of requests. The zero value is ready,
// and safe for concurrent use.
type fingerprinter struct {
	pool sync.Pool // of *preimage
}

// preimage is the memory that one fingerprint needs.
type preimage struct {
	buf   []byte
	json  canonicalizer
	pairs []pair
}

// maxKept is the most memory that a preimage keeps for the next request.
const maxKept = 64 << 10

// fingerprint is what is stored: the version and a hash.
type fingerprint [1 + sha256.Size]byte

// sum returns the fingerprint of a request: the version and the SHA-256 of
// method, escaped path, query, content encodings, media type and body. Each
// part has its length before it. The path is the one that was sent and never
// the route's pattern, so /orders/1/pay and /orders/2/pay differ.
//
// Two requests have one fingerprint only if they ask for the same: a JSON body
// may list its members in another order and space them otherwise, a form may
// list its fields in another order and escape them otherwise, media types may
// differ in case and in the order of parameters. Everything else must be the
// same bytes.
func (f *fingerprinter) sum(r *http.Request, body []byte) fingerprint {
	p, _ := f.pool.Get().(*preimage)
	if p == nil {
		p = new(preimage)
	}
	path, query := target(r)
	b := p.buf[:0]
	b = appendPart(b, r.Method)
	b = appendPart(b, path)
	b = appendPart(b, query)
	b = appendParts(b, r.Header["Content-Encoding"])
	b, kind := appendMediaType(b, r.Header)
	if len(r.Header["Content-Encoding"]) > 0 {
		kind = bodyRaw // compressed: not the text that the media type names
	}
	b = p.appendBody(b, kind, body)

	hash := sha256.Sum256(b)
	p.buf = b
	if cap(b)+cap(p.json.sorted)+16*cap(p.json.members)+64*cap(p.pairs) <= maxKept {
		f.pool.Put(p)
	}
	return versioned(fingerprintV1, hash)
}

// custom returns the fingerprint for what Options.Fingerprint returned.
func custom(b []byte) fingerprint { return versioned(fingerprintCustom, sha256.Sum256(b)) }

func versioned(version byte, hash [sha256.Size]byte) (f fingerprint) {
	f[0] = version
	copy(f[1:], hash[:])
	return f
}

// target returns path and query as the client sent them. A router may have
// changed r.URL (http.StripPrefix), but not r.RequestURI.
func target(r *http.Request) (path, query string) {
	if !strings.HasPrefix(r.RequestURI, "/") {
		return r.URL.EscapedPath(), r.URL.RawQuery // not from a server, or absolute
	}
	path, query, _ = strings.Cut(r.RequestURI, "?")
	return path, query
}

func appendPart(dst []byte, s string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(s)))
	return append(dst, s...)
}

func appendParts(dst []byte, parts []string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(parts)))
	for _, s := range parts {
		dst = appendPart(dst, s)
	}
	return dst
}

// appendMediaType appends the normalised media type and says how a body of it
// is to be read.
func appendMediaType(dst []byte, h http.Header) ([]byte, byte) {
	const unparsed, parsed = 0, 1
	lines := h["Content-Type"]
	if len(lines) == 1 && lines[0] == "application/json" {
		dst = append(dst, parsed)
		dst = appendPart(dst, lines[0])
		return append(dst, 0), bodyJSON // no parameters
	}
	if len(lines) != 1 {
		return appendParts(append(dst, unparsed), lines), bodyRaw
	}
	media, params, err := mime.ParseMediaType(lines[0])
	if err != nil {
		return appendParts(append(dst, unparsed), lines), bodyRaw
	}
	kind := bodyRaw
	switch {
	case media == "application/json" || strings.HasSuffix(media, "+json"):
		kind = bodyJSON
	case media == "application/x-www-form-urlencoded":
		kind = bodyForm
	}
	if charset, ok := params["charset"]; ok {
		params["charset"] = strings.ToLower(charset)
		if strings.EqualFold(charset, "utf-8") {
			if kind == bodyJSON {
				delete(params, "charset") // JSON has no other (RFC 8259, section 8.1)
			}
		} else {
			kind = bodyRaw
		}
	}
	dst = append(dst, parsed)
	dst = appendPart(dst, media)
	names := make([]string, 0, len(params))
	for name := range params {
		names = append(names, name)
	}
	slices.Sort(names)
	dst = binary.AppendUvarint(dst, uint64(len(names)))
	for _, name := range names {
		dst = appendPart(dst, name)
		dst = appendPart(dst, params[name])
	}
	return dst, kind
}

// appendBody appends the kind, the length and the canonical form of body. A
// body that has no canonical form is appended raw.
func (p *preimage) appendBody(dst []byte, kind byte, body []byte) []byte {
	const header = 1 + 8
	start := len(dst)
	dst = append(dst, kind, 0, 0, 0, 0, 0, 0, 0, 0)
	ok := true
	switch kind {
	case bodyJSON:
		dst, ok = p.json.append(dst, body)
	case bodyForm:
		dst, ok = p.appendForm(dst, body)
	default:
		dst = append(dst, body...)
	}
	if !ok {
		dst[start] = bodyRaw
		dst = append(dst, body...)
	}
	binary.BigEndian.PutUint64(dst[start+1:], uint64(len(dst)-start-header))
	return dst
}

// pair is one field of a form.
type pair struct{ name, value string }

// appendForm appends the fields of a form ordered by name. Fields of one name
// keep their order, which may mean something. A form that Go's url.ParseQuery
// would refuse or change has no canonical form.
func (p *preimage) appendForm(dst, body []byte) ([]byte, bool) {
	p.pairs = p.pairs[:0]
	defer func() { clear(p.pairs) }()
	for field := range strings.SplitSeq(string(body), "&") {
		name, value, ok := strings.Cut(field, "=")
		if !ok || strings.Contains(field, ";") {
			return dst, false
		}
		name, err := url.QueryUnescape(name)
		if err != nil {
			return dst, false
		}
		value, err = url.QueryUnescape(value)
		if err != nil {
			return dst, false
		}
		p.pairs = append(p.pairs, pair{name, value})
	}
	slices.SortStableFunc(p.pairs, func(a, b pair) int { return strings.Compare(a.name, b.name) })
	for _, pair := range p.pairs {
		dst = appendPart(dst, pair.name)
		dst = appendPart(dst, pair.value)
	}
	return dst, true
}
