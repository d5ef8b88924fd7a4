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
