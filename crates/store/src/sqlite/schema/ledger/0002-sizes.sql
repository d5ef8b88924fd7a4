-- What is left of each project's doings, in bytes: facts, instances, model calls, ended sandboxes. Triggers count it, here and in
-- the domains that come after, so that it is right whoever writes or deletes. The numbers are about what a row and its entries in
-- indexes take in the file.
CREATE TABLE ledger_sizes (
    project          TEXT PRIMARY KEY,
    bytes            INTEGER NOT NULL DEFAULT 0,
    -- Facts about who decided what, which are not among the others.
    kept_bytes       INTEGER NOT NULL DEFAULT 0,
    -- What had to go for being too much, since ever.
    facts_gone       INTEGER NOT NULL DEFAULT 0,
    calls_gone       INTEGER NOT NULL DEFAULT 0,
    instances_gone   INTEGER NOT NULL DEFAULT 0,
    sandboxes_gone   INTEGER NOT NULL DEFAULT 0,
    -- Nothing up to this fact is left to be trimmed, of the others and of those about decisions.
    trimmed_to       INTEGER NOT NULL DEFAULT 0,
    kept_trimmed_to  INTEGER NOT NULL DEFAULT 0,
    -- Something from before this time is gone, for whichever reason.
    complete_from    INTEGER,
    -- The fact that tells of it, and whether it does not tell all yet.
    told             INTEGER,
    untold           INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- What sandboxes used on each day by facts that were trimmed: sums stay what they were.
CREATE TABLE usage_trimmed (
    project              TEXT NOT NULL,
    -- Its first millisecond.
    day                  INTEGER NOT NULL,
    wall_millis          INTEGER NOT NULL,
    cpu_micros           INTEGER NOT NULL,
    memory_byte_seconds  INTEGER NOT NULL,
    disk_byte_seconds    INTEGER NOT NULL,
    PRIMARY KEY (project, day)
) STRICT, WITHOUT ROWID;

-- 1: it says who decided what, and stays when others are trimmed.
ALTER TABLE facts ADD COLUMN kept INTEGER;
DROP TRIGGER facts_never_change;
UPDATE facts SET kept = 1 WHERE kind IN ('key.created', 'key.revoked', 'network.policy_set', 'secret.set', 'secret.rotated',
    'secret.deleted', 'budget.set', 'budget.deleted', 'provider.set', 'provider.deleted', 'model_key.created',
    'model_key.revoked', 'approval.answered');
CREATE TRIGGER facts_never_change BEFORE UPDATE ON facts
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: a fact cannot be changed');
END;

-- Where a project is named, only its facts may go.
ALTER TABLE fact_retention ADD COLUMN project TEXT;
DROP TRIGGER facts_never_vanish;
CREATE TRIGGER facts_never_vanish BEFORE DELETE ON facts
WHEN NOT EXISTS (SELECT 1 FROM fact_retention
    WHERE OLD.at < before AND (project IS NULL OR project = OLD.project))
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only: facts go only by retention');
END;

INSERT INTO ledger_sizes (project, bytes, kept_bytes)
    SELECT project, sum(iif(kept IS NULL, 250 + octet_length(data), 0)), sum(iif(kept IS NULL, 0, 250 + octet_length(data)))
    FROM facts GROUP BY project;
CREATE TRIGGER facts_counted AFTER INSERT ON facts
BEGIN
    INSERT INTO ledger_sizes (project, bytes, kept_bytes)
        VALUES (NEW.project, iif(NEW.kept IS NULL, 250 + octet_length(NEW.data), 0),
            iif(NEW.kept IS NULL, 0, 250 + octet_length(NEW.data)))
        ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes, kept_bytes = kept_bytes + excluded.kept_bytes;
END;
CREATE TRIGGER facts_gone AFTER DELETE ON facts
BEGIN
    UPDATE ledger_sizes SET
        bytes = bytes - iif(OLD.kept IS NULL, 250 + octet_length(OLD.data), 0),
        kept_bytes = kept_bytes - iif(OLD.kept IS NULL, 0, 250 + octet_length(OLD.data)),
        complete_from = iif(OLD.kind = 'ledger.trimmed', complete_from, max(ifnull(complete_from, OLD.at + 1), OLD.at + 1))
    WHERE project = OLD.project;
END;
