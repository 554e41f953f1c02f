-- Times are UTC, by the database's clock. Keys are bytes, since a text column
-- would take upper and lower case, and trailing blanks, for the same.
-- status: 1 in progress, 2 completed, 3 unknown (kept until it is resolved).
CREATE TABLE IF NOT EXISTS idempotency_keys (
    scope       VARBINARY(255) NOT NULL,
    id_key      VARBINARY(255) NOT NULL,
    token       BINARY(16)     NOT NULL, -- fences the current run
    fingerprint VARBINARY(64)  NOT NULL, -- of the request
    status      TINYINT        NOT NULL,
    attempt     INT            NOT NULL, -- runs started
    lease_until DATETIME(6)    NOT NULL, -- with status 2 and 3: when it came to that
    created_at  DATETIME(6)    NOT NULL,
    expires_at  DATETIME(6)    NOT NULL,
    code        INT            NOT NULL DEFAULT 0,
    header      LONGBLOB,
    body        LONGBLOB,
    PRIMARY KEY (scope, id_key),
    KEY idempotency_keys_expires (status, expires_at) -- for purging
) ENGINE = InnoDB;
