-- State that survives sandboxes: snapshots and volumes.

-- The bytes lie in the vault under the same id.
CREATE TABLE snapshots (
    id            TEXT PRIMARY KEY,
    project       TEXT NOT NULL REFERENCES projects (id),
    owner         TEXT NOT NULL,
    name          TEXT,
    kind          TEXT NOT NULL,
    -- The sandbox it was taken of; that may be long gone.
    sandbox       TEXT,
    parent        TEXT,
    template      TEXT NOT NULL,
    isolation     TEXT NOT NULL,
    runtime       TEXT NOT NULL,
    cpu_features  TEXT NOT NULL,
    spec          TEXT NOT NULL,
    total_bytes   INTEGER NOT NULL,
    stored_bytes  INTEGER NOT NULL,
    created_at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX snapshots_newest ON snapshots (project, created_at DESC, id DESC) WHERE owner = 'user';
CREATE UNIQUE INDEX snapshots_by_name ON snapshots (project, name) WHERE owner = 'user' AND name IS NOT NULL;
CREATE INDEX snapshots_of_sandbox ON snapshots (sandbox, created_at DESC) WHERE sandbox IS NOT NULL;
CREATE INDEX snapshots_of_template ON snapshots (template);
CREATE INDEX snapshots_of_project ON snapshots (project);

CREATE TABLE volumes (
    id           TEXT PRIMARY KEY,
    project      TEXT NOT NULL REFERENCES projects (id),
    name         TEXT NOT NULL,
    state        TEXT NOT NULL,
    limit_bytes  INTEGER NOT NULL,
    used_bytes   INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    UNIQUE (project, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX volumes_newest ON volumes (project, created_at DESC, id DESC);

-- Which volumes a sandbox that has not ended sees, and where. A volume with one of these cannot be deleted.
CREATE TABLE attachments (
    sandbox    TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    path       TEXT NOT NULL,
    volume     TEXT NOT NULL REFERENCES volumes (id),
    read_only  INTEGER NOT NULL,
    PRIMARY KEY (sandbox, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX attachments_of_volume ON attachments (volume);
