package outbox

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

const sqliteNow = `CAST(unixepoch('subsec') * 1000000 AS INTEGER)`

// columns are those of a Message; the last is created_at in microseconds.
func (o *Outbox) columns() string {
	const c = `seq, id, topic, msg_key, header, payload, attempts, `
	switch o.Dialect {
	case Postgres:
		return c + `(extract(epoch FROM created_at) * 1000000)::bigint`
	case MySQL:
		return c + `TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at)`
	}
	return c + `created_at`
}

// now is the database's time, and that after a number of microseconds.
func (o *Outbox) now() string {
	switch o.Dialect {
	case Postgres:
		return `statement_timestamp()`
	case MySQL:
		return `UTC_TIMESTAMP(6)`
	}
	return sqliteNow
}

func (o *Outbox) after(d time.Duration) string {
	us := strconv.FormatInt(max(d, 0).Microseconds(), 10)
	switch o.Dialect {
	case Postgres:
		return `statement_timestamp() + ` + us + ` * interval '1 microsecond'`
	case MySQL:
		return `UTC_TIMESTAMP(6) + INTERVAL ` + us + ` MICROSECOND`
	}
	return sqliteNow + ` + ` + us
}

// available is what can be claimed but for the row locks of others. A key of
// which any message is leased, waits or is blocked is out as a whole: such
// messages are always the first of their key.
func (o *Outbox) available() string {
	return `state = 0 AND available_at <= ` + o.now() + ` AND (msg_key = '' OR msg_key NOT IN (SELECT msg_key FROM ` + o.table() +
		` WHERE state <= 1 AND msg_key <> '' AND available_at > ` + o.now() + `))`
}

// Claim implements [Store].
func (o *Outbox) Claim(ctx context.Context, limit int, lease time.Duration) (Claim, error) {
	if err := o.check(true); err != nil {
		return Claim{}, err
	}
	switch {
	case limit <= 0:
		return Claim{}, fmt.Errorf("%w: claim: %w", ErrConfig, errLimit)
	case lease < time.Millisecond:
		return Claim{}, fmt.Errorf("%w: claim: the lease must be at least a millisecond", ErrConfig)
	}
	c := Claim{Token: NewToken()}
	var err error
	switch o.Dialect {
	case Postgres:
		c.Messages, err = o.query(ctx, o.DB, o.claimPostgres(limit), c.Token[:], lease.Microseconds())
	case MySQL:
		c.Messages, err = o.claimMySQL(ctx, c.Token, limit, lease)
	default:
		c.Messages, err = o.claimSQLite(ctx, c.Token, limit, lease)
	}
	if err != nil {
		return Claim{}, fmt.Errorf("outbox: claim: %w", err)
	}
	// UPDATE … RETURNING gives rows in any order.
	slices.SortFunc(c.Messages, func(a, b Message) int { return int(min(max(a.Seq-b.Seq, -1), 1)) })
	return c, nil
}

// claimPostgres is one statement. Row locks pass over what another relay is just
// claiming, so the rows got can lack the first of a key, or one in between; hole
// is the first lacking row of each key, and only what is before it is taken.
//
// All of it reads one snapshot: a relay that was faster by a whole claim made its
// rows either busy in it, or unfit when they are locked, and so holes.
//
// The limit is written out, since a plan made for any limit would read and sort
// the whole backlog.
//
// Its commit waits for no disk: a lease that a crash of the database forgets
// only means that the messages are claimed again.
func (o *Outbox) claimPostgres(limit int) string {
	t := o.table()
	return `WITH quick AS MATERIALIZED (
	SELECT set_config('synchronous_commit', 'off', true)
), got AS MATERIALIZED (
	SELECT seq, msg_key FROM ` + t + ` WHERE ` + o.available() + `
	ORDER BY seq LIMIT ` + strconv.Itoa(limit) + ` FOR UPDATE SKIP LOCKED
), hole AS MATERIALIZED (
	SELECT k.msg_key, h.seq FROM (SELECT DISTINCT msg_key FROM got WHERE msg_key <> '') k
	CROSS JOIN LATERAL (
		SELECT m.seq FROM ` + t + ` m
		WHERE m.msg_key = k.msg_key AND m.state <= 1 AND m.msg_key <> '' AND m.seq NOT IN (SELECT seq FROM got)
		ORDER BY m.seq LIMIT 1
	) h
)
UPDATE ` + t + ` SET lease_token = $1, available_at = statement_timestamp() + $2::bigint * interval '1 microsecond'
WHERE seq = ANY (ARRAY(
	SELECT got.seq FROM quick, got LEFT JOIN hole ON hole.msg_key = got.msg_key
	WHERE hole.seq IS NULL OR got.seq < hole.seq
))
RETURNING ` + o.columns()
}

// claimMySQL does the same in a short transaction, since UPDATE returns no rows.
// In REPEATABLE READ it would lock gaps, which those who enqueue then wait for.
func (o *Outbox) claimMySQL(ctx context.Context, token Token, limit int, lease time.Duration) ([]Message, error) {
	var msgs []Message
	err := o.inTx(ctx, "lease", &sql.TxOptions{Isolation: sql.LevelReadCommitted}, func(tx *sql.Tx) error {
		got, err := o.query(ctx, tx, `SELECT `+o.columns()+` FROM `+o.table()+` FORCE INDEX (by_seq) WHERE `+o.available()+
			` ORDER BY seq LIMIT `+strconv.Itoa(limit)+` FOR UPDATE SKIP LOCKED`)
		if err != nil || len(got) == 0 {
			return err
		}
		holes, err := o.holes(ctx, tx, got)
		if err != nil {
			return err
		}
		for _, m := range got {
			if hole, ok := holes[m.Key]; !ok || m.Seq < hole {
				msgs = append(msgs, m)
			}
		}
		if len(msgs) == 0 {
			return nil
		}
		_, err = tx.ExecContext(ctx, `UPDATE `+o.table()+` SET lease_token = `+literal(token)+`, available_at = `+o.after(lease)+
			` WHERE seq IN (`+list(seqs(msgs))+`)`)
		return err
	})
	return msgs, err
}

// holes returns, for each key in got, the first message of the key that is not in
// got, if that is before the last one of got. Each is read without a lock.
func (o *Outbox) holes(ctx context.Context, tx *sql.Tx, got []Message) (map[string]int64, error) {
	var keys []any
	seen := map[string]bool{"": true}
	for _, m := range got {
		if !seen[m.Key] {
			seen[m.Key] = true
			keys = append(keys, []byte(m.Key))
		}
	}
	if len(keys) == 0 {
		return nil, nil
	}
	s := list(seqs(got))
	rows, err := tx.QueryContext(ctx, `SELECT msg_key, MIN(seq) FROM `+o.table()+` FORCE INDEX (by_key)
WHERE msg_key IN (?`+strings.Repeat(",?", len(keys)-1)+`) AND state <= 1 AND seq < `+strconv.FormatInt(got[len(got)-1].Seq, 10)+
		` AND seq NOT IN (`+s+`) GROUP BY msg_key`, keys...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	holes := map[string]int64{}
	for rows.Next() {
		var key string
		var seq int64
		if err := rows.Scan(&key, &seq); err != nil {
			return nil, err
		}
		holes[key] = seq
	}
	return holes, rows.Err()
}

// claimSQLite has no one beside it, since SQLite has one writer at a time. It
// looks first, so that a relay with nothing to do does not take the write lock.
func (o *Outbox) claimSQLite(ctx context.Context, token Token, limit int, lease time.Duration) ([]Message, error) {
	var any bool
	if err := o.DB.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM `+o.table()+` WHERE `+o.available()+`)`).Scan(&any); err != nil || !any {
		return nil, err
	}
	return o.query(ctx, o.DB, `UPDATE `+o.table()+` SET lease_token = `+literal(token)+`, available_at = `+o.after(lease)+`
WHERE seq IN (SELECT seq FROM `+o.table()+` WHERE `+o.available()+` ORDER BY seq LIMIT `+strconv.Itoa(limit)+`)
RETURNING `+o.columns())
}

type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// query reads messages.
func (o *Outbox) query(ctx context.Context, q querier, query string, args ...any) ([]Message, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var msgs []Message
	for rows.Next() {
		var m Message
		var header []byte
		var created int64
		if err := rows.Scan(&m.Seq, &m.ID, &m.Topic, &m.Key, &header, &m.Payload, &m.Attempt, &created); err != nil {
			return nil, err
		}
		m.Attempt++
		m.Created = time.UnixMicro(created)
		if err := m.decodeHeader(header); err != nil {
			return nil, err
		}
		msgs = append(msgs, m)
	}
	return msgs, rows.Err()
}

func seqs(msgs []Message) []int64 {
	s := make([]int64, len(msgs))
	for i, m := range msgs {
		s[i] = m.Seq
	}
	return s
}

// list writes numbers into a statement as they are: they need no quoting, and
// MySQL's driver sends a statement without parameters in one round trip.
func list(seqs []int64) string {
	b := make([]byte, 0, 12*len(seqs))
	for i, s := range seqs {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, s, 10)
	}
	return string(b)
}

// literal is the token in MySQL's and SQLite's SQL.
func literal(t Token) string { return `x'` + hex.EncodeToString(t[:]) + `'` }
