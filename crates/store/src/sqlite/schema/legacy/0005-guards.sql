-- What may not leave for a provider of models, by project.
CREATE TABLE model_guards (
    project     TEXT PRIMARY KEY REFERENCES projects (id),
    -- {max_input_tokens, blocked: [pattern], screen: [{name, pattern, redact}]} (JSON).
    guards      TEXT NOT NULL,
    updated_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
