package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Outbox is the table of messages in a database. DB is required for all but
// Enqueue and Wake. It must not be copied once in use.
type Outbox struct {
	DB      *sql.DB
	Dialect Dialect

	// Table is the table's name, maybe with its schema ([DefaultTable] if "").
	// See [Dialect.Schema].
	Table string

	// TxOptions are those of the transactions that InTx begins; nil for the
	// driver's defaults.
	TxOptions *sql.TxOptions

	// Retention is for how long a published message is kept. If 0, it is
	// deleted when it has been published.
	Retention time.Duration

	// Inject adds to the headers of each message that is enqueued what ctx
	// knows of the trace; nil for nothing. With OpenTelemetry:
	//
	//	func(ctx context.Context, h map[string]string) {
	//		otel.GetTextMapPropagator().Inject(ctx, propagation.MapCarrier(h))
	//	}
	Inject func(ctx context.Context, header map[string]string)

	once sync.Once
	wake chan struct{}
}

var _ Store = (*Outbox)(nil)

// Execer is a *sql.Tx, or a *sql.Conn in a transaction.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// maxRows keeps an INSERT below the 65,535 parameters of Postgres and MySQL, and
// the 32,766 of SQLite.
const maxRows = 4096

// Enqueue writes msgs, in their order, in the caller's transaction: they will be
// published if it commits. It is one statement for each 4,096 messages. (Over
// go-sql-driver/mysql, one round trip wants interpolateParams=true.)
//
// Call [Outbox.Wake] after the commit, or use [Outbox.InTx], lest the relay
// finds the messages only when it polls.
//
// An error that Is [ErrMessage] comes before anything was written. All others
// are the database's: roll back.
func (o *Outbox) Enqueue(ctx context.Context, tx Execer, msgs ...Message) error {
	if err := o.check(false); err != nil {
		return err
	}
	args := make([]any, 0, 5*len(msgs))
	for i, m := range msgs {
		header, err := o.Prepare(ctx, &m)
		if err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
		args = append(args, o.text(m.ID), o.text(m.Topic), o.text(m.Key), header, m.Payload)
	}
	for len(args) > 0 {
		n := min(len(args), 5*maxRows)
		if _, err := tx.ExecContext(ctx, o.insert(n/5), args[:n]...); err != nil {
			return fmt.Errorf("outbox: enqueue: %w", err)
		}
		args = args[n:]
	}
	return nil
}

// Prepare makes m ready to be written: with an id, the trace's headers, and a
// payload that is not nil. It returns the header as the table holds it. It is
// for other implementations of Enqueue.
func (o *Outbox) Prepare(ctx context.Context, m *Message) (header []byte, err error) {
	if o.Inject != nil {
		h := make(map[string]string, len(m.Header)+3)
		for k, v := range m.Header { // the caller's map is not ours to change
			h[k] = v
		}
		o.Inject(ctx, h)
		m.Header = h
	}
	if m.Payload == nil {
		m.Payload = []byte{}
	}
	return m.Encode()
}

// insert returns the statement that writes n rows.
func (o *Outbox) insert(n int) string {
	var b strings.Builder
	b.Grow(160 + 64*n)
	b.WriteString("INSERT INTO ")
	b.WriteString(o.table())
	switch o.Dialect {
	case Postgres:
		b.WriteString(" (id, topic, msg_key, header, payload) VALUES ")
	default:
		b.WriteString(" (id, topic, msg_key, header, payload, available_at, created_at) VALUES ")
	}
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		switch o.Dialect {
		case Postgres:
			for j := range 5 {
				b.WriteString([]string{"($", ",$", ",$", ",$", ",$"}[j])
				b.WriteString(strconv.Itoa(5*i + j + 1))
			}
			b.WriteByte(')')
		case MySQL:
			b.WriteString("(?,?,?,?,?,UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))")
		default:
			b.WriteString("(?,?,?,?,?," + sqliteNow + "," + sqliteNow + ")")
		}
	}
	return b.String()
}

// InTx runs fn in a transaction, commits it, and wakes the relay. It is rolled
// back if fn returns an error, or panics. An error of the commit may mean that
// it is not known whether it was committed.
func (o *Outbox) InTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	if err := o.check(true); err != nil {
		return err
	}
	tx, err := o.DB.BeginTx(ctx, o.TxOptions)
	if err != nil {
		return fmt.Errorf("outbox: begin: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("outbox: commit: %w", err)
	}
	o.Wake()
	return nil
}

// Wake tells a relay in this process that there are messages. It never blocks.
func (o *Outbox) Wake() {
	select {
	case o.wakeups() <- struct{}{}:
	default:
	}
}

// Wakeups implements [Store].
func (o *Outbox) Wakeups() <-chan struct{} { return o.wakeups() }

func (o *Outbox) wakeups() chan struct{} {
	o.once.Do(func() { o.wake = make(chan struct{}, 1) })
	return o.wake
}

// Migrate makes the table. It may run again, and on several nodes at once.
func (o *Outbox) Migrate(ctx context.Context) error {
	if err := o.check(true); err != nil {
		return err
	}
	schema, err := o.Dialect.Schema(o.Table)
	if err != nil {
		return err
	}
	return o.inTx(ctx, "migrate", nil, func(tx *sql.Tx) error {
		if o.Dialect == Postgres {
			// Postgres's IF NOT EXISTS fails for one of two that run at once.
			h := fnv.New64a()
			_, _ = h.Write([]byte("idempotency/outbox " + o.table()))
			if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(h.Sum64())); err != nil {
				return err
			}
		}
		for _, q := range schema {
			if _, err := tx.ExecContext(ctx, q); err != nil {
				return err
			}
		}
		return nil
	})
}

// inTx runs fn in a transaction of the outbox's own.
func (o *Outbox) inTx(ctx context.Context, what string, opts *sql.TxOptions, fn func(*sql.Tx) error) error {
	tx, err := o.DB.BeginTx(ctx, opts)
	if err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	if err = fn(tx); err == nil {
		err = tx.Commit()
	}
	if err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	return nil
}

// text is s as the columns hold it: bytes in MySQL, where a collation would take
// different keys for the same.
func (o *Outbox) text(s string) any {
	if o.Dialect == MySQL {
		return []byte(s)
	}
	return s
}

func (o *Outbox) table() string {
	if o.Table == "" {
		return DefaultTable
	}
	return o.Table
}

func (o *Outbox) check(db bool) error {
	switch {
	case o == nil:
		return fmt.Errorf("%w: the Outbox is nil", ErrConfig)
	case db && o.DB == nil:
		return fmt.Errorf("%w: DB is nil", ErrConfig)
	case o.Retention < 0:
		return fmt.Errorf("%w: Retention must not be negative", ErrConfig)
	}
	return o.Dialect.checkTable(o.table())
}

var errLimit = errors.New("the limit must be positive")
