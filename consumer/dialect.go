package consumer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
)

// DefaultTable is the name of an inbox's table.
const DefaultTable = "processed_events"

// Dialect is the SQL that an [Inbox]'s database speaks.
type Dialect uint8

// The dialects. MariaDB speaks MySQL.
const (
	Postgres Dialect = iota
	MySQL
	SQLite
)

// Schema returns the statements that make the inbox's table ("" for
// [DefaultTable]), for those who run migrations with a tool of their own. It is
// safe to run again. The table's name may be "schema.table"; each part has
// letters, digits and underscores.
func (d Dialect) Schema(table string) ([]string, error) {
	if table == "" {
		table = DefaultTable
	}
	if err := checkTable(table); err != nil {
		return nil, err
	}
	_, index, ok := strings.Cut(table, ".")
	if !ok {
		index = table
	}
	switch d {
	case Postgres:
		return []string{
			`CREATE TABLE IF NOT EXISTS ` + table + ` (
	consumer_group text COLLATE "C" NOT NULL,
	event_id       text COLLATE "C" NOT NULL,
	processed_at   timestamptz NOT NULL DEFAULT now(),
	PRIMARY KEY (consumer_group, event_id)
)`,
			`CREATE INDEX IF NOT EXISTS ` + index + `_processed_at ON ` + table + ` (processed_at)`,
		}, nil
	case MySQL:
		return []string{
			`CREATE TABLE IF NOT EXISTS ` + table + ` (
	consumer_group VARBINARY(255) NOT NULL,
	event_id       VARBINARY(255) NOT NULL,
	processed_at   DATETIME(6) NOT NULL,
	duplicates     INT UNSIGNED NOT NULL DEFAULT 0,
	PRIMARY KEY (consumer_group, event_id),
	KEY ` + index + `_processed_at (processed_at)
) ENGINE=InnoDB`,
		}, nil
	case SQLite:
		return []string{
			`CREATE TABLE IF NOT EXISTS ` + table + ` (
	consumer_group TEXT NOT NULL,
	event_id       TEXT NOT NULL,
	processed_at   INTEGER NOT NULL, -- milliseconds since 1970
	PRIMARY KEY (consumer_group, event_id)
) WITHOUT ROWID`,
			`CREATE INDEX IF NOT EXISTS ` + indexName(table, index) + ` ON ` + index + ` (processed_at)`,
		}, nil
	}
	return nil, fmt.Errorf("%w: no such dialect: %d", ErrConfig, d)
}

// indexName is that of SQLite, where an index is named with its database and
// its table without.
func indexName(table, bare string) string {
	return strings.TrimSuffix(table, bare) + bare + "_processed_at"
}

// checkTable lets through what needs no quoting, since the name goes into the
// statements as it is.
func checkTable(name string) error {
	parts := strings.Split(name, ".")
	ok := len(parts) <= 2
	for _, p := range parts {
		ok = ok && p != "" && len(p) <= 48 && !(p[0] >= '0' && p[0] <= '9')
		for _, c := range []byte(p) {
			ok = ok && (c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z')
		}
	}
	if !ok {
		return fmt.Errorf("%w: the table's name %q has more than letters, digits, underscores and one dot, or is too long", ErrConfig, name)
	}
	return nil
}

// statements are those of an inbox; empty where a dialect does not need one.
type statements struct {
	mark, markMany, unmark, marked, old, purge string
}

func (d Dialect) statements(table string) statements {
	switch d {
	case MySQL:
		return statements{
			// A duplicate is told by the 2 affected rows of an update that
			// always changes something: 0 or 1 would depend on the driver's
			// clientFoundRows, and INSERT IGNORE would hide errors in the data.
			mark: `INSERT INTO ` + table + ` (consumer_group, event_id, processed_at) VALUES (?, ?, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE duplicates = duplicates + 1`,
			unmark: `DELETE FROM ` + table + ` WHERE consumer_group = ? AND event_id = ?`,
			marked: `SELECT COUNT(*) FROM ` + table + ` WHERE consumer_group = ? AND event_id = ?`,
			old:    `SELECT consumer_group, event_id FROM ` + table + ` WHERE processed_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND ORDER BY processed_at, consumer_group, event_id LIMIT ?`,
			purge:  `DELETE FROM ` + table + ` WHERE consumer_group = ? AND event_id = ?`,
		}
	case SQLite:
		return statements{
			mark: `INSERT INTO ` + table + ` (consumer_group, event_id, processed_at)
VALUES (?, ?, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)) ON CONFLICT DO NOTHING`,
			unmark: `DELETE FROM ` + table + ` WHERE consumer_group = ? AND event_id = ?`,
			purge: `DELETE FROM ` + table + ` WHERE (consumer_group, event_id) IN (
	SELECT consumer_group, event_id FROM ` + table + `
	WHERE processed_at < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - ? / 1000
	ORDER BY processed_at LIMIT ?)`,
		}
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
		// The events come as a JSON array of [lock, id], so that one statement
		// does for batches of any size, whatever the driver makes of arrays.
		markMany: `WITH held AS MATERIALIZED (
	SELECT ord, e->>1 AS id, pg_try_advisory_xact_lock((e->>0)::bigint) AS got
	FROM json_array_elements($2::json) WITH ORDINALITY AS asked (e, ord)
),
mark AS (
	INSERT INTO ` + table + ` (consumer_group, event_id)
	SELECT $1::text, id FROM held WHERE got ORDER BY ord
	ON CONFLICT DO NOTHING RETURNING event_id
)
SELECT ord - 1, got, event_id IS NOT NULL FROM held LEFT JOIN mark ON event_id = id`,
		unmark: `DELETE FROM ` + table + ` WHERE consumer_group = $1 AND event_id = $2`,
		purge: `DELETE FROM ` + table + ` WHERE (consumer_group, event_id) IN (
	SELECT consumer_group, event_id FROM ` + table + `
	WHERE processed_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
	ORDER BY processed_at LIMIT $2 FOR UPDATE SKIP LOCKED)`,
	}
}

// lockDigest names the lock that is held while an event is being handled.
func lockDigest(table, group, id string) [sha256.Size]byte {
	return sha256.Sum256([]byte(ID("idempotency/consumer", table, group, id)))
}

// Lock returns the number of the Postgres advisory lock that is held while the
// event is being handled, for other implementations of the inbox on the same
// table ("" for [DefaultTable]). Two events with one number only wait for each
// other.
func Lock(table, group, id string) int64 {
	if table == "" {
		table = DefaultTable
	}
	sum := lockDigest(table, group, ID(id))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// lockName is the same for MySQL, whose names have at most 64 characters.
func lockName(table, group, id string) string {
	sum := lockDigest(table, group, ID(id))
	return hex.EncodeToString(sum[:])
}
