package pgxinbox

import (
	"fmt"

	"github.com/effectonce/idempotency/consumer"
)

type statements struct {
	mark, purge string
	args        []any // of mark
}

// statements returns those for the event id, or why they can't work.
func (in *Inbox) statements(id string) (statements, error) {
	table := in.Table
	if table == "" {
		table = consumer.DefaultTable
	}
	if _, err := consumer.Postgres.Schema(table); err != nil {
		return statements{}, err
	}
	switch {
	case id == "":
		return statements{}, fmt.Errorf("%w: it is empty", consumer.ErrNoID)
	case consumer.ID(in.Group) != in.Group:
		return statements{}, fmt.Errorf("%w: the group must have at most 255 bytes of UTF-8 without NUL", consumer.ErrConfig)
	case in.Retention < 0:
		return statements{}, fmt.Errorf("%w: Retention must not be negative", consumer.ErrConfig)
	}
	return statements{
		// Whoever inserts a row that another transaction has inserted and not
		// committed waits for that one's end. The lock, taken first, tells so
		// at once. MATERIALIZED, so that it is asked for once, and first.
		mark: `WITH lock AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($1) AS got),
mark AS (
	INSERT INTO ` + table + ` (consumer_group, event_id)
	SELECT $2::text, $3::text FROM lock WHERE got
	ON CONFLICT DO NOTHING RETURNING 1
)
SELECT (SELECT got FROM lock), EXISTS (SELECT 1 FROM mark)`,
		purge: `DELETE FROM ` + table + ` WHERE (consumer_group, event_id) IN (
	SELECT consumer_group, event_id FROM ` + table + `
	WHERE processed_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
	ORDER BY processed_at LIMIT $2 FOR UPDATE SKIP LOCKED)`,
		args: []any{consumer.Lock(table, in.Group, id), in.Group, consumer.ID(id)},
	}, nil
}
