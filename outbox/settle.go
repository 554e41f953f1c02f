package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"
)

// maxError is how much of an error is kept.
const maxError = 2000

// fenced is the condition on rows with the token, and what must be passed for
// it. Arrays go as text, whatever the driver makes of them.
func (o *Outbox) fenced(token Token, seqs []int64) (string, []any) {
	if o.Dialect == Postgres {
		return ` WHERE seq = ANY ($1::text::bigint[]) AND lease_token = $2 AND state = 0`, []any{`{` + list(seqs) + `}`, token[:]}
	}
	return ` WHERE seq IN (` + list(seqs) + `) AND lease_token = ` + literal(token) + ` AND state = 0`, nil
}

// Renew implements [Store].
func (o *Outbox) Renew(ctx context.Context, token Token, seqs []int64, lease time.Duration) (int, error) {
	if err := o.check(true); err != nil {
		return 0, err
	}
	if len(seqs) == 0 {
		return 0, nil
	}
	where, args := o.fenced(token, seqs)
	n, err := affected(o.DB.ExecContext(ctx, `UPDATE `+o.table()+` SET available_at = `+o.after(lease)+where, args...))
	if err != nil {
		return 0, fmt.Errorf("outbox: renew: %w", err)
	}
	return n, nil
}

// Settle implements [Store].
func (o *Outbox) Settle(ctx context.Context, token Token, outcomes []Outcome) (int, error) {
	if err := o.check(true); err != nil {
		return 0, err
	}
	// Those with the same consequence share a statement.
	var order []Outcome
	groups := map[Outcome][]int64{}
	for _, oc := range outcomes {
		seq := oc.Seq
		oc.Seq = 0
		if _, ok := groups[oc]; !ok {
			order = append(order, oc)
		}
		groups[oc] = append(groups[oc], seq)
	}
	if len(order) == 0 {
		return 0, nil
	}
	if len(order) == 1 {
		n, err := o.settle(ctx, o.DB, token, order[0], groups[order[0]])
		if err != nil {
			return 0, fmt.Errorf("outbox: settle: %w", err)
		}
		return n, nil
	}
	total := 0
	err := o.inTx(ctx, "settle", nil, func(tx *sql.Tx) error {
		for _, oc := range order {
			n, err := o.settle(ctx, tx, token, oc, groups[oc])
			if err != nil {
				return err
			}
			total += n
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return total, nil
}

func (o *Outbox) settle(ctx context.Context, tx Execer, token Token, oc Outcome, seqs []int64) (int, error) {
	where, args := o.fenced(token, seqs)
	if oc.Fate == Published && o.Retention == 0 {
		return affected(tx.ExecContext(ctx, `DELETE FROM `+o.table()+where, args...))
	}
	set := `lease_token = NULL, available_at = `
	spent := func() {
		mark := `?`
		if o.Dialect == Postgres {
			mark = `$3`
			args = append(args, clip(oc.Err))
		} else {
			args = []any{clip(oc.Err)}
		}
		set += `, attempts = attempts + 1, last_error = ` + mark
	}
	switch oc.Fate {
	case Published:
		set += o.now() + `, state = ` + strconv.Itoa(statePublished)
	case Released:
		set += o.after(oc.Delay)
	case Failed:
		set += o.after(oc.Delay)
		spent()
	case Blocked:
		// A time that never comes, so that its key counts as busy.
		set += o.never() + `, state = ` + strconv.Itoa(stateBlocked)
		spent()
	case DeadLetter:
		set += o.now() + `, state = ` + strconv.Itoa(stateDead)
		spent()
	default:
		return 0, fmt.Errorf("%w: no such fate: %d", ErrConfig, oc.Fate)
	}
	return affected(tx.ExecContext(ctx, `UPDATE `+o.table()+` SET `+set+where, args...))
}

func (o *Outbox) never() string {
	switch o.Dialect {
	case Postgres:
		return `'infinity'`
	case MySQL:
		return `'9999-12-31 00:00:00'`
	}
	return `9223372036854775807`
}

// clip shortens s to whole UTF-8 without NUL, as the columns want it.
func clip(s string) string {
	if len(s) > maxError {
		s = s[:maxError]
	}
	b := make([]rune, 0, len(s))
	for _, r := range s { // broken bytes come as U+FFFD
		if r != 0 {
			b = append(b, r)
		}
	}
	return string(b)
}

// Purge implements [Store].
func (o *Outbox) Purge(ctx context.Context, limit int) (int, error) {
	if err := o.check(true); err != nil {
		return 0, err
	}
	if limit <= 0 {
		return 0, fmt.Errorf("%w: purge: %w", ErrConfig, errLimit)
	}
	if o.Dialect == MySQL {
		return o.purgeMySQL(ctx, limit)
	}
	old := `state = 3 AND available_at < ` + o.before(o.Retention) + ` ORDER BY available_at LIMIT ` + strconv.Itoa(limit)
	var q string
	switch o.Dialect {
	case Postgres:
		q = `DELETE FROM ` + o.table() + ` WHERE seq = ANY (ARRAY(SELECT seq FROM ` + o.table() + ` WHERE ` + old + ` FOR UPDATE SKIP LOCKED))`
	default:
		q = `DELETE FROM ` + o.table() + ` WHERE seq IN (SELECT seq FROM ` + o.table() + ` WHERE ` + old + `)`
	}
	n, err := affected(o.DB.ExecContext(ctx, q))
	if err != nil {
		return 0, fmt.Errorf("outbox: purge: %w", err)
	}
	return n, nil
}

// purgeMySQL locks what it can get and removes that by its keys. A DELETE with
// the condition itself also locks what it passes on its way, and would wait for
// transactions that are just writing messages.
func (o *Outbox) purgeMySQL(ctx context.Context, limit int) (n int, err error) {
	err = o.inTx(ctx, "purge", &sql.TxOptions{Isolation: sql.LevelReadCommitted}, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, `SELECT seq FROM `+o.table()+` FORCE INDEX (by_time) WHERE state = 3 AND available_at < `+
			o.before(o.Retention)+` ORDER BY available_at LIMIT `+strconv.Itoa(limit)+` FOR UPDATE SKIP LOCKED`)
		if err != nil {
			return err
		}
		defer rows.Close()
		var old []int64
		for rows.Next() {
			var seq int64
			if err := rows.Scan(&seq); err != nil {
				return err
			}
			old = append(old, seq)
		}
		if err := rows.Err(); err != nil || len(old) == 0 {
			return err
		}
		n, err = affected(tx.ExecContext(ctx, `DELETE FROM `+o.table()+` WHERE seq IN (`+list(old)+`)`))
		return err
	})
	return n, err
}

func (o *Outbox) before(d time.Duration) string {
	us := strconv.FormatInt(d.Microseconds(), 10)
	switch o.Dialect {
	case Postgres:
		return `statement_timestamp() - ` + us + ` * interval '1 microsecond'`
	case MySQL:
		return `UTC_TIMESTAMP(6) - INTERVAL ` + us + ` MICROSECOND`
	}
	return sqliteNow + ` - ` + us
}

func affected(res sql.Result, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	return int(n), err
}

// Letter is a poison message, for an operator to look at.
type Letter struct {
	Message      // Attempt is how many were made
	Blocks  bool // its key waits for it
	Err     string
}

// DeadLetters returns at most limit poison messages with a Seq above after, by
// Seq.
func (o *Outbox) DeadLetters(ctx context.Context, after int64, limit int) ([]Letter, error) {
	if err := o.check(true); err != nil {
		return nil, err
	}
	if limit <= 0 {
		return nil, fmt.Errorf("%w: dead letters: %w", ErrConfig, errLimit)
	}
	rows, err := o.DB.QueryContext(ctx, `SELECT `+o.columns()+`, state, last_error FROM `+o.table()+
		` WHERE state IN (1, 2) AND seq > `+strconv.FormatInt(after, 10)+` ORDER BY seq LIMIT `+strconv.Itoa(limit))
	if err != nil {
		return nil, fmt.Errorf("outbox: dead letters: %w", err)
	}
	defer rows.Close()
	var letters []Letter
	for rows.Next() {
		var l Letter
		var header []byte
		var created, state int64
		var text sql.NullString
		if err := rows.Scan(&l.Seq, &l.ID, &l.Topic, &l.Key, &header, &l.Payload, &l.Attempt, &created, &state, &text); err != nil {
			return nil, fmt.Errorf("outbox: dead letters: %w", err)
		}
		l.Created, l.Blocks, l.Err = time.UnixMicro(created), state == stateBlocked, text.String
		if err := l.decodeHeader(header); err != nil {
			return nil, err
		}
		letters = append(letters, l)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("outbox: dead letters: %w", err)
	}
	return letters, nil
}

// Requeue has poison messages tried again, with all their attempts anew, and
// wakes the relay. One that blocked its key is still the first of it. One that
// had been put aside comes after those of its key that went on in the meantime,
// in an order with them that is not promised. It returns how many of seqs were
// poison.
func (o *Outbox) Requeue(ctx context.Context, seqs ...int64) (int, error) {
	n, err := o.dead(ctx, seqs, "requeue", `UPDATE `+o.table()+` SET state = 0, attempts = 0, lease_token = NULL, available_at = `+o.now())
	if n > 0 {
		o.Wake()
	}
	return n, err
}

// Discard deletes poison messages, so that their keys go on without them. It
// returns how many of seqs were poison.
func (o *Outbox) Discard(ctx context.Context, seqs ...int64) (int, error) {
	n, err := o.dead(ctx, seqs, "discard", `DELETE FROM `+o.table())
	if n > 0 {
		o.Wake()
	}
	return n, err
}

func (o *Outbox) dead(ctx context.Context, seqs []int64, what, do string) (int, error) {
	if err := o.check(true); err != nil || len(seqs) == 0 {
		return 0, err
	}
	n, err := affected(o.DB.ExecContext(ctx, do+` WHERE state IN (1, 2) AND seq IN (`+list(seqs)+`)`))
	if err != nil {
		return 0, fmt.Errorf("outbox: %s: %w", what, err)
	}
	return n, nil
}
