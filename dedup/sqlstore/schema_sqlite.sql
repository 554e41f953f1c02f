-- Times are microseconds since 1970 by the database's clock.
-- status: 1 in progress, 2 completed, 3 unknown (kept until it is resolved).
CREATE TABLE IF NOT EXISTS idempotency_keys (
    scope       TEXT    NOT NULL,
    id_key      TEXT    NOT NULL,
    token       BLOB    NOT NULL, -- fences the current run
    fingerprint BLOB    NOT NULL, -- of the request
    status      INTEGER NOT NULL,
    attempt     INTEGER NOT NULL, -- runs started
    lease_until INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    code        INTEGER NOT NULL DEFAULT 0,
    header      BLOB,
    body        BLOB,
    PRIMARY KEY (scope, id_key)
) STRICT;

-- For purging, which never looks at unknown rows.
CREATE INDEX IF NOT EXISTS idempotency_keys_expires ON idempotency_keys (expires_at) WHERE status <> 3;
