package server

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/dunglas/httpsfv"

	"github.com/effectonce/idempotency/dedup"
)

// errKey says what is wrong with a request's key. It never contains the key.
var errKey = errors.New("server: malformed idempotency key")

// keyOf reads the idempotency key from the lines of its header. It returns ""
// if there are none.
//
// A value that begins with a quote is a String item of Structured Fields (RFC
// 9651, section 3.3.3), as draft-ietf-httpapi-idempotency-key-header asks;
// anything else is taken as it stands, which is what most payment providers
// and their clients send. So `"abc"` and `abc` are the same key, and a client
// may change its spelling between two tries.
//
// Several lines are one key if they all say the same, since proxies duplicate
// headers; if they differ nobody can say which operation was meant.
func keyOf(h http.Header, name string) (string, error) {
	lines := h[name]
	if len(lines) == 0 {
		return "", nil
	}
	key, err := parseKey(lines[0])
	if err != nil {
		return "", err
	}
	for _, line := range lines[1:] {
		other, err := parseKey(line)
		if err != nil {
			return "", err
		}
		if other != key {
			return "", fmt.Errorf("%w: the header has several lines that differ", errKey)
		}
	}
	return key, nil
}

func parseKey(line string) (string, error) {
	key := strings.Trim(line, " \t") // optional whitespace, RFC 9110 section 5.5
	if strings.HasPrefix(key, `"`) {
		item, err := httpsfv.UnmarshalItem([]string{key})
		if err != nil {
			return "", fmt.Errorf("%w: not a valid string of RFC 9651: %w", errKey, err)
		}
		key = item.Value.(string) // what begins with a quote is a String
	}
	switch {
	case key == "":
		return "", fmt.Errorf("%w: it is empty", errKey)
	case len(key) > dedup.MaxKeyLength:
		return "", fmt.Errorf("%w: it has %d bytes, the most is %d", errKey, len(key), dedup.MaxKeyLength)
	case !utf8.ValidString(key):
		return "", fmt.Errorf("%w: it is not valid UTF-8", errKey)
	case strings.IndexFunc(key, unicode.IsControl) >= 0:
		return "", fmt.Errorf("%w: it has a control character", errKey)
	}
	return key, nil
}
