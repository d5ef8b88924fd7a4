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
