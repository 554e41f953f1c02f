package sqlstore

import (
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

// row is a row of the table as it was at the instant now.
type row struct {
	token                      []byte
	fingerprint                []byte
	status, attempt, code      sql.NullInt32
	header, body               []byte
	created, expires, leaseEnd micros
	now                        micros

	fresh bool // inserted or taken by this very claim
	free  bool // may be taken over, if expired or abandoned
}

// dest returns the places for the columns of "columns".
func (r *row) dest() []any {
	return []any{&r.token, &r.fingerprint, &r.status, &r.attempt, &r.code, &r.header, &r.body, &r.created, &r.expires, &r.leaseEnd, &r.now}
}

func (r *row) is(s dedup.Status) bool { return r.status.Int32 == int32(s) }

func (r *row) live() bool { return r.is(dedup.StatusInProgress) && r.leaseEnd > r.now }

func (r *row) expired() bool {
	return r.expires <= r.now && !r.live() && !r.is(dedup.StatusUnknown)
}

// young says of a row with an outcome that its commit may still be under way.
func (r *row) young() bool {
	return !r.is(dedup.StatusInProgress) && r.leaseEnd > r.now-micros(durableAfter.Microseconds())
}

func (r *row) holds(t dedup.Token) bool { return string(r.token) == string(t[:]) }

func (r *row) record() dedup.Record {
	rec := dedup.Record{
		Fingerprint: r.fingerprint,
		Status:      dedup.Status(r.status.Int32),
		Response:    dedup.Response{Code: int(r.code.Int32), Header: r.header, Body: r.body},
		Attempt:     int(r.attempt.Int32),
		CreatedAt:   r.created.time(),
		ExpiresAt:   r.expires.time(),
	}
	copy(rec.Token[:], r.token)
	if r.live() {
		rec.LeaseLeft = time.Duration(r.leaseEnd-r.now) * time.Microsecond
	}
	return rec
}

// micros is an instant, in microseconds since 1970. Counted so, it does not
// depend on a driver's or a connection's idea of time zones.
type micros int64

func (m micros) time() time.Time { return time.UnixMicro(int64(m)).UTC() }

// Scan reads what the dialects' queries return for an instant.
func (m *micros) Scan(src any) error {
	switch v := src.(type) {
	case nil:
		*m = 0
	case int64:
		*m = micros(v)
	case time.Time:
		*m = micros(v.UnixMicro())
	case []byte:
		n, err := strconv.ParseInt(string(v), 10, 64)
		*m = micros(n)
		return err
	default:
		return fmt.Errorf("sqlstore: can't read an instant from %T", src)
	}
	return nil
}

// duration returns d in microseconds, rounded up, since a lease or a TTL that
// is positive must not become none.
func duration(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	n := int64(d / time.Microsecond)
	if d%time.Microsecond != 0 {
		n++
	}
	return n
}
