-- status: 1 in progress, 2 completed, 3 unknown (kept until it is resolved).
CREATE TABLE IF NOT EXISTS {table} (
    scope       text COLLATE "C" NOT NULL,
    id_key      text COLLATE "C" NOT NULL,
    token       bytea       NOT NULL, -- fences the current run
    fingerprint bytea       NOT NULL, -- of the request
    status      smallint    NOT NULL,
    attempt     integer     NOT NULL, -- runs started
    lease_until timestamptz NOT NULL,
    created_at  timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    code        integer     NOT NULL DEFAULT 0,
    header      bytea,
    body        bytea,
    PRIMARY KEY (scope, id_key)
);

-- For purging, which never looks at unknown rows.
CREATE INDEX IF NOT EXISTS {index} ON {table} (expires_at) WHERE status <> 3;
