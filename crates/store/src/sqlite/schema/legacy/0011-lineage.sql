-- The key that a key was made with. Nothing: the server made it, or an earlier release did not say.
ALTER TABLE keys ADD COLUMN made_by TEXT;
