// E2B's command line, as published, through the life of a sandbox and of a template.
// argv: a directory with `@e2b/cli` in its node_modules.
import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const program = join(process.argv[2], 'node_modules/@e2b/cli/dist/index.js')
const home = mkdtempSync(join(tmpdir(), 'e2b-cli-'))
const env = { ...process.env, HOME: home, NO_COLOR: '1' }

/** What it printed; `input` is its stdin. */
function e2b(args, { input, fails = false } = {}) {
  const run = spawnSync(process.execPath, [program, ...args], { input: input ?? '', env, cwd: home, encoding: 'utf8', timeout: 180_000 })
  assert.equal(run.status === 0, !fails, `e2b ${args.join(' ')}: ${run.status}\n${run.stdout}\n${run.stderr}`)
  return run.stdout + run.stderr
}

/** Creates a sandbox and returns its id, which is all that is printed where nobody watches. */
const create = (...args) => /\b[a-z0-9]{20}\b/.exec(e2b(['sandbox', 'create', ...args, '--detach']))[0]

try {
  const id = create('base', '--timeout', '300')
  const listed = JSON.parse(e2b(['sandbox', 'list', '--format', 'json']))
  assert.ok(listed.some((one) => one.sandboxId === id), JSON.stringify(listed))

  assert.match(e2b(['sandbox', 'exec', id, 'echo', 'hello from inside']), /hello from inside/)
  assert.match(e2b(['sandbox', 'exec', id, 'cat'], { input: 'through a pipe\n' }), /through a pipe/)
  e2b(['sandbox', 'exec', id, 'false'], { fails: true })
  assert.match(e2b(['sandbox', 'info', id]), new RegExp(id))
  e2b(['sandbox', 'metrics', id])
  e2b(['sandbox', 'logs', id])

  e2b(['sandbox', 'pause', id])
  e2b(['sandbox', 'resume', id])
  assert.match(e2b(['sandbox', 'exec', id, 'echo', 'back again']), /back again/)
  e2b(['sandbox', 'kill', id])
  const left = JSON.parse(e2b(['sandbox', 'list', '--format', 'json']))
  assert.ok(!left.some((one) => one.sandboxId === id))

  writeFileSync(join(home, 'e2b.Dockerfile'), 'FROM e2bdev/base\nRUN echo built > /mark\n')
  e2b(['template', 'create', 'from-cli', '--cpu-count', '1', '--memory-mb', '256'])
  const templates = JSON.parse(e2b(['template', 'list', '--format', 'json']))
  const built = templates.find((one) => one.aliases.includes('from-cli'))
  assert.deepEqual([built?.cpuCount, built?.memoryMB], [1, 256], JSON.stringify(templates))
  const from = create('from-cli')
  assert.match(e2b(['sandbox', 'exec', from, 'cat', '/mark']), /built/)
  e2b(['sandbox', 'kill', from])
  e2b(['template', 'publish', 'from-cli', '--yes'])
  e2b(['template', 'unpublish', 'from-cli', '--yes'])
  e2b(['template', 'delete', 'from-cli', '--yes'])
  assert.ok(!JSON.parse(e2b(['template', 'list', '--format', 'json'])).some((one) => one.aliases.includes('from-cli')))
  console.log('all ok')
} finally {
  rmSync(home, { recursive: true, force: true })
}
