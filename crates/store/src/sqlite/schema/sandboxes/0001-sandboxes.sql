-- Sandboxes, what they may use and what they leave.
-- Times are milliseconds since the Unix epoch; ids are their text form.

CREATE TABLE sandboxes (
    id               TEXT PRIMARY KEY,
    project          TEXT NOT NULL REFERENCES projects (id),
    template         TEXT NOT NULL,
    isolation        TEXT NOT NULL,
    spec             TEXT NOT NULL,
    state            TEXT NOT NULL,
    instance         TEXT,
    created_at       INTEGER NOT NULL,
    started_at       INTEGER,
    ended_at         INTEGER,
    deadline         INTEGER,
    last_used_at     INTEGER NOT NULL,
    -- When a timer has to fire: the earlier of the deadline and the end of the idle time.
    due_at           INTEGER,
    ending           TEXT,
    kill_requested   INTEGER NOT NULL,
    idempotency_key  TEXT,
    request_digest   BLOB,
    version          INTEGER NOT NULL,
    -- What it comes back from, and what is being written while it is put to rest (JSON).
    saved            TEXT,
    saving           TEXT,
    -- A deadline that failed to save does not ask again before.
    hold_off         INTEGER
) STRICT;
CREATE INDEX sandboxes_newest ON sandboxes (project, created_at DESC, id DESC);
CREATE INDEX sandboxes_due ON sandboxes (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE UNIQUE INDEX sandboxes_idempotency ON sandboxes (project, idempotency_key) WHERE idempotency_key IS NOT NULL;
-- Those that run count against a project's limit; those that rest do not, but a server has to look after them too.
CREATE INDEX sandboxes_with_instance ON sandboxes (project)
    WHERE state IN ('starting', 'running', 'pausing', 'resuming', 'stopping', 'deleting');
CREATE INDEX sandboxes_live ON sandboxes (created_at) WHERE state NOT IN ('deleted', 'failed');

CREATE TABLE labels (
    sandbox  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    key      TEXT NOT NULL,
    value    TEXT NOT NULL,
    PRIMARY KEY (sandbox, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE artifacts (
    id          TEXT PRIMARY KEY,
    project     TEXT NOT NULL REFERENCES projects (id),
    name        TEXT NOT NULL,
    sandbox     TEXT,
    kind        TEXT NOT NULL,
    digest      TEXT NOT NULL,
    size        INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX artifacts_newest ON artifacts (project, created_at DESC, id DESC);
CREATE INDEX artifacts_by_name ON artifacts (project, name, created_at DESC, id DESC);
CREATE INDEX artifacts_by_digest ON artifacts (digest);
CREATE INDEX artifacts_expiring ON artifacts (expires_at) WHERE expires_at IS NOT NULL;

-- What is put into requests on the way out.
CREATE TABLE secrets (
    id          TEXT PRIMARY KEY,
    project     TEXT NOT NULL REFERENCES projects (id),
    name        TEXT NOT NULL,
    -- The value, encrypted with a key that is not in this file.
    sealed      BLOB NOT NULL,
    -- Where it goes, and how (JSON).
    binding     TEXT NOT NULL,
    created_at  INTEGER NOT NULL,
    rotated_at  INTEGER,
    expires_at  INTEGER,
    UNIQUE (project, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX secrets_newest ON secrets (project, created_at DESC, id DESC);

-- Counted over the whole life of a sandbox, for its budgets.
CREATE TABLE network_usage (
    sandbox      TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    bytes_up     INTEGER NOT NULL,
    bytes_down   INTEGER NOT NULL,
    connections  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
