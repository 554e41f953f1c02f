package server

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is how deeply arrays and objects may nest for a body to be
// canonicalised. Members are laid out anew at each level that has them out of
// order, so the bound also keeps the work proportional to the body's size.
const maxDepth = 64

// maxCanonical keeps offsets in 32 bits. No canonical form is longer than its
// source.
const maxCanonical = 1 << 30

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
	names   []byte   // what escaped names say
	sorted  []byte   // where members are laid out in order before they go back
	folded  []uint64 // hashes of names without case
}

// append appends the canonical form of src to dst. If src is not a JSON text
// that has one, it returns dst as it was and false.
func (c *canonicalizer) append(dst, src []byte) ([]byte, bool) {
	if len(dst)+len(src) > maxCanonical {
		return dst, false
	}
	c.src, c.pos, c.out = src, 0, dst
	c.members, c.names = c.members[:0], c.names[:0]
	c.space()
	ok := c.value(0)
	c.space()
	ok = ok && c.pos == len(src)
	out := c.out
	c.src, c.out = nil, nil
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
		return c.string(nil)
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
			m := member{start: int32(len(c.out))}
			if c.pos >= len(c.src) || c.src[c.pos] != '"' || !c.string(&m) || !c.next(':') {
				return false
			}
			c.out = append(c.out, ':')
			c.space()
			if !c.value(depth + 1) {
				return false
			}
			m.end = int32(len(c.out))
			c.members = append(c.members, m)
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

// string copies a string. If it is the name of m, it also notes what it says.
func (c *canonicalizer) string(m *member) bool {
	src, i := c.src, c.pos+1
	start, run := i, i-1 // run is where what is not yet copied begins: the quote
	escaped := false
	named := len(c.names)
	for i < len(src) {
		b := src[i]
		if b >= ' ' && b < utf8.RuneSelf && b != '"' && b != '\\' {
			i++
			continue
		}
		switch {
		case b == '"':
			c.out = append(c.out, src[run:i+1]...)
			c.pos = i + 1
			if m == nil {
				return true
			}
			if !escaped {
				m.name, m.nameEnd = int32(start), int32(i)
				return true
			}
			c.names = append(c.names, src[run:i]...)
			m.name, m.nameEnd = ^int32(named), int32(len(c.names))
			return true
		case b == '\\':
			escaped = true
			c.out = append(c.out, src[run:i]...)
			c.pos = i
			r, ok := c.escape()
			if !ok {
				return false
			}
			if m != nil {
				c.names = append(c.names, src[max(run, start):i]...)
				c.names = utf8.AppendRune(c.names, r)
			}
			c.out = appendEscaped(c.out, r)
			i = c.pos
			run = i
		case b < ' ':
			return false
		default:
			r, n := utf8.DecodeRune(src[i:])
			if r == utf8.RuneError && n == 1 {
				return false
			}
			i += n
		}
	}
	return false
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
