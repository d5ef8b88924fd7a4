-- Who may do what: projects, keys, sessions.
-- Times are milliseconds since the Unix epoch; ids are their text form.

CREATE TABLE projects (
    id          TEXT PRIMARY KEY,
    name        TEXT NOT NULL UNIQUE,
    created_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    id            TEXT PRIMARY KEY,
    project       TEXT NOT NULL REFERENCES projects (id),
    name          TEXT NOT NULL,
    hash          BLOB NOT NULL UNIQUE,
    prefix        TEXT NOT NULL,
    created_at    INTEGER NOT NULL,
    revoked_at    INTEGER,
    last_used_at  INTEGER,
    role          TEXT NOT NULL DEFAULT 'member',
    -- What it is restricted to (JSON); empty: nothing.
    scopes        TEXT NOT NULL DEFAULT '[]',
    expires_at    INTEGER,
    -- The key that it was made with. Nothing: the server made it, or an earlier release did not say.
    made_by       TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_of_project ON keys (project, created_at);

-- Sessions of browsers: keys that were exchanged for a cookie.
CREATE TABLE sessions (
    -- SHA-256 of the cookie's secret.
    hash        BLOB PRIMARY KEY,
    key         TEXT NOT NULL REFERENCES keys (id),
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_of_key ON sessions (key, created_at);
CREATE INDEX sessions_expire ON sessions (expires_at);
