// Runs one program after the other in one global scope: see programs.py. What a script cannot have, a program here may:
// `import`, `export` and `await` at the top level.
const fs = require('fs')
const readline = require('readline')
const util = require('util')
const vm = require('vm')
const { topLevel } = require('./toplevel.js')

const language = process.argv[2]
const answers = Number(process.argv[3])
const answer = (line) => fs.writeSync(answers, JSON.stringify(line) + '\n')

globalThis.require = require('module').createRequire(process.cwd() + '/')

// Ends what runs now, if it gives others a turn; what does not is interrupted by `breakOnSigint`.
let interrupt = () => {}
process.on('SIGINT', () => interrupt())

async function run(code) {
  const { text, wrapped } = topLevel(code, language)
  const script = new vm.Script(text, {
    filename: 'program.js',
    importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
  })
  const value = script.runInThisContext({ breakOnSigint: true })
  const interrupted = new Promise((_, reject) => {
    interrupt = () => reject(Object.assign(new Error('The execution was interrupted'), { name: 'Interrupted' }))
  })
  return wrapped ? (await Promise.race([value, interrupted])).value : Promise.race([value, interrupted])
}

// The representations that an object offers of itself, as in other notebooks' JavaScript.
const OFFERED = {
  _toHtml: 'text/html',
  _toMd: 'text/markdown',
  _toSvg: 'image/svg+xml',
  _toPng: 'image/png',
  _toJpeg: 'image/jpeg',
  _toLatex: 'text/latex',
  _toJSON: 'application/json',
}

function representations(value) {
  const data = { 'text/plain': typeof value === 'string' ? value : util.inspect(value) }
  for (const [method, media] of Object.entries(OFFERED)) {
    if (typeof value?.[method] === 'function') data[media] = value[method]()
  }
  return data
}

function tellError(error) {
  // What is thrown need not be an error.
  const isError = util.types.isNativeError(error) || typeof error?.stack === 'string'
  answer({
    type: 'error',
    name: isError ? String(error.name) : 'Error',
    value: isError ? String(error.message) : util.inspect(error),
    traceback: isError ? String(error.stack) : util.inspect(error),
  })
}

process.on('uncaughtException', tellError)
process.on('unhandledRejection', tellError)

async function serve() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { code, env } = JSON.parse(line)
    const before = Object.keys(env).map((name) => [name, process.env[name]])
    Object.assign(process.env, env)
    try {
      const value = await run(code)
      if (value !== undefined) answer({ type: 'result', data: representations(value) })
    } catch (error) {
      tellError(error)
    }
    interrupt = () => {}
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name]
      else process.env[name] = value
    }
    answer({ type: 'done' })
  }
}
serve()
