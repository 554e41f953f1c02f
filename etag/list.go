package etag

import (
	"fmt"
	"strings"
)

// List is the value of an If-Match or If-None-Match header: tags, or "*", which
// stands for any. The zero List is an absent header.
type List struct {
	Any  bool
	Tags []Tag
}

// ParseList reads the lines of one header, as http.Header.Values gives them;
// several lines are one list (RFC 9110, section 5.3). No lines give the zero
// List. Empty elements are skipped (section 5.6.1.2). The error is ErrInvalid,
// also for a header without any tag, and for "*" beside a tag: what it was
// meant to protect can't be known, so it should be refused and not ignored.
func ParseList(lines []string) (List, error) {
	if len(lines) == 0 {
		return List{}, nil
	}
	var l List
	for _, line := range lines {
		if err := l.add(line); err != nil {
			return List{}, err
		}
	}
	switch {
	case l.Any && len(l.Tags) > 0:
		return List{}, fmt.Errorf(`%w list: "*" beside a tag`, ErrInvalid)
	case l.IsZero():
		return List{}, fmt.Errorf("%w list: no tag in it", ErrInvalid)
	}
	return l, nil
}

// add reads one line.
func (l *List) add(line string) error {
	for {
		line = strings.TrimLeft(line, " \t,")
		if line == "" {
			return nil
		}
		if rest, ok := strings.CutPrefix(line, "*"); ok {
			if l.Any {
				return fmt.Errorf(`%w list: "*" twice`, ErrInvalid)
			}
			l.Any, line = true, rest
		} else {
			t, rest, err := cut(line)
			if err != nil {
				return err
			}
			l.Tags, line = append(l.Tags, t), rest
		}
		line = strings.TrimLeft(line, " \t")
		if line != "" && line[0] != ',' {
			return fmt.Errorf("%w list: no comma after an element", ErrInvalid)
		}
	}
}

// IsZero reports whether l is an absent header.
func (l List) IsZero() bool { return !l.Any && len(l.Tags) == 0 }

// String returns l as one header line.
func (l List) String() string {
	if l.Any {
		return "*"
	}
	s := make([]string, len(l.Tags))
	for i, t := range l.Tags {
		s[i] = t.String()
	}
	return strings.Join(s, ", ")
}

// strong reports whether the resource is one that the list names, by strong
// comparison.
func (l List) strong(s State) bool { return l.names(s, StrongMatch) }

// weak is the same by weak comparison.
func (l List) weak(s State) bool { return l.names(s, WeakMatch) }

func (l List) names(s State, match func(a, b Tag) bool) bool {
	if !s.Exists {
		return false
	}
	if l.Any {
		return true
	}
	for _, t := range l.Tags {
		if match(t, s.Tag) {
			return true
		}
	}
	return false
}
