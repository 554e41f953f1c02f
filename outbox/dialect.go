package outbox

import (
	"fmt"
	"strings"
)

// DefaultTable is the table's name unless [Outbox.Table] says otherwise.
const DefaultTable = "outbox"

// Dialect is the SQL that an [Outbox]'s database speaks.
type Dialect uint8

// The dialects. MariaDB speaks MySQL.
const (
	Postgres Dialect = iota // PostgreSQL 12 or later
	MySQL                   // MySQL 8.0, MariaDB 10.6, or later
	SQLite                  // SQLite 3.42 or later
)

// States of a row. Those up to stateBlocked hold back what comes after them in
// their key.
const (
	statePending = iota
	stateBlocked
	stateDead
	statePublished
)

// Schema returns the statements that make the table ("" for [DefaultTable]), for
// those who run migrations with a tool of their own. It is safe to run again.
// The table's name may be "schema.table", save in SQLite; each part has letters,
// digits and underscores.
//
// available_at says from when on a message can be claimed. A lease moves it into
// the future, as the wait for the next try does; when a message is published, or
// poison, it has the time of that.
func (d Dialect) Schema(table string) ([]string, error) {
	if table == "" {
		table = DefaultTable
	}
	if err := d.checkTable(table); err != nil {
		return nil, err
	}
	index := table[strings.IndexByte(table, '.')+1:]
	switch d {
	case Postgres:
		return append([]string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	seq          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	id           text COLLATE "C" NOT NULL,
	topic        text COLLATE "C" NOT NULL,
	msg_key      text COLLATE "C" NOT NULL,
	header       bytea,
	payload      bytea NOT NULL,
	state        smallint NOT NULL DEFAULT 0, -- 0 pending, 1 poison and holding its key, 2 dead letter, 3 published
	attempts     integer NOT NULL DEFAULT 0,
	available_at timestamptz NOT NULL DEFAULT now(),
	lease_token  bytea,
	last_error   text,
	created_at   timestamptz NOT NULL DEFAULT now()
)`}, partialIndexes(table, index)...), nil
	case MySQL:
		return []string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	seq          BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
	id           VARBINARY(255) NOT NULL,
	topic        VARBINARY(255) NOT NULL,
	msg_key      VARBINARY(255) NOT NULL,
	header       LONGBLOB,
	payload      LONGBLOB NOT NULL,
	state        TINYINT NOT NULL DEFAULT 0, -- 0 pending, 1 poison and holding its key, 2 dead letter, 3 published
	attempts     INT NOT NULL DEFAULT 0,
	available_at DATETIME(6) NOT NULL, -- UTC
	lease_token  VARBINARY(16),
	last_error   TEXT CHARACTER SET utf8mb4,
	created_at   DATETIME(6) NOT NULL, -- UTC
	KEY by_seq (state, seq),
	KEY by_key (msg_key, seq),
	KEY by_time (state, available_at)
) ENGINE=InnoDB`}, nil
	case SQLite:
		return append([]string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	seq          INTEGER PRIMARY KEY AUTOINCREMENT,
	id           TEXT NOT NULL,
	topic        TEXT NOT NULL,
	msg_key      TEXT NOT NULL,
	header       BLOB,
	payload      BLOB NOT NULL,
	state        INTEGER NOT NULL DEFAULT 0, -- 0 pending, 1 poison and holding its key, 2 dead letter, 3 published
	attempts     INTEGER NOT NULL DEFAULT 0,
	available_at INTEGER NOT NULL, -- microseconds since 1970
	lease_token  BLOB,
	last_error   TEXT,
	created_at   INTEGER NOT NULL  -- microseconds since 1970
)`}, partialIndexes(table, index)...), nil
	}
	return nil, fmt.Errorf("%w: no such dialect: %d", ErrConfig, d)
}

// partialIndexes hold only the rows that are asked for by them, so that kept
// rows cost a relay nothing.
func partialIndexes(table, index string) []string {
	return []string{
		`CREATE INDEX IF NOT EXISTS ` + index + `_seq ON ` + table + ` (seq) WHERE state = 0`,
		`CREATE INDEX IF NOT EXISTS ` + index + `_key ON ` + table + ` (msg_key, seq) WHERE state <= 1 AND msg_key <> ''`,
		`CREATE INDEX IF NOT EXISTS ` + index + `_busy ON ` + table + ` (available_at) WHERE state <= 1 AND msg_key <> ''`,
		`CREATE INDEX IF NOT EXISTS ` + index + `_dead ON ` + table + ` (seq) WHERE state IN (1, 2)`,
		`CREATE INDEX IF NOT EXISTS ` + index + `_published ON ` + table + ` (available_at) WHERE state = 3`,
	}
}

// checkTable lets through what needs no quoting, since the name goes into the
// statements as it is.
func (d Dialect) checkTable(name string) error {
	if d > SQLite {
		return fmt.Errorf("%w: no such dialect: %d", ErrConfig, d)
	}
	parts := strings.Split(name, ".")
	ok := len(parts) == 1 || len(parts) == 2 && d != SQLite
	for _, p := range parts {
		ok = ok && p != "" && len(p) <= 48 && (p[0] < '0' || p[0] > '9')
		for _, c := range []byte(p) {
			ok = ok && (c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z')
		}
	}
	if !ok {
		return fmt.Errorf("%w: the table's name %q has more than letters, digits, underscores and one dot, or is too long", ErrConfig, name)
	}
	return nil
}
