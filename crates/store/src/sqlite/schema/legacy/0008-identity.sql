-- What a key may do. Of those that are there, the one that the server made for itself, the first named `admin` of the first
-- project, runs the server; workers and agents may hold any other, and so all others are members.
ALTER TABLE keys ADD COLUMN role TEXT NOT NULL DEFAULT 'member';
-- What it is restricted to (JSON); empty: nothing.
ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '[]';
ALTER TABLE keys ADD COLUMN expires_at INTEGER;
UPDATE keys SET role = 'operator' WHERE id = (
    SELECT keys.id FROM keys JOIN projects ON projects.id = keys.project
    WHERE projects.name = 'default' AND keys.name = 'admin' AND keys.revoked_at IS NULL
    ORDER BY keys.created_at, keys.id LIMIT 1
);
