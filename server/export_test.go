package server

import (
	"net/http"
)

// For the tests, which are of package server_test.

var (
	KeyOf       = keyOf
	ErrKey      = errKey
	ErrRecord   = errRecord
	Scope       = scope
	OperationOf = operationOf
	Diff        = diff
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
func Fingerprint(r *http.Request, body []byte) []byte { return new(fingerprinter).sum(r, body) }

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
func NewFingerprinter() func(r *http.Request, body []byte) []byte { return new(fingerprinter).sum }

func (c change) Apply(h http.Header) { c.apply(h) }
