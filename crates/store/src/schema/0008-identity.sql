-- What a key may do. Those of the first project have run the server, and all others could do whatever can be done in theirs.
ALTER TABLE keys ADD COLUMN role TEXT NOT NULL DEFAULT 'member';
-- What it is restricted to (JSON); empty: nothing.
ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '[]';
ALTER TABLE keys ADD COLUMN expires_at INTEGER;
UPDATE keys SET role = 'operator' WHERE project IN (SELECT id FROM projects WHERE name = 'default');
