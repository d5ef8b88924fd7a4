-- What a sandbox is called. A name is free again when the sandbox that had it is over.
ALTER TABLE sandboxes ADD COLUMN name TEXT;
CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (project, name)
    WHERE name IS NOT NULL AND state NOT IN ('deleted', 'failed');
