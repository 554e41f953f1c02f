package idempotency_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/effectonce/idempotency"
)

// Whatever Retry-After says, a request ends within its bounds: the wait is
// neither skipped nor longer than MaxRetryAfter.
func FuzzRetryAfter(f *testing.F) {
	for _, v := range []string{
		"0", "1", "1.5", "-1", "61", "1e3", "0x10", "inf", "NaN", ".", "1.2.3", "+5", " 7 ", "99999999999999999999", strings.Repeat("9", 400),
		"Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "Fri, 31 Dec 9999 23:59:59 GMT",
	} {
		f.Add(v, "")
		f.Add("", v)
	}
	f.Fuzz(func(t *testing.T, seconds, millis string) {
		synctest.Test(t, func(t *testing.T) {
			b := answering(status(503, "", "Retry-After", seconds, "Retry-After-Ms", millis), status(201, ""))
			began := time.Now()
			resp, err := (&idempotency.Transport{Base: b}).RoundTrip(newPost(t, apiURL, "x"))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			d := time.Since(began)
			if resp.StatusCode == 201 && (d <= 0 || d > time.Minute) || resp.StatusCode == 503 && d != 0 {
				t.Errorf("status %d after %v", resp.StatusCode, d)
			}
		})
	})
}

// A key is refused, or arrives as it is.
func FuzzKey(f *testing.F) {
	for _, k := range []string{"", "k", "a b", " a", "a\n", "ä", "\x7f", `"a"`, `a\"b`, strings.Repeat("k", 256), "a\x00b", `"`, `\`} {
		f.Add(k, true)
		f.Add(k, false)
	}
	f.Fuzz(func(t *testing.T, key string, quoted bool) {
		var sent string
		base := roundTripper(func(req *http.Request) (*http.Response, error) {
			sent = req.Header.Get("Idempotency-Key")
			return nil, errLost
		})
		tr := &idempotency.Transport{
			Base: base, Provider: idempotency.Provider{Quoted: quoted}, Retry: idempotency.RetryPolicy{MaxAttempts: 1},
		}
		_, err := tr.RoundTrip(idempotentKey(newPost(t, apiURL, ""), key))
		if errors.Is(err, idempotency.ErrInvalidKey) {
			if sent != "" {
				t.Errorf("refused and sent: %q", key)
			}
			return
		}
		for i := range len(sent) {
			if sent[i] < 0x20 || sent[i] > 0x7e {
				t.Errorf("sent %q", sent)
			}
		}
		if len(key) > 255 || !quoted && sent != key {
			t.Errorf("%q was sent as %q", key, sent)
		}
		// By the header, too: the key that is found in it is the same.
		req := newPost(t, apiURL, "")
		req.Header.Set("Idempotency-Key", sent)
		_, err = tr.RoundTrip(req)
		var e *idempotency.Error
		if !errors.As(err, &e) || e.Key != key {
			t.Errorf("%q was read back as %v", key, err)
		}
	})
}
