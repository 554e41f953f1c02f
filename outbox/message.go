package outbox

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Message is what is published.
type Message struct {
	// ID names the message for those who deduplicate by it. Enqueue makes a
	// UUID v7 where it is empty. At most 255 bytes.
	ID string

	// Topic says where to: a subject, a topic, a routing key, a URL. Required,
	// at most 255 bytes.
	Topic string

	// Key is what order is kept by: messages of one key are published in the
	// order they were enqueued in, whatever their topics. Messages without a
	// key have no order. At most 255 bytes.
	Key string

	// Header goes with the message; the trace context and baggage too.
	Header map[string]string

	Payload []byte

	// The rest is set by the relay and ignored by Enqueue.

	Seq     int64     // place in the table
	Attempt int       // 1 for the first one; tries that never reached the broker don't count
	Created time.Time // when it was enqueued, by the database's clock
}

// Errors that callers may tell apart.
var (
	// ErrConfig is for settings that can't work.
	ErrConfig = errors.New("outbox: bad setting")
	// ErrMessage is for a message that can't be enqueued.
	ErrMessage = errors.New("outbox: bad message")
	// ErrLeaseLost is the cause of a publishing context's end when another relay
	// may have taken the messages over.
	ErrLeaseLost = errors.New("outbox: lease lost")
)

// maxName is the size of the columns of ids, topics and keys.
const maxName = 255

// Encode checks m, gives it an id if it has none, and returns the header as the
// table holds it: a JSON object, or nil. It is for other implementations of
// Enqueue.
func (m *Message) Encode() (header []byte, err error) {
	if m.ID == "" {
		m.ID = NewID()
	}
	if m.Topic == "" {
		return nil, fmt.Errorf("%w: it has no topic", ErrMessage)
	}
	for _, f := range []struct{ name, value string }{{"id", m.ID}, {"topic", m.Topic}, {"key", m.Key}} {
		if len(f.value) > maxName || !utf8.ValidString(f.value) || strings.IndexByte(f.value, 0) >= 0 {
			return nil, fmt.Errorf("%w: the %s must be UTF-8 without NUL, of at most %d bytes", ErrMessage, f.name, maxName)
		}
	}
	if len(m.Header) == 0 {
		return nil, nil
	}
	for k, v := range m.Header {
		if k == "" || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return nil, fmt.Errorf("%w: header %q is empty or not UTF-8", ErrMessage, k)
		}
	}
	return json.Marshal(m.Header)
}

// decodeHeader is the inverse of Encode.
func (m *Message) decodeHeader(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, &m.Header); err != nil {
		return fmt.Errorf("outbox: the header of message %s: %w", m.ID, err)
	}
	return nil
}

// NewID returns a UUID v7 (RFC 9562 §5.7): ids made later sort later, down to
// the millisecond.
func NewID() string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(time.Now().UnixMilli())<<16)
	_, _ = rand.Read(b[6:]) // never fails: see crypto/rand
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	var s [36]byte
	hex.Encode(s[:8], b[:4])
	hex.Encode(s[9:13], b[4:6])
	hex.Encode(s[14:18], b[6:8])
	hex.Encode(s[19:23], b[8:10])
	hex.Encode(s[24:], b[10:])
	s[8], s[13], s[18], s[23] = '-', '-', '-', '-'
	return string(s[:])
}
