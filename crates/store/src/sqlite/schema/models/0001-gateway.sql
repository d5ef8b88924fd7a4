-- The model gateway: whom it calls, who may call it, what caps them, and every call.
-- Money is in whole picodollars (USD); names of columns that hold it end in _pico.

CREATE TABLE model_providers (
    -- What the key was sealed for.
    id          TEXT PRIMARY KEY,
    project     TEXT NOT NULL REFERENCES projects (id),
    name        TEXT NOT NULL,
    kind        TEXT NOT NULL,
    base_url    TEXT NOT NULL,
    -- The provider's key, encrypted with a key that is not in this file; NULL where none is needed.
    sealed      BLOB,
    -- Names of models that it serves, with wildcards (JSON).
    serves      TEXT NOT NULL,
    -- Whether it speaks OpenAI's Responses beside Chat Completions.
    responses   INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    UNIQUE (project, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE model_routes (
    project     TEXT NOT NULL REFERENCES projects (id),
    name        TEXT NOT NULL,
    -- [{provider, model, weight}], and names (JSON).
    targets     TEXT NOT NULL,
    fallbacks   TEXT NOT NULL,
    updated_at  INTEGER NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;

-- What the operator says instead of the built-in table: dollars per million tokens as decimal text (JSON).
CREATE TABLE model_prices (
    project     TEXT NOT NULL REFERENCES projects (id),
    model       TEXT NOT NULL,
    rates       TEXT NOT NULL,
    updated_at  INTEGER NOT NULL,
    PRIMARY KEY (project, model)
) STRICT, WITHOUT ROWID;

CREATE TABLE model_keys (
    id                   TEXT PRIMARY KEY,
    project              TEXT NOT NULL REFERENCES projects (id),
    name                 TEXT NOT NULL,
    hash                 BLOB NOT NULL UNIQUE,
    prefix               TEXT NOT NULL,
    -- Names of models that it may ask for, with wildcards (JSON); empty: all.
    models               TEXT NOT NULL,
    requests_per_minute  INTEGER,
    tokens_per_minute    INTEGER,
    created_at           INTEGER NOT NULL,
    expires_at           INTEGER,
    revoked_at           INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX model_keys_of_project ON model_keys (project, created_at);

CREATE TABLE model_budgets (
    id             TEXT PRIMARY KEY,
    project        TEXT NOT NULL REFERENCES projects (id),
    name           TEXT NOT NULL,
    scope          TEXT NOT NULL,
    subject        TEXT,
    window         TEXT NOT NULL,
    limit_pico     INTEGER NOT NULL,
    alert_percent  INTEGER,
    created_at     INTEGER NOT NULL,
    UNIQUE (project, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE model_calls (
    id                TEXT PRIMARY KEY,
    project           TEXT NOT NULL REFERENCES projects (id),
    key               TEXT,
    sandbox           TEXT,
    workflow          TEXT,
    run               TEXT,
    end_user          TEXT,
    tags              TEXT NOT NULL,
    dialect           TEXT NOT NULL,
    asked             TEXT NOT NULL,
    provider          TEXT NOT NULL,
    model             TEXT NOT NULL,
    streamed          INTEGER NOT NULL,
    created_at        INTEGER NOT NULL,
    ended_at          INTEGER,
    outcome           TEXT NOT NULL,
    attempts          INTEGER NOT NULL,
    first_byte_millis INTEGER,
    finish            TEXT,
    error             TEXT,
    input             INTEGER NOT NULL,
    cache_read        INTEGER NOT NULL,
    cache_write       INTEGER NOT NULL,
    cache_write_1h    INTEGER NOT NULL,
    audio_input       INTEGER NOT NULL,
    output            INTEGER NOT NULL,
    reasoning         INTEGER NOT NULL,
    audio_output      INTEGER NOT NULL,
    searches          INTEGER NOT NULL,
    -- Nobody counted: the numbers are our guess.
    estimated         INTEGER NOT NULL,
    -- NULL: the model has no price.
    price_version     TEXT,
    reserved_pico     INTEGER NOT NULL,
    cost_pico         INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX model_calls_newest ON model_calls (project, created_at DESC, id DESC);
CREATE INDEX model_calls_open ON model_calls (id) WHERE outcome = 'open';

-- What may not leave for a provider of models, by project.
CREATE TABLE model_guards (
    project     TEXT PRIMARY KEY REFERENCES projects (id),
    -- {max_input_tokens, blocked: [pattern], screen: [{name, pattern, redact}]} (JSON).
    guards      TEXT NOT NULL,
    updated_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

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
