package server

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"
)

// DefaultDropHeaders returns the names of the response headers that are sent to
// the client whose request ran the handler, but not stored, so that nobody else
// gets them: cookies and other credentials.
func DefaultDropHeaders() []string {
	return []string{
		"Authentication-Info",
		"Authorization",
		"Proxy-Authentication-Info",
		"Set-Cookie",
		"Set-Cookie2",
	}
}

// dropped decides which response headers are not stored.
type dropped map[string]bool

func newDropped(names []string) dropped {
	if names == nil {
		names = DefaultDropHeaders()
	}
	d := dropped{
		// These belong to a connection, not to an answer (RFC 9110, section
		// 7.6.1). Trailer stays: it announces what the answer really has.
		"Connection":          true,
		"Keep-Alive":          true,
		"Proxy-Authenticate":  true,
		"Proxy-Authorization": true,
		"Proxy-Connection":    true,
		"Te":                  true,
		"Transfer-Encoding":   true,
		"Upgrade":             true,

		"Date":         true, // says when this response was made, not the answer
		replayedHeader: true, // is said by us
	}
	for _, name := range names {
		d[textproto.CanonicalMIMEHeaderKey(name)] = true
	}
	return d
}

// stored returns those of the changes that may be stored. It may return changes
// itself, but does not change it.
func (d dropped) stored(changes []change) []change {
	var connection []string // names that the Connection header declares hop-by-hop
	for _, c := range changes {
		if c.name == "Connection" {
			connection = c.values
		}
	}
	drop := func(c change) bool {
		name := textproto.CanonicalMIMEHeaderKey(strings.TrimPrefix(c.name, http.TrailerPrefix))
		return d[name] || listed(connection, name)
	}
	if !slices.ContainsFunc(changes, drop) {
		return changes
	}
	return slices.DeleteFunc(slices.Clone(changes), drop)
}

// listed reports whether the comma-separated elements of lines have name.
func listed(lines []string, name string) bool {
	for _, line := range lines {
		for element := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.Trim(element, " \t"), name) {
				return true
			}
		}
	}
	return false
}

// diff returns, ordered by name, what was done to entry to make it now. Keys
// that stand for trailers are left out. It shares no memory with now.
func diff(entry, now http.Header) []change {
	n := 0
	for _, values := range now {
		n += len(values)
	}
	list := make([]change, 0, len(now))
	backing := make([]string, 0, n)
	for name, values := range now {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			continue
		}
		old, had := entry[name]
		c := change{name: name}
		switch {
		case name == "": // net/http sends none without a name
			continue
		case !had || len(values) < len(old) || !slices.Equal(values[:len(old)], old):
		case len(values) == len(old):
			continue
		default:
			values, c.added = values[len(old):], len(old) > 0
		}
		from := len(backing)
		backing = append(backing, values...)
		c.values = backing[from:len(backing):len(backing)]
		list = append(list, c)
	}
	for name, old := range entry {
		if _, ok := now[name]; !ok && len(old) > 0 {
			list = append(list, change{name: name})
		}
	}
	slices.SortFunc(list, func(a, b change) int { return strings.Compare(a.name, b.name) })
	return list
}

// trailers returns, ordered by name, the trailers that a handler left in h:
// those that it had declared by then, and those under http.TrailerPrefix.
func trailers(h http.Header, declared []string) []change {
	var list []change
	for _, name := range declared {
		if values := h[name]; len(values) > 0 {
			list = append(list, change{name: name, values: slices.Clone(values)})
		}
	}
	for name, values := range h {
		if strings.HasPrefix(name, http.TrailerPrefix) && len(values) > 0 {
			list = append(list, change{name: name, values: slices.Clone(values)})
		}
	}
	slices.SortFunc(list, func(a, b change) int { return strings.Compare(a.name, b.name) })
	return slices.CompactFunc(list, func(a, b change) bool { return a.name == b.name })
}

// declaredTrailers returns the names that the Trailer header announces.
func declaredTrailers(h http.Header) []string {
	var names []string
	for _, line := range h["Trailer"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.Trim(name, " \t"); name != "" {
				names = append(names, textproto.CanonicalMIMEHeaderKey(name))
			}
		}
	}
	return names
}
