// Every call of E2B's JavaScript SDK, against the server that the environment names. Unmodified SDK, our own questions.
// The directory that it is installed in is the first argument.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { createRequire } from 'node:module'

const load = createRequire(process.argv[2] + '/')
const e2b = load('e2b')
const { Sandbox, Template, Volume, CommandExitError, NotFoundError, TimeoutError } = e2b

const parts = {
  async sandboxes() {
    const label = randomUUID()
    const other = await Sandbox.create('base', { timeoutMs: 120_000, metadata: { 'k &é': label }, envs: { FOO: 'bar' } })
    try {
      assert.equal((await other.commands.run('echo $FOO')).stdout, 'bar\n')
      const found = await Sandbox.list({ query: { metadata: { 'k &é': label } } }).nextItems()
      assert.deepEqual(found.map((item) => item.sandboxId), [other.sandboxId])
      const before = await other.getInfo()
      await other.setTimeout(300_000)
      assert.ok((await other.getInfo()).endAt > before.endAt)
      const again = await Sandbox.connect(other.sandboxId)
      assert.equal((await again.commands.run('echo again')).stdout, 'again\n')
      assert.ok((await other.getMetrics()).length >= 1)
    } finally {
      await other.kill()
    }
    assert.equal(await other.isRunning(), false)
    assert.equal(await Sandbox.kill(other.sandboxId), false)
    await assert.rejects(Sandbox.getInfo(other.sandboxId), NotFoundError)
  },

  async commands(sandbox) {
    const { commands } = sandbox
    await assert.rejects(commands.run('exit 3'), CommandExitError)
    assert.equal((await commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
    assert.equal((await commands.run('id -un', { user: 'root' })).stdout, 'root\n')
    await assert.rejects(commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
    const cat = await commands.run('cat', { background: true, stdin: true })
    assert.ok((await commands.list()).some((process) => process.pid === cat.pid))
    await commands.sendStdin(cat.pid, 'hello')
    await commands.closeStdin(cat.pid)
    assert.equal((await cat.wait()).stdout, 'hello')
    const sleeper = await commands.run('sleep 60', { background: true })
    assert.equal(await (await commands.connect(sleeper.pid)).kill(), true)
    assert.equal(await commands.kill(999_999), false)
  },

  async terminals(sandbox) {
    let seen = ''
    const onData = (data) => (seen += new TextDecoder().decode(data))
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData, timeoutMs: 60_000 })
    await sandbox.pty.resize(terminal.pid, { rows: 30, cols: 100 })
    await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
    await terminal.wait()
    assert.match(seen, /30 100/)
  },

  async files(sandbox) {
    const { files } = sandbox
    assert.equal((await files.write('dir/a.txt', 'content')).path, '/home/user/dir/a.txt')
    assert.equal(await files.read('dir/a.txt'), 'content')
    assert.equal((await files.read('dir/a.txt', { format: 'bytes' })).length, 7)
    assert.equal(await (await files.read('dir/a.txt', { format: 'blob' })).text(), 'content')
    await files.write([{ path: 'dir/x', data: '1' }, { path: 'dir/y/z', data: new Blob(['2']) }])
    assert.deepEqual((await files.list('dir')).map((entry) => entry.name).sort(), ['a.txt', 'x', 'y'])
    assert.equal(await files.makeDir('dir/new'), true)
    assert.equal(await files.makeDir('dir/new'), false)
    assert.equal((await files.rename('dir/a.txt', 'elsewhere/b.txt')).path, '/home/user/elsewhere/b.txt')
    assert.equal((await files.getInfo('dir/y')).permissions, 'drwxr-xr-x')
    await files.remove('elsewhere')
    assert.equal(await files.exists('elsewhere/b.txt'), false)
    await assert.rejects(files.read('nowhere'), NotFoundError)
    const events = []
    let heard
    const once = new Promise((resolve) => (heard = resolve))
    const watch = await files.watchDir('dir', (event) => {
      events.push(event.type)
      if (event.type === 'write') heard()
    })
    await files.write('dir/watched', 'now')
    await once
    await watch.stop()
    assert.ok(events.includes('create'))
  },

  async links(sandbox) {
    await sandbox.files.write('signed.txt', 'by link')
    const link = await sandbox.downloadUrl('signed.txt', { useSignatureExpiration: 60_000 })
    assert.equal(await (await fetch(link)).text(), 'by link')
  },

  async rest(sandbox) {
    await sandbox.files.write('kept.txt', 'kept')
    assert.ok(await sandbox.pause())
    assert.equal((await sandbox.getInfo()).state, 'paused')
    await sandbox.connect({ timeoutMs: 120_000 })
    assert.equal(await sandbox.files.read('kept.txt'), 'kept')
  },

  async copies(sandbox) {
    await sandbox.files.write('state.txt', 'before')
    const snapshot = await sandbox.createSnapshot()
    const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
    assert.equal(await copy.files.read('state.txt'), 'before')
    await copy.kill()
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  },

  async volumes() {
    const volume = await Volume.create(`vol-${randomUUID().slice(0, 8)}`)
    assert.ok((await Volume.list()).some((known) => known.volumeId === volume.volumeId))
    assert.equal(await Volume.destroy(volume.volumeId), true)
  },

  async templates() {
    assert.equal(await Template.exists('base'), true)
    const name = `e2b-${randomUUID().slice(0, 8)}`
    await Template.build(Template().fromTemplate('base').setEnvs({ COLOUR: 'blue' }), name)
    const box = await Sandbox.create(name, { timeoutMs: 60_000 })
    assert.equal((await box.commands.run('echo $COLOUR')).stdout, 'blue\n')
    await box.kill()
  },
}

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
try {
  for (const [name, part] of Object.entries(parts)) {
    const began = Date.now()
    await part(sandbox)
    console.log(`ok ${name} ${Date.now() - began}ms`)
  }
} finally {
  await sandbox.kill()
}
console.log('all ok')
process.exit(0)
