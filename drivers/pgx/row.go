package pgxstore

import (
	"bytes"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/effectonce/idempotency/dedup"
)

// row is a row of the table as one statement saw it.
type row struct {
	kind        int32 // kindThere, kindFresh or kindTaken
	token       []byte
	fingerprint []byte
	status      dedup.Status
	attempt     int
	response    dedup.Response
	leaseUntil  time.Time
	createdAt   time.Time
	expiresAt   time.Time
	now         time.Time // the database's clock
}

// fields are where the columns go.
func (r *row) fields() []any {
	return []any{&r.kind, &r.token, &r.fingerprint, (*uint8)(&r.status), &r.attempt,
		&r.response.Code, &r.response.Header, &r.response.Body,
		&r.leaseUntil, &r.createdAt, &r.expiresAt, &r.now}
}

func (r *row) live() bool {
	return r.status == dedup.StatusInProgress && r.leaseUntil.After(r.now)
}

func (r *row) expired() bool {
	return !r.expiresAt.After(r.now) && r.status != dedup.StatusUnknown && !r.live()
}

func (r *row) holds(t dedup.Token) bool { return bytes.Equal(r.token, t[:]) }

func (r *row) record() dedup.Record {
	rec := dedup.Record{
		Fingerprint: r.fingerprint,
		Status:      r.status,
		Response:    r.response,
		Attempt:     r.attempt,
		CreatedAt:   r.createdAt,
		ExpiresAt:   r.expiresAt,
	}
	copy(rec.Token[:], r.token)
	if r.live() {
		rec.LeaseLeft = r.leaseUntil.Sub(r.now)
	}
	return rec
}

// step is what a claim must do to the row that it found.
type step uint8

const (
	stepNone step = iota // the claim is answered
	stepReclaim
	stepTakeOver // an abandoned row, or one that is ours and about to be lost
)

// judge says what r means to the claim c, or what must be done to it first.
func (r *row) judge(c dedup.Claim) (dedup.State, step) {
	switch {
	case r.kind == kindFresh:
		return dedup.Won, stepNone
	case r.kind == kindTaken:
		return dedup.InProgress, stepNone
	case r.expired():
		return 0, stepReclaim
	case !bytes.Equal(r.fingerprint, c.Fingerprint):
		return dedup.Mismatch, stepNone
	case r.status == dedup.StatusCompleted:
		return dedup.Completed, stepNone
	case r.status == dedup.StatusUnknown:
		return dedup.Unknown, stepNone
	case r.holds(c.Token):
		state := dedup.Won
		if r.attempt > 1 {
			state = dedup.Abandoned
		}
		if !r.live() {
			return state, stepTakeOver
		}
		return state, stepNone
	case r.live():
		return dedup.InProgress, stepNone
	}
	return dedup.Abandoned, stepTakeOver
}

// interval is d in microseconds, which is what the database counts in, rounded
// up: what is shorter must not become 0. Less than 0 is 0.
func interval(d time.Duration) pgtype.Interval {
	d = min(max(d, 0), math.MaxInt64-time.Microsecond)
	return pgtype.Interval{Microseconds: int64((d + time.Microsecond - 1) / time.Microsecond), Valid: true}
}
