-- What sandboxes reach: secrets that are put into requests on the way out, and what has gone through.

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
