-- When each run was last written, so that a server whose clock was set back finds those that its clock has yet to come to.

ALTER TABLE workflow_runs ADD COLUMN written_at INTEGER;
