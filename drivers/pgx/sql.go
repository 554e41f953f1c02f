package pgxstore

import "strings"

// statements are a store's SQL. The key is always $1 and $2.
type statements struct {
	insert   string // claimArgs: claims an absent key, and returns its token
	insertTx string // the same, in a transaction that keeps the key to itself
	lease    claiming
	tx       claiming

	get        string
	renew      string // token, lease
	complete   string // token, status, code, header, body, ttl
	completeTx string // the same, whatever the row says
	release    string // token
	resolve    string // new token, code, header, body, ttl
	free       string
	purge      string // limit

	await string // lock: waits until no transaction holds the key
}

// claiming is how a row is claimed that may be there, in a transaction or
// outside.
type claiming struct {
	inTx     bool
	claim    string // claimArgs: the row that is there, or was inserted
	reclaim  string // claimArgs, old token: takes an expired row
	takeOver string // the same: takes an abandoned row, or renews one that is ours
}

// Conditions that several statements share. Times are clock_timestamp()'s,
// since now() stands still in a transaction.
const (
	expired = `(expires_at <= clock_timestamp() AND (status = 2 OR status = 1 AND lease_until <= clock_timestamp()))`
	present = `(expires_at > clock_timestamp() OR status = 3 OR status = 1 AND lease_until > clock_timestamp())`
	doubt   = `(status = 3 OR status = 1 AND lease_until <= clock_timestamp() AND expires_at > clock_timestamp())`
)

// columns are what row.fields scans, but for the kind before and the clock after them.
const columns = `token, fingerprint, status, attempt, code, header, body, lease_until, created_at, expires_at`

// The kinds of row that a claim returns.
const (
	kindThere = 0 // it was there before
	kindFresh = 1 // the claim inserted it
	kindTaken = 2 // no row to see, but a transaction holds the key
)

// Where there is a row, an INSERT with ON CONFLICT DO NOTHING writes nothing,
// takes no transaction id, and waits for nobody. (DO UPDATE would lock and write
// the row of every duplicate.) It does wait for another transaction's row that
// is not committed yet, so that is asked first, by a lock: a transaction takes
// it alone, for as long as it lasts; a claim that is its own commit shares it
// with its like, since these don't make each other wait for long.
const insertSQL = `
INSERT INTO {table} (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
SELECT $1::text, $2::text, $3::bytea, $4::bytea, 1, 1,
	clock_timestamp() + $5::interval, clock_timestamp(), clock_timestamp() + $6::interval
WHERE {lock}($7::bigint)
ON CONFLICT (scope, id_key) DO NOTHING
RETURNING token`

// The same and a look at the row, in one statement. No row comes back if one was
// inserted since the statement began.
const claimSQL = `
WITH old AS MATERIALIZED (
	SELECT {columns} FROM {table} WHERE scope = $1 AND id_key = $2
), lock AS MATERIALIZED (
	SELECT {lock}($7::bigint) AS ok WHERE NOT EXISTS (SELECT FROM old)
), new AS (
	INSERT INTO {table} (scope, id_key, token, fingerprint, status, attempt, lease_until, created_at, expires_at)
	SELECT $1::text, $2::text, $3::bytea, $4::bytea, 1, 1,
		clock_timestamp() + $5::interval, clock_timestamp(), clock_timestamp() + $6::interval
	FROM lock WHERE ok
	ON CONFLICT (scope, id_key) DO NOTHING
	RETURNING {columns}
)
SELECT 1, new.*, clock_timestamp() FROM new
UNION ALL SELECT 0, old.*, clock_timestamp() FROM old
UNION ALL SELECT 2, '', '', 0, 0, 0, NULL, NULL, clock_timestamp(), clock_timestamp(), clock_timestamp(), clock_timestamp()
	FROM lock WHERE NOT ok`

// The old token is compared in the statement, so of several that saw the same
// row only one changes it.
const reclaimSQL = `
WITH lock AS MATERIALIZED (SELECT {lock}($7::bigint) AS ok),
changed AS (
	UPDATE {table} SET token = $3::bytea, fingerprint = $4::bytea, status = 1, attempt = 1,
		lease_until = clock_timestamp() + $5::interval, created_at = clock_timestamp(),
		expires_at = clock_timestamp() + $6::interval, code = 0, header = NULL, body = NULL
	FROM lock
	WHERE ok AND scope = $1 AND id_key = $2 AND token = $8::bytea AND ` + expired + `
	RETURNING 1
)
SELECT ok, EXISTS (SELECT FROM changed) FROM lock`

const takeOverSQL = `
WITH lock AS MATERIALIZED (SELECT {lock}($7::bigint) AS ok),
changed AS (
	UPDATE {table} SET token = $3::bytea, attempt = attempt + CASE WHEN token = $3::bytea THEN 0 ELSE 1 END,
		lease_until = clock_timestamp() + $5::interval, expires_at = clock_timestamp() + $6::interval
	FROM lock
	WHERE ok AND scope = $1 AND id_key = $2 AND token = $8::bytea AND fingerprint = $4::bytea
		AND status = 1 AND (token = $3::bytea OR lease_until <= clock_timestamp()) AND ` + present + `
	RETURNING 1
)
SELECT ok, EXISTS (SELECT FROM changed) FROM lock`

// A row that is completed already keeps its answer: it may have been given out.
const completeSQL = `
UPDATE {table} SET
	status = CASE WHEN status = 1 THEN $4::smallint ELSE status END,
	code = CASE WHEN status = 1 THEN $5::integer ELSE code END,
	header = CASE WHEN status = 1 THEN $6::bytea ELSE header END,
	body = CASE WHEN status = 1 THEN $7::bytea ELSE body END,
	expires_at = clock_timestamp() + $8::interval
WHERE scope = $1 AND id_key = $2 AND token = $3::bytea`

// In the transaction that has claimed it, a row can't be completed already.
const completeTxSQL = `
UPDATE {table} SET status = $4::smallint, code = $5::integer, header = $6::bytea, body = $7::bytea,
	expires_at = clock_timestamp() + $8::interval
WHERE scope = $1 AND id_key = $2 AND token = $3::bytea`

// statement_timestamp() and not clock_timestamp(), which no index can be
// searched by.
const purgeSQL = `
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
	SELECT ctid FROM {table}
	WHERE status <> 3 AND expires_at <= statement_timestamp()
		AND (status = 2 OR lease_until <= statement_timestamp())
	ORDER BY expires_at LIMIT $1
	FOR UPDATE SKIP LOCKED))`

func newStatements(table string) statements {
	expand := func(sql, lock string) string {
		return strings.NewReplacer("{table}", table, "{columns}", columns, "{lock}", lock).Replace(strings.TrimSpace(sql))
	}
	plain := func(sql string) string { return expand(sql, "") }
	shared := func(sql string) string { return expand(sql, "pg_try_advisory_xact_lock_shared") }
	alone := func(sql string) string { return expand(sql, "pg_try_advisory_xact_lock") }

	const mine = ` WHERE scope = $1 AND id_key = $2 AND token = $3::bytea AND status = 1 AND ` + present
	return statements{
		insert:   shared(insertSQL),
		insertTx: alone(insertSQL),
		lease:    claiming{false, shared(claimSQL), shared(reclaimSQL), shared(takeOverSQL)},
		tx:       claiming{true, alone(claimSQL), alone(reclaimSQL), alone(takeOverSQL)},

		get:        plain(`SELECT 0, {columns}, clock_timestamp() FROM {table} WHERE scope = $1 AND id_key = $2`),
		renew:      plain(`UPDATE {table} SET lease_until = clock_timestamp() + $4::interval` + mine),
		complete:   plain(completeSQL + ` AND ` + present),
		completeTx: plain(completeTxSQL),
		release:    plain(`DELETE FROM {table}` + mine),
		resolve: plain(`UPDATE {table} SET token = $3::bytea, status = 2, code = $4::integer, header = $5::bytea,
			body = $6::bytea, expires_at = clock_timestamp() + $7::interval
			WHERE scope = $1 AND id_key = $2 AND ` + doubt),
		free:  plain(`DELETE FROM {table} WHERE scope = $1 AND id_key = $2 AND ` + doubt),
		purge: plain(purgeSQL),

		await: `SELECT pg_advisory_xact_lock($1::bigint)`,
	}
}
