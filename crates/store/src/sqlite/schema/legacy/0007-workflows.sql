-- Durable workflows: one row per run, its events in batches, and what belongs to a namespace.

CREATE TABLE workflow_runs (
    run_id           TEXT PRIMARY KEY,
    namespace        TEXT NOT NULL,
    workflow_id      TEXT NOT NULL,
    -- Of all runs of an id, the one that the id means.
    is_current       INTEGER NOT NULL,
    status           INTEGER NOT NULL,
    workflow_type    TEXT NOT NULL,
    task_queue       TEXT NOT NULL,
    -- Nanoseconds, because that is what clients compare.
    started_at       INTEGER NOT NULL,
    execution_at     INTEGER NOT NULL,
    closed_at        INTEGER,
    history_length   INTEGER NOT NULL,
    history_bytes    INTEGER NOT NULL,
    transitions      INTEGER NOT NULL,
    parent_id        TEXT,
    parent_run_id    TEXT,
    root_id          TEXT,
    root_run_id      TEXT,
    -- A JSON object: what people search by.
    search           TEXT NOT NULL,
    -- It runs, or has something to tell others: a server that starts has to look at it.
    is_open          INTEGER NOT NULL,
    is_ready         INTEGER NOT NULL,
    deadline         INTEGER,
    state            BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX workflow_runs_current ON workflow_runs (namespace, workflow_id) WHERE is_current = 1;
CREATE INDEX workflow_runs_open ON workflow_runs (is_open) WHERE is_open = 1;
CREATE INDEX workflow_runs_listed
    ON workflow_runs (namespace, COALESCE(closed_at, 9223372036854775807) DESC, started_at DESC, run_id);

CREATE TABLE workflow_events (
    run_id   TEXT NOT NULL,
    first_id INTEGER NOT NULL,
    body     BLOB NOT NULL,
    PRIMARY KEY (run_id, first_id)
) STRICT, WITHOUT ROWID;

-- Namespaces, schedules and the like: few, small, read as a whole when the server starts.
CREATE TABLE workflow_items (
    kind      TEXT NOT NULL,
    namespace TEXT NOT NULL,
    id        TEXT NOT NULL,
    body      BLOB NOT NULL,
    PRIMARY KEY (kind, namespace, id)
) STRICT, WITHOUT ROWID;
