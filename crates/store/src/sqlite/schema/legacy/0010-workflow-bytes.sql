-- What each namespace keeps of its workflows: counted where it is written and deleted, and once here for what was there before.
-- The numbers are those of workflows.rs.

CREATE TABLE workflow_bytes (
    namespace TEXT PRIMARY KEY,
    bytes     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO workflow_bytes (namespace, bytes)
    SELECT namespace, sum(bytes) FROM (
        SELECT namespace, 2048 + length(state) + octet_length(search) AS bytes FROM workflow_runs
        UNION ALL
        SELECT namespace, 64 + length(body) FROM workflow_events JOIN workflow_runs USING (run_id)
    ) GROUP BY namespace;
