package server

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"

	"github.com/effectonce/idempotency/dedup"
)

// A stored answer's headers are bytes of this form, in dedup.Response.Header:
//
//	version (1) | flags | changes | trailers
//
// where changes and trailers are lists: a count, then each entry with its name
// and its values, all with their lengths before them (unsigned varints). Header
// values are lists and are never joined: a Set-Cookie or a date has commas of
// its own. Nothing is JSON, nothing depends on a locale or a clock.
const recordVersion byte = 1

const flagTombstone byte = 1 << 0

// errRecord: a stored answer is not one that this package wrote.
var errRecord = errors.New("server: stored answer can't be read")

// change is what a handler did to one response header.
type change struct {
	name   string
	values []string

	// added says that values come after those that were there before the
	// handler ran. Otherwise they take their place; no values remove the header.
	added bool
}

// apply does to h what the handler did.
func (c change) apply(h http.Header) {
	if c.added {
		old := h[c.name]
		h[c.name] = append(old[:len(old):len(old)], c.values...)
		return
	}
	h[c.name] = c.values // without values nothing is sent, also no default
}

// record is the part of a stored answer that dedup.Response.Header holds.
type record struct {
	// tombstone says that the operation is done, but that its answer was not
	// kept. Then header holds only what identifies the result.
	tombstone bool
	header    []change
	trailer   []change // names begin with http.TrailerPrefix if undeclared
}

// encode returns r's stored form.
func (r record) encode() []byte {
	n := 2 + 2*binary.MaxVarintLen16
	for _, list := range [2][]change{r.header, r.trailer} {
		for _, c := range list {
			n += len(c.name) + 3*binary.MaxVarintLen16
			for _, v := range c.values {
				n += len(v) + binary.MaxVarintLen16
			}
		}
	}
	b := make([]byte, 0, n)
	var flags byte
	if r.tombstone {
		flags |= flagTombstone
	}
	b = append(b, recordVersion, flags)
	b = appendChanges(b, r.header)
	return appendChanges(b, r.trailer)
}

func appendChanges(b []byte, list []change) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, c := range list {
		added := byte(0)
		if c.added {
			added = 1
		}
		b = append(b, added)
		b = appendPart(b, c.name)
		b = appendParts(b, c.values)
	}
	return b
}

// decodeRecord reads what encode wrote, and refuses everything else: a row that
// was damaged, or written by a later version, must not become half an answer.
func decodeRecord(b []byte) (record, error) {
	d := decoder{rest: string(b)}
	if v := d.byte(); !d.failed && v != recordVersion {
		return record{}, fmt.Errorf("%w: it has version %d", errRecord, v)
	}
	flags := d.byte()
	d.check(flags&^flagTombstone == 0)
	r := record{tombstone: flags&flagTombstone != 0}
	r.header = d.changes()
	r.trailer = d.changes()
	d.check(d.rest == "")
	if d.failed {
		return record{}, fmt.Errorf("%w: it is damaged", errRecord)
	}
	return r, nil
}

// decoder reads a stored form. After a failure it returns zero values.
type decoder struct {
	rest   string
	failed bool
}

func (d *decoder) check(ok bool) {
	if !ok {
		d.failed = true
		d.rest = ""
	}
}

func (d *decoder) byte() byte {
	if d.rest == "" {
		d.check(false)
		return 0
	}
	b := d.rest[0]
	d.rest = d.rest[1:]
	return b
}

// uvarint reads a number in its shortest form. Every number counts things that
// follow and take at least a byte each, so none can be above what is left.
func (d *decoder) uvarint() int {
	var n uint64
	for shift := 0; ; shift += 7 {
		b := d.byte()
		if d.failed || shift > 56 || (b == 0 && shift > 0) {
			d.check(false)
			return 0
		}
		n |= uint64(b&0x7f) << shift
		if b < 0x80 {
			break
		}
	}
	if n > uint64(len(d.rest)) {
		d.check(false)
		return 0
	}
	return int(n)
}

func (d *decoder) string() string {
	n := d.uvarint()
	s := d.rest[:n]
	d.rest = d.rest[n:]
	return s
}

func (d *decoder) changes() []change {
	n := d.uvarint()
	if n == 0 {
		return nil
	}
	list := make([]change, 0, min(n, 16)) // a damaged count must not allocate
	all := make([]string, 0, min(n, 16))  // for the values of most
	for range n {
		added := d.byte()
		d.check(added <= 1)
		c := change{added: added == 1, name: d.string()}
		d.check(c.name != "")
		from := len(all)
		for range d.uvarint() {
			if all = append(all, d.string()); d.failed {
				break
			}
		}
		if d.failed {
			return nil
		}
		c.values = all[from:len(all):len(all)]
		// Names are written in order, each once.
		d.check(len(list) == 0 || list[len(list)-1].name < c.name)
		list = append(list, c)
	}
	return list
}

// Response returns the stored form of an answer, for [dedup.Store.Resolve]. All
// of header is stored.
func Response(status int, header http.Header, body []byte) dedup.Response {
	return dedup.Response{Code: status, Header: record{header: diff(nil, header)}.encode(), Body: body}
}
