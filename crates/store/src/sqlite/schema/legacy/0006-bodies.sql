-- What was asked and answered, where the operator wants it kept: redacted, shortened, and for a while.
CREATE TABLE model_bodies (
    call        TEXT PRIMARY KEY,
    project     TEXT NOT NULL REFERENCES projects (id),
    created_at  INTEGER NOT NULL,
    request     TEXT NOT NULL,
    answer      TEXT NOT NULL,
    -- Whether one of them is only the beginning of what it was.
    shortened   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX model_bodies_by_age ON model_bodies (created_at);
