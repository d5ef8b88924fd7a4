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
    last_used_at  INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_of_project ON keys (project, created_at);

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
    version          INTEGER NOT NULL
) STRICT;
CREATE INDEX sandboxes_newest ON sandboxes (project, created_at DESC, id DESC);
CREATE INDEX sandboxes_due ON sandboxes (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX sandboxes_live ON sandboxes (project) WHERE state IN ('starting', 'running', 'deleting');
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE UNIQUE INDEX sandboxes_idempotency ON sandboxes (project, idempotency_key) WHERE idempotency_key IS NOT NULL;

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

-- The ledger. AUTOINCREMENT, so that a number is never given twice, even after retention.
CREATE TABLE facts (
    seq      INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    project  TEXT NOT NULL,
    sandbox  TEXT,
    kind     TEXT NOT NULL,
    data     TEXT NOT NULL
) STRICT;
CREATE INDEX facts_of_project ON facts (project, seq);
CREATE INDEX facts_of_sandbox ON facts (sandbox, seq) WHERE sandbox IS NOT NULL;
CREATE INDEX facts_usage ON facts (project, at) WHERE kind = 'usage';
CREATE INDEX facts_by_age ON facts (at);

-- Holds a row only inside of the transaction that applies retention: facts before that time may go.
CREATE TABLE fact_retention (before INTEGER NOT NULL) STRICT;

CREATE TRIGGER facts_never_change BEFORE UPDATE ON facts
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: a fact cannot be changed');
END;
-- INSERT OR REPLACE deletes the old row without asking the trigger below.
CREATE TRIGGER facts_never_replaced BEFORE INSERT ON facts
WHEN EXISTS (SELECT 1 FROM facts WHERE seq = NEW.seq)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: a fact cannot be replaced');
END;
CREATE TRIGGER facts_never_vanish BEFORE DELETE ON facts
WHEN NOT EXISTS (SELECT 1 FROM fact_retention WHERE OLD.at < before)
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: facts go only by retention');
END;
