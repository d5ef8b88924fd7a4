-- Instances and ended sandboxes, counted as a part of what is left of a project's doings.
CREATE INDEX instances_ended_of_project ON instances (project, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX sandboxes_ended_of_project ON sandboxes (project, ended_at) WHERE ended_at IS NOT NULL;

INSERT INTO ledger_sizes (project, bytes) SELECT project, 400 * count(*) FROM instances WHERE true GROUP BY project
    ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TRIGGER instances_counted AFTER INSERT ON instances
BEGIN
    INSERT INTO ledger_sizes (project, bytes) VALUES (NEW.project, 400)
        ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER instances_gone AFTER DELETE ON instances
BEGIN
    UPDATE ledger_sizes SET bytes = bytes - 400 WHERE project = OLD.project;
END;

-- Labels are in the specification, and once more in a table and its index.
INSERT INTO ledger_sizes (project, bytes) SELECT project, sum(800 + 2 * octet_length(spec)) FROM sandboxes
    WHERE state IN ('deleted', 'failed') GROUP BY project
    ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TRIGGER sandboxes_counted_new AFTER INSERT ON sandboxes WHEN NEW.state IN ('deleted', 'failed')
BEGIN
    INSERT INTO ledger_sizes (project, bytes) VALUES (NEW.project, 800 + 2 * octet_length(NEW.spec))
        ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER sandboxes_counted AFTER UPDATE ON sandboxes
WHEN NEW.state IN ('deleted', 'failed') OR OLD.state IN ('deleted', 'failed')
BEGIN
    INSERT INTO ledger_sizes (project, bytes)
        VALUES (NEW.project, iif(NEW.state IN ('deleted', 'failed'), 800 + 2 * octet_length(NEW.spec), 0)
            - iif(OLD.state IN ('deleted', 'failed'), 800 + 2 * octet_length(OLD.spec), 0))
        ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER sandboxes_gone AFTER DELETE ON sandboxes WHEN OLD.state IN ('deleted', 'failed')
BEGIN
    UPDATE ledger_sizes SET bytes = bytes - (800 + 2 * octet_length(OLD.spec)) WHERE project = OLD.project;
END;
