package server

import (
	"cmp"
	"slices"
	"unicode"
	"unicode/utf8"
)

// member is one name-value pair of an object. It has no pointers, which makes
// it cheap to move.
type member struct {
	name, nameEnd int32 // in src, or, if name is negative, from ^name in names
	start, end    int32 // of `"name":value` in out
}

// name returns what m's name says.
func (c *canonicalizer) name(m *member) []byte {
	if m.name < 0 {
		return c.names[^m.name:m.nameEnd]
	}
	return c.src[m.name:m.nameEnd]
}

func (c *canonicalizer) compare(a, b member) int { return compareNames(c.name(&a), c.name(&b)) }

// sort puts the members, which are the end of out, in the order of their names.
// It reports whether it could: not if two names are the same, nor if the order
// was another and two names differ in case alone. Go's encoding/json gives both
// of these to the same field, and the one that comes last wins.
func (c *canonicalizer) sort(members []member) bool {
	inOrder := true
	for i := 1; i < len(members) && inOrder; i++ {
		inOrder = c.compare(members[i-1], members[i]) < 0
	}
	if inOrder {
		return true
	}
	if !c.distinctFolded(members) {
		return false
	}
	start := members[0].start
	slices.SortFunc(members, c.compare)
	c.sorted = c.sorted[:0]
	for i, m := range members {
		if i > 0 {
			if c.compare(members[i-1], m) == 0 {
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
	cased := false
	for i := range members {
		cased = cased || isCased(c.name(&members[i]))
	}
	if !cased {
		return true
	}
	c.folded = c.folded[:0]
	for i := range members {
		hash := uint64(14695981039346656037) // FNV-1a
		for s := c.name(&members[i]); len(s) > 0; {
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

// isCased reports whether name has, or may have, upper-case letters.
func isCased(name []byte) bool {
	for _, b := range name {
		if 'A' <= b && b <= 'Z' || b >= utf8.RuneSelf {
			return true
		}
	}
	return false
}

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
