package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/effectonce/idempotency/dedup"
)

// SingleTenant is the [Options.Scope] of a service whose callers all may see
// each other's answers: whoever knows a key can have the answer to it replayed.
// With it, every caller's keys share one scope.
func SingleTenant(*http.Request) (string, error) { return SingleTenantName, nil }

// SingleTenantName is the tenant that [SingleTenant] returns.
const SingleTenantName = "single-tenant"

// StoreKey returns the key under which a store has an operation of a tenant, for
// [dedup.Store.Get] and [dedup.Store.Resolve]. operation is [Options.Operation],
// or what is made of method and route in its place: "POST /orders/{}/pay". id is
// the idempotency key that the client sent, without quotes.
func StoreKey(tenant, operation, id string) dedup.Key {
	return dedup.Key{Scope: scope(tenant, operation, nil), ID: id}
}

// scope returns what [dedup.Key] calls the scope: the tenant, after its length
// so that no tenant can spell another's operation, and the operation; if that is
// "", the one that r asks for. One that a store can't hold as it stands is
// replaced by its hash.
func scope(tenant, operation string, r *http.Request) string {
	var buf [128]byte
	b := strconv.AppendInt(buf[:0], int64(len(tenant)), 10)
	b = append(b, ':')
	b = append(b, tenant...)
	if operation != "" {
		b = append(b, operation...)
	} else {
		b = appendOperation(b, r)
	}
	if len(b) <= dedup.MaxKeyLength && utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 {
		return string(b)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// appendOperation appends what a request asks for: method and route. Routes are
// r.Pattern, as net/http's mux, chi and others set it, without the names of its
// wildcards, so that renaming one in a deploy does not lose live keys. Outside
// of any route it is the path as sent.
func appendOperation(b []byte, r *http.Request) []byte {
	b = append(b, r.Method...)
	b = append(b, ' ')
	if r.Pattern == "" {
		path, _ := target(r)
		return append(b, path...)
	}
	pattern := r.Pattern
	if method, rest, ok := strings.Cut(pattern, " "); ok && !strings.ContainsAny(method, "/{") {
		pattern = strings.TrimLeft(rest, " \t")
	}
	return appendErased(b, pattern)
}

// appendErased appends a route's pattern without the names of its wildcards:
// {id} becomes {}, and {path...} becomes {...}; also a segment :id (echo, gin)
// or *path becomes : or *. Where chi has an expression behind the name, that
// goes too. Should two routes become the same, their requests still differ by
// their fingerprints.
func appendErased(b []byte, pattern string) []byte {
	for i := 0; i < len(pattern); i++ {
		c := pattern[i]
		b = append(b, c)
		switch {
		case c == '{':
			end := closingBrace(pattern, i)
			name := pattern[i+1 : end]
			switch {
			case name == "$":
				b = append(b, name...)
			case strings.HasSuffix(name, "..."):
				b = append(b, "..."...)
			}
			i = end - 1
		case (c == ':' || c == '*') && i > 0 && pattern[i-1] == '/':
			for i+1 < len(pattern) && pattern[i+1] != '/' {
				i++
			}
		}
	}
	return b
}

// closingBrace returns where the brace that opens at i is closed, or the end of
// s. Expressions may have braces of their own.
func closingBrace(s string, i int) int {
	depth := 0
	for ; i < len(s); i++ {
		switch s[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i
			}
		}
	}
	return len(s)
}
