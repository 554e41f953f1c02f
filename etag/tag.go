package etag

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrInvalid: a header field, or a part of one, is not what RFC 9110 says.
var ErrInvalid = errors.New("etag: invalid")

// Tag is an entity tag (RFC 9110, section 8.8.3). The zero Tag is none at all;
// it matches nothing. A Tag is always valid, and == tells two equal ones.
type Tag struct {
	wire string // as sent: "x" or W/"x" with its quotes, or empty for none
}

// New returns the strong tag of the text opaque, which goes between the quotes.
// The error is ErrInvalid if it has characters that a tag can't have: quotes,
// spaces, control characters.
func New(opaque string) (Tag, error) {
	for i := range len(opaque) {
		if !etagc(opaque[i]) {
			return Tag{}, fmt.Errorf("%w tag: character %q", ErrInvalid, opaque[i])
		}
	}
	return Tag{wire: `"` + opaque + `"`}, nil
}

// FromVersion returns the strong tag of a row's version number. It is right for
// a resource with one representation; where there are several (JSON and XML,
// plain and compressed), each needs a tag of its own. [Tag.Version] reads it.
func FromVersion(version int64) Tag {
	return Tag{wire: `"` + strconv.FormatInt(version, 10) + `"`}
}

// FromContent returns the strong tag of a representation's bytes, a SHA-256.
// Where a resource returns to an earlier content, it returns to the tag too, so
// a writer who saw the earlier one passes; a version number would refuse it.
func FromContent(body []byte) Tag {
	sum := sha256.Sum256(body)
	return Tag{wire: `"` + base64.RawURLEncoding.EncodeToString(sum[:]) + `"`}
}

// Parse reads one tag, as it stands in an ETag header. Spaces around it are
// allowed. The error is ErrInvalid; an empty text is one too.
func Parse(s string) (Tag, error) {
	s = strings.Trim(s, " \t")
	t, rest, err := cut(s)
	if err != nil {
		return Tag{}, err
	}
	if rest != "" {
		return Tag{}, fmt.Errorf("%w tag: more after its end", ErrInvalid)
	}
	return t, nil
}

// Weaken returns the weak tag with the same text. None stays none.
func (t Tag) Weaken() Tag {
	if t.wire == "" || t.IsWeak() {
		return t
	}
	return Tag{wire: "W/" + t.wire}
}

// IsZero reports whether t is none.
func (t Tag) IsZero() bool { return t.wire == "" }

// IsWeak reports whether t is a weak tag, which If-Match never matches.
func (t Tag) IsWeak() bool { return strings.HasPrefix(t.wire, "W/") }

// String returns the tag as sent in a header, or "" for none.
func (t Tag) String() string { return t.wire }

// Opaque returns the text between the quotes.
func (t Tag) Opaque() string {
	s := strings.TrimPrefix(t.wire, "W/")
	if s == "" {
		return ""
	}
	return s[1 : len(s)-1]
}

// Version returns the number that a tag was made of by [FromVersion], and
// whether it is such a tag. A weak one is not, nor is one that writes the
// number otherwise, as "+1" and "01".
func (t Tag) Version() (int64, bool) {
	v, err := strconv.ParseInt(t.Opaque(), 10, 64)
	if err != nil || FromVersion(v) != t {
		return 0, false
	}
	return v, true
}

// StrongMatch reports whether a and b are the same by strong comparison: both
// strong, and the same text. If-Match compares so.
func StrongMatch(a, b Tag) bool {
	return !a.IsZero() && !a.IsWeak() && a == b
}

// WeakMatch reports whether a and b are the same by weak comparison: the same
// text, weak or not. If-None-Match compares so.
func WeakMatch(a, b Tag) bool {
	return !a.IsZero() && !b.IsZero() && a.Opaque() == b.Opaque()
}

// cut reads the tag that s begins with.
func cut(s string) (t Tag, rest string, err error) {
	body := strings.TrimPrefix(s, "W/") // case-sensitive, by RFC 9110, 8.8.3
	if !strings.HasPrefix(body, `"`) {
		return Tag{}, "", fmt.Errorf("%w tag: no opening quote", ErrInvalid)
	}
	for i := 1; i < len(body); i++ {
		if body[i] == '"' {
			end := len(s) - len(body) + i + 1
			return Tag{wire: s[:end]}, s[end:], nil
		}
		if !etagc(body[i]) {
			return Tag{}, "", fmt.Errorf("%w tag: character %q", ErrInvalid, body[i])
		}
	}
	return Tag{}, "", fmt.Errorf("%w tag: no closing quote", ErrInvalid)
}

// etagc is the rule of that name: visible ASCII but the quote, and obs-text. A
// backslash escapes nothing, and a comma ends nothing.
func etagc(c byte) bool {
	return c == 0x21 || c >= 0x23 && c <= 0x7e || c >= 0x80
}
