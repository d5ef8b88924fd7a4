// What every version of E2B's JavaScript SDK has, from 1.x on, against the server that the environment names: the first hour of
// anybody who comes with a version that they cannot choose. Unmodified SDK, our own questions; `through_e2b.mjs` asks for all
// the rest that the newest one has. The directory that it is installed in is the first argument.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const load = createRequire(process.argv[2] + '/')
const { Sandbox, CommandExitError } = load('e2b')
// Whether the domain alone leads to the server, or addresses do that older versions do not know.
const byDomain = !('E2B_API_URL' in process.env)

const parts = {
  async commands(sandbox) {
    const { commands } = sandbox
    assert.equal((await commands.run('echo out; echo err >&2')).stderr, 'err\n')
    await assert.rejects(commands.run('exit 3'), CommandExitError)
    assert.equal((await commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
    assert.equal((await commands.run('id -un', { user: 'root' })).stdout, 'root\n')
    const sleeper = await commands.run('sleep 60', { background: true })
    assert.ok((await commands.list()).some((process) => process.pid === sleeper.pid))
    assert.equal(await (await commands.connect(sleeper.pid)).kill(), true)
  },

  async files(sandbox) {
    const { files } = sandbox
    await files.write('dir/a.txt', 'content')
    assert.equal(await files.read('dir/a.txt'), 'content')
    assert.equal((await files.read('dir/a.txt', { format: 'bytes' })).length, 7)
    await files.write([{ path: 'dir/x', data: '1' }, { path: 'dir/y/z', data: '2' }])
    assert.deepEqual((await files.list('dir')).map((entry) => entry.name).sort(), ['a.txt', 'x', 'y'])
    assert.equal(await files.makeDir('dir/new'), true)
    assert.equal(await files.makeDir('dir/new'), false)
    await files.rename('dir/a.txt', 'dir/b.txt')
    assert.equal(await files.exists('dir/b.txt'), true)
    let heard
    const once = new Promise((resolve) => (heard = resolve))
    const watch = await files.watchDir('dir', (event) => event.name === 'watched' && heard())
    await files.write('dir/watched', 'now')
    await once
    await watch.stop()
    await files.remove('dir')
    assert.equal(await files.exists('dir/b.txt'), false)
  },

  async ports(sandbox) {
    const host = sandbox.getHost(8000)
    assert.equal(host, `8000-${sandbox.sandboxId}.${process.env.E2B_DOMAIN}`, 'it leads elsewhere')
    if (!byDomain) return
    await sandbox.files.write('site/index.html', 'from inside')
    await sandbox.commands.run('python3 -m http.server 8000 --directory site', { background: true })
    await sandbox.commands.run('until curl -sf http://localhost:8000/ >/dev/null; do sleep 0.1; done')
    // What people write, and what they should.
    for (const scheme of ['http', 'https']) {
      assert.equal(await (await fetch(`${scheme}://${host}/`)).text(), 'from inside')
    }
    await sandbox.files.write('signed.txt', 'by link')
    assert.equal(await (await fetch(await sandbox.downloadUrl('signed.txt'))).text(), 'by link')
  },

  async lives(sandbox) {
    await sandbox.files.write('kept.txt', 'kept')
    assert.equal(await sandbox.isRunning(), true)
    await sandbox.setTimeout(240_000)
    const listing = await Sandbox.list()
    const listed = Array.isArray(listing) ? listing : await listing.nextItems()
    assert.ok(listed.some((item) => item.sandboxId.startsWith(sandbox.sandboxId)))
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal(await again.files.read('kept.txt'), 'kept')
    assert.equal((await again.commands.run('cat kept.txt')).stdout, 'kept')
    const pause = sandbox.pause ?? sandbox.betaPause
    if (pause) {
      await pause.call(sandbox)
      assert.equal(await sandbox.isRunning(), false)
      const woken = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 120_000 })
      assert.equal(await woken.files.read('kept.txt'), 'kept')
    }
  },
}

console.log(`e2b ${load('e2b/package.json').version} by ${byDomain ? 'domain' : 'addresses'}`)
const sandbox = await Sandbox.create('base', { timeoutMs: 300_000, metadata: { who: 'me' }, envs: { GIVEN: 'yes' } })
try {
  assert.equal((await sandbox.commands.run('echo $GIVEN')).stdout, 'yes\n')
  for (const [name, part] of Object.entries(parts)) {
    const began = Date.now()
    await part(sandbox)
    console.log(`ok ${name} ${Date.now() - began}ms`)
  }
} finally {
  await sandbox.kill()
}
assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
console.log('all ok')
process.exit(0)
