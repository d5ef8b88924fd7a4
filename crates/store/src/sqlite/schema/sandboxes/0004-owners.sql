-- Whom a sandbox belongs to, as text: `workflow:NAMESPACE:RUN:WORKFLOW`, `sandbox:ID`, `key:ID`. Earlier releases said of those of
-- workflows in two labels, which mean nothing any more and go.
ALTER TABLE sandboxes ADD COLUMN owner TEXT;
UPDATE sandboxes SET owner = 'workflow:' || (SELECT value FROM labels WHERE sandbox = id AND key = 'atoll.workflow')
    WHERE EXISTS (SELECT 1 FROM labels WHERE sandbox = id AND key = 'atoll.owner' AND value = 'workflow')
        AND EXISTS (SELECT 1 FROM labels WHERE sandbox = id AND key = 'atoll.workflow' AND value LIKE '_%:_%:_%');
UPDATE sandboxes SET spec = json_remove(json_set(spec, '$.owner', owner), '$.labels."atoll.owner"', '$.labels."atoll.workflow"')
    WHERE owner IS NOT NULL;
DELETE FROM labels WHERE key IN ('atoll.owner', 'atoll.workflow')
    AND sandbox IN (SELECT id FROM sandboxes WHERE owner IS NOT NULL);
CREATE INDEX sandboxes_by_owner ON sandboxes (project, owner) WHERE owner IS NOT NULL;
