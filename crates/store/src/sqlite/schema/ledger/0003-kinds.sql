-- What each project has of each kind of fact about a decision, so that where those are too much the kind goes that there is most
-- of: who may make one kind cannot push out the others.
CREATE TABLE kept_sizes (
    project  TEXT NOT NULL,
    kind     TEXT NOT NULL,
    bytes    INTEGER NOT NULL,
    PRIMARY KEY (project, kind)
) STRICT, WITHOUT ROWID;

-- Whose templates are everyone's is decided, too.
DROP TRIGGER facts_never_change;
UPDATE ledger_sizes SET
    bytes = ledger_sizes.bytes - moved.bytes,
    kept_bytes = kept_bytes + moved.bytes
FROM (SELECT project, sum(250 + octet_length(data)) AS bytes FROM facts
      WHERE kept IS NULL AND kind IN ('template.shared', 'template.unshared', 'template.deleted') GROUP BY project) AS moved
WHERE ledger_sizes.project = moved.project;
UPDATE facts SET kept = 1
    WHERE kept IS NULL AND kind IN ('template.shared', 'template.unshared', 'template.deleted');
CREATE TRIGGER facts_never_change BEFORE UPDATE ON facts
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: a fact cannot be changed');
END;

CREATE INDEX facts_kept ON facts (project, kind, seq) WHERE kept IS NOT NULL;
INSERT INTO kept_sizes (project, kind, bytes)
    SELECT project, kind, sum(250 + octet_length(data)) FROM facts WHERE kept IS NOT NULL GROUP BY project, kind;
CREATE TRIGGER facts_kept_counted AFTER INSERT ON facts WHEN NEW.kept IS NOT NULL
BEGIN
    INSERT INTO kept_sizes (project, kind, bytes) VALUES (NEW.project, NEW.kind, 250 + octet_length(NEW.data))
        ON CONFLICT (project, kind) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER facts_kept_gone AFTER DELETE ON facts WHEN OLD.kept IS NOT NULL
BEGIN
    UPDATE kept_sizes SET bytes = bytes - 250 - octet_length(OLD.data) WHERE project = OLD.project AND kind = OLD.kind;
END;
