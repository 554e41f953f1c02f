package server

import (
	"net/http"
)

// For the tests, which are of package server_test.

var (
	KeyOf     = keyOf
	ErrKey    = errKey
	ErrRecord = errRecord
	Diff      = diff
)

// Canonical returns the canonical form of a JSON text.
func Canonical(src []byte) ([]byte, bool) {
	var c canonicalizer
	return c.append(nil, src)
}

// Canonicalizer canonicalises many texts with the same memory.
type Canonicalizer struct{ c canonicalizer }

func (c *Canonicalizer) Append(dst, src []byte) ([]byte, bool) { return c.c.append(dst, src) }

// Fingerprint returns the fingerprint of r with body.
func Fingerprint(r *http.Request, body []byte) []byte {
	f := new(fingerprinter).sum(r, body)
	return f[:]
}

// OperationOf returns the operation that is made of r.
func OperationOf(r *http.Request) string { return string(appendOperation(nil, r)) }

type (
	Record = record
	Change = change
)

func NewChange(name string, added bool, values ...string) Change {
	return change{name: name, added: added, values: values}
}

func (c change) Fields() (string, bool, []string) { return c.name, c.added, c.values }

func NewRecord(tombstone bool, header, trailer []Change) Record {
	return record{tombstone: tombstone, header: header, trailer: trailer}
}

func (r record) Parts() (bool, []Change, []Change) { return r.tombstone, r.header, r.trailer }
func (r record) Encode() []byte                    { return r.encode() }

var DecodeRecord = decodeRecord

// NewFingerprinter returns a Fingerprint that keeps its memory.
func NewFingerprinter() func(r *http.Request, body []byte) {
	f := new(fingerprinter)
	return func(r *http.Request, body []byte) { f.sum(r, body) }
}

func (c change) Apply(h http.Header) { c.apply(h) }
