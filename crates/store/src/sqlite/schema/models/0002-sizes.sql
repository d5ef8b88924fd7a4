-- What each subject of a budget has spent by calls whose rows are gone: in all, and in the last day, week and month that one of them
-- was in. Windows of budgets that are open now are among those, and so budgets count on, whoever trims calls.
CREATE TABLE model_spent_trimmed (
    project     TEXT NOT NULL,
    -- A scope of budgets, and which key, workflow, run or sandbox.
    scope       TEXT NOT NULL,
    subject     TEXT NOT NULL,
    called_at   INTEGER NOT NULL,
    total_pico  INTEGER NOT NULL,
    day         INTEGER NOT NULL,
    day_pico    INTEGER NOT NULL,
    week        INTEGER NOT NULL,
    week_pico   INTEGER NOT NULL,
    month       INTEGER NOT NULL,
    month_pico  INTEGER NOT NULL,
    PRIMARY KEY (project, scope, subject)
) STRICT, WITHOUT ROWID;
CREATE INDEX model_spent_trimmed_by_age ON model_spent_trimmed (project, scope, called_at);

-- Calls, counted as a part of what is left of a project's doings.
INSERT INTO ledger_sizes (project, bytes)
    SELECT project, sum(500 + octet_length(tags) + octet_length(asked) + octet_length(provider) + octet_length(model)
        + ifnull(octet_length(workflow), 0) + ifnull(octet_length(run), 0) + ifnull(octet_length(end_user), 0)
        + ifnull(octet_length(error), 0))
    FROM model_calls WHERE true GROUP BY project
    ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TRIGGER model_calls_counted AFTER INSERT ON model_calls
BEGIN
    INSERT INTO ledger_sizes (project, bytes)
        VALUES (NEW.project, 500 + octet_length(NEW.tags) + octet_length(NEW.asked) + octet_length(NEW.provider)
            + octet_length(NEW.model) + ifnull(octet_length(NEW.workflow), 0) + ifnull(octet_length(NEW.run), 0)
            + ifnull(octet_length(NEW.end_user), 0) + ifnull(octet_length(NEW.error), 0))
        ON CONFLICT (project) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
-- Who answers, and why nobody does, is known at the end; the rest stays.
CREATE TRIGGER model_calls_recounted AFTER UPDATE OF provider, model, error ON model_calls
BEGIN
    UPDATE ledger_sizes SET bytes = bytes + octet_length(NEW.provider) + octet_length(NEW.model)
        + ifnull(octet_length(NEW.error), 0) - octet_length(OLD.provider) - octet_length(OLD.model)
        - ifnull(octet_length(OLD.error), 0)
    WHERE project = NEW.project;
END;
CREATE TRIGGER model_calls_gone AFTER DELETE ON model_calls
BEGIN
    UPDATE ledger_sizes SET bytes = bytes - (500 + octet_length(OLD.tags) + octet_length(OLD.asked)
            + octet_length(OLD.provider) + octet_length(OLD.model) + ifnull(octet_length(OLD.workflow), 0)
            + ifnull(octet_length(OLD.run), 0) + ifnull(octet_length(OLD.end_user), 0)
            + ifnull(octet_length(OLD.error), 0)),
        complete_from = max(ifnull(complete_from, OLD.created_at + 1), OLD.created_at + 1)
    WHERE project = OLD.project;
END;
