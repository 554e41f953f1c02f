package server

import (
	"bytes"
	"cmp"
	"slices"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is how deeply arrays and objects may nest for a body to be
// canonicalised. Members are laid out anew at each level that has them out of
// order, so the bound also keeps the work proportional to the body's size.
const maxDepth = 64

// canonicalizer writes JSON texts in the form of RFC 8785 (JCS), with one
// difference: numbers keep the digits they were sent with. JCS rounds them to
// float64, under which 12345678901234567890 and 12345678901234567891 are the
// same number; two requests that differ in an amount must not be.
//
// It refuses what two decoders could understand differently, or what Go's
// decoder would change: duplicate member names, invalid UTF-8, escaped halves
// of surrogate pairs, anything after the value, a byte order mark. For such a
// body only its exact bytes are the same request.
//
// It reads the body once and keeps its memory for the next body.
type canonicalizer struct {
	src     []byte
	pos     int
	out     []byte
	members []member // of all objects that are open, innermost last
	sorted  []byte   // where members are laid out in order before they go back
	folded  []uint64 // hashes of names without case
}

// member is one name-value pair of an object.
type member struct {
	name       []byte // without escapes
	start, end int    // of `"name":value` in out
}

// append appends the canonical form of src to dst. If src is not a JSON text
// that has one, it returns dst as it was and false.
func (c *canonicalizer) append(dst, src []byte) ([]byte, bool) {
	c.src, c.pos, c.out = src, 0, dst
	c.members = c.members[:0]
	c.space()
	ok := c.value(0)
	c.space()
	ok = ok && c.pos == len(src)
	out := c.out
	c.src, c.out = nil, nil
	clear(c.members[:cap(c.members)]) // their names point into the body
	if !ok {
		return out[:len(dst)], false
	}
	return out, true
}

func (c *canonicalizer) space() {
	for c.pos < len(c.src) {
		switch c.src[c.pos] {
		case ' ', '\t', '\n', '\r':
			c.pos++
		default:
			return
		}
	}
}

// next consumes b if it comes next, after white space.
func (c *canonicalizer) next(b byte) bool {
	c.space()
	if c.pos < len(c.src) && c.src[c.pos] == b {
		c.pos++
		return true
	}
	return false
}

func (c *canonicalizer) value(depth int) bool {
	if c.pos >= len(c.src) || depth > maxDepth {
		return false
	}
	switch b := c.src[c.pos]; {
	case b == '"':
		_, ok := c.string(false)
		return ok
	case b == '{':
		return c.object(depth)
	case b == '[':
		return c.array(depth)
	case b == '-' || isDigit(b):
		return c.number()
	case b == 't':
		return c.literal("true")
	case b == 'f':
		return c.literal("false")
	case b == 'n':
		return c.literal("null")
	}
	return false
}

func (c *canonicalizer) literal(s string) bool {
	if !bytes.HasPrefix(c.src[c.pos:], []byte(s)) {
		return false
	}
	c.pos += len(s)
	c.out = append(c.out, s...)
	return true
}

func (c *canonicalizer) array(depth int) bool {
	c.pos++
	c.out = append(c.out, '[')
	if !c.next(']') {
		for {
			c.space()
			if !c.value(depth + 1) {
				return false
			}
			if c.next(']') {
				break
			}
			if !c.next(',') {
				return false
			}
			c.out = append(c.out, ',')
		}
	}
	c.out = append(c.out, ']')
	return true
}

func (c *canonicalizer) object(depth int) bool {
	first := len(c.members)
	c.pos++
	c.out = append(c.out, '{')
	if !c.next('}') {
		for {
			c.space()
			start := len(c.out)
			if c.pos >= len(c.src) || c.src[c.pos] != '"' {
				return false
			}
			name, ok := c.string(true)
			if !ok || !c.next(':') {
				return false
			}
			c.out = append(c.out, ':')
			c.space()
			if !c.value(depth + 1) {
				return false
			}
			c.members = append(c.members, member{name, start, len(c.out)})
			if c.next('}') {
				break
			}
			if !c.next(',') {
				return false
			}
			c.out = append(c.out, ',')
		}
	}
	ok := c.sort(c.members[first:])
	c.members = c.members[:first]
	c.out = append(c.out, '}')
	return ok
}

// sort puts the members, which are the end of out, in the order of their names.
// It reports whether it could: not if two names are the same, nor if the order
// was another and two names differ in case alone. Go's encoding/json gives both
// of these to the same field, and the one that comes last wins.
func (c *canonicalizer) sort(members []member) bool {
	inOrder := true
	for i := 1; i < len(members) && inOrder; i++ {
		inOrder = compareNames(members[i-1].name, members[i].name) < 0
	}
	if inOrder {
		return true
	}
	if !c.distinctFolded(members) {
		return false
	}
	start := members[0].start
	slices.SortFunc(members, func(a, b member) int { return compareNames(a.name, b.name) })
	c.sorted = c.sorted[:0]
	for i, m := range members {
		if i > 0 {
			if bytes.Equal(members[i-1].name, m.name) {
				return false
			}
			c.sorted = append(c.sorted, ',')
		}
		c.sorted = append(c.sorted, c.out[m.start:m.end]...)
	}
	copy(c.out[start:], c.sorted)
	return true
}

// distinctFolded reports whether no two names are the same but for case. It
// compares hashes. Should two names share one by chance, the body is taken to
// have no canonical form, which is always safe.
func (c *canonicalizer) distinctFolded(members []member) bool {
	if !slices.ContainsFunc(members, func(m member) bool { return slices.ContainsFunc(m.name, isCased) }) {
		return true
	}
	c.folded = c.folded[:0]
	for _, m := range members {
		hash := uint64(14695981039346656037) // FNV-1a
		for s := m.name; len(s) > 0; {
			r, n := foldFirst(s)
			hash = (hash ^ uint64(r)) * 1099511628211
			s = s[n:]
		}
		c.folded = append(c.folded, hash)
	}
	slices.Sort(c.folded)
	for i := 1; i < len(c.folded); i++ {
		if c.folded[i-1] == c.folded[i] {
			return false
		}
	}
	return true
}

// isCased reports whether b is, or may be part of, anything but a lower-case
// letter or a character without case.
func isCased(b byte) bool { return 'A' <= b && b <= 'Z' || b >= utf8.RuneSelf }

// foldFirst returns one and the same character for all cases of the first
// character of s, and the length of the latter.
func foldFirst(s []byte) (rune, int) {
	if b := s[0]; b < utf8.RuneSelf {
		if 'a' <= b && b <= 'z' {
			b -= 'a' - 'A'
		}
		return rune(b), 1
	}
	r, n := utf8.DecodeRune(s)
	for {
		next := unicode.SimpleFold(r) // the least character comes after the greatest
		if next <= r {
			return next, n
		}
		r = next
	}
}

// compareNames orders names by their UTF-16 code units (RFC 8785, section
// 3.2.3). That is the order of their UTF-8 bytes, but for the characters that
// UTF-16 writes as surrogates (D800 to DFFF): these sort before U+E000 to
// U+FFFF, whose UTF-8 begins with EE or EF.
func compareNames(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		x, y := a[i], b[i]
		switch {
		case x == y:
			continue
		case x >= 0xF0 && (y == 0xEE || y == 0xEF):
			return -1
		case y >= 0xF0 && (x == 0xEE || x == 0xEF):
			return 1
		}
		return cmp.Compare(x, y)
	}
	return cmp.Compare(len(a), len(b))
}

// string copies a string. With decode it also returns what the string says.
func (c *canonicalizer) string(decode bool) (text []byte, ok bool) {
	c.pos++
	c.out = append(c.out, '"')
	start, run := c.pos, c.pos // run is where what is not yet copied begins
	escaped := false
	for c.pos < len(c.src) {
		switch b := c.src[c.pos]; {
		case b == '"':
			c.out = append(c.out, c.src[run:c.pos]...)
			if decode {
				if !escaped {
					text = c.src[start:c.pos:c.pos]
				} else {
					text = append(text, c.src[run:c.pos]...)
				}
			}
			c.out = append(c.out, '"')
			c.pos++
			return text, true
		case b == '\\':
			escaped = true
			c.out = append(c.out, c.src[run:c.pos]...)
			if decode {
				text = append(text, c.src[run:c.pos]...)
			}
			r, ok := c.escape()
			if !ok {
				return nil, false
			}
			if decode {
				text = utf8.AppendRune(text, r)
			}
			c.out = appendEscaped(c.out, r)
			run = c.pos
		case b < ' ':
			return nil, false
		case b < utf8.RuneSelf:
			c.pos++
		default:
			r, n := utf8.DecodeRune(c.src[c.pos:])
			if r == utf8.RuneError && n == 1 {
				return nil, false
			}
			c.pos += n
		}
	}
	return nil, false
}

// escape reads the escape sequence at pos, for a surrogate pair both of them.
func (c *canonicalizer) escape() (rune, bool) {
	if c.pos+1 >= len(c.src) {
		return 0, false
	}
	b := c.src[c.pos+1]
	if b == 'u' {
		r, ok := c.hex()
		if !ok || !utf16.IsSurrogate(r) {
			return r, ok
		}
		low, ok := c.hex()
		r = utf16.DecodeRune(r, low)
		return r, ok && r != utf8.RuneError
	}
	c.pos += 2
	switch b {
	case '"', '\\', '/':
		return rune(b), true
	case 'b':
		return '\b', true
	case 'f':
		return '\f', true
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	}
	return 0, false
}

// hex reads the \uXXXX at pos.
func (c *canonicalizer) hex() (r rune, ok bool) {
	if len(c.src)-c.pos < 6 || c.src[c.pos] != '\\' || c.src[c.pos+1] != 'u' {
		return 0, false
	}
	for _, b := range c.src[c.pos+2 : c.pos+6] {
		switch {
		case isDigit(b):
			b -= '0'
		case 'a' <= b && b <= 'f':
			b -= 'a' - 10
		case 'A' <= b && b <= 'F':
			b -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(b)
	}
	c.pos += 6
	return r, true
}

// appendEscaped writes r as RFC 8785, section 3.2.2.2 wants it.
func appendEscaped(dst []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(dst, '\\', byte(r))
	case '\b':
		return append(dst, `\b`...)
	case '\t':
		return append(dst, `\t`...)
	case '\n':
		return append(dst, `\n`...)
	case '\f':
		return append(dst, `\f`...)
	case '\r':
		return append(dst, `\r`...)
	}
	if r < ' ' {
		const digits = "0123456789abcdef"
		return append(dst, '\\', 'u', '0', '0', digits[r>>4], digits[r&15])
	}
	return utf8.AppendRune(dst, r)
}

// number copies a number (RFC 8259, section 6), digit for digit.
func (c *canonicalizer) number() bool {
	start := c.pos
	c.skip('-')
	if !c.skip('0') && !c.digits() {
		return false
	}
	if c.skip('.') && !c.digits() {
		return false
	}
	if c.skip('e') || c.skip('E') {
		if !c.skip('+') {
			c.skip('-')
		}
		if !c.digits() {
			return false
		}
	}
	c.out = append(c.out, c.src[start:c.pos]...)
	return true
}

// skip consumes b if it is the very next byte.
func (c *canonicalizer) skip(b byte) bool {
	if c.pos < len(c.src) && c.src[c.pos] == b {
		c.pos++
		return true
	}
	return false
}

// digits consumes digits, at least one.
func (c *canonicalizer) digits() bool {
	start := c.pos
	for c.pos < len(c.src) && isDigit(c.src[c.pos]) {
		c.pos++
	}
	return c.pos > start
}

func isDigit(b byte) bool { return '0' <= b && b <= '9' }
