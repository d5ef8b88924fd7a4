-- Each time that a sandbox ran: from the commit that says so until it rested or was gone. Kept as long as facts are, and so
-- not tied to the row of the sandbox.
CREATE TABLE instances (
    id                   TEXT PRIMARY KEY,
    sandbox              TEXT NOT NULL,
    project              TEXT NOT NULL,
    isolation            TEXT NOT NULL,
    started_at           INTEGER NOT NULL,
    ended_at             INTEGER,
    reason               TEXT,
    wall_millis          INTEGER NOT NULL DEFAULT 0,
    cpu_micros           INTEGER NOT NULL DEFAULT 0,
    memory_byte_seconds  INTEGER NOT NULL DEFAULT 0,
    disk_byte_seconds    INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX instances_of_sandbox ON instances (sandbox, started_at DESC, id DESC);
CREATE INDEX instances_ended ON instances (ended_at) WHERE ended_at IS NOT NULL;

-- Those that run while the server is upgraded. What they used before that is in the ledger alone.
INSERT INTO instances (id, sandbox, project, isolation, started_at)
    SELECT instance, id, project, isolation, started_at FROM sandboxes
    WHERE instance IS NOT NULL AND started_at IS NOT NULL AND state IN ('running', 'pausing', 'stopping');
