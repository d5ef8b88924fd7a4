// Runs one program after the other in one context: JSON lines on stdin, answers on descriptor 3. State, top-level await
// and the last value are the REPL's; static imports, which it does not take, become dynamic ones.
const fs = require('fs')
const repl = require('repl')
const readline = require('readline')
const { PassThrough } = require('stream')
const util = require('util')

const language = process.argv[2]
const server = repl.start({ input: new PassThrough(), output: new PassThrough(), useGlobal: true, prompt: '' })
const answer = (line) => fs.writeSync(3, JSON.stringify(line) + '\n')

function prepare(code) {
  if (language === 'typescript') {
    const ts = require('typescript')
    const options = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, isolatedModules: true }
    code = ts.transpileModule(code, { compilerOptions: options }).outputText.replace(/^export \{\};?$/gm, '')
  }
  return code
    .replace(/^\s*import\s+\*\s+as\s+(\w+)\s+from\s+(['"][^'"]+['"]);?/gm, 'var $1 = await import($2);')
    .replace(/^\s*import\s+(\{[^}]*\})\s+from\s+(['"][^'"]+['"]);?/gm, (_, names, from) => {
      return `var ${names.replace(/\s+as\s+/g, ': ')} = await import(${from});`
    })
    .replace(/^\s*import\s+(\w+)\s+from\s+(['"][^'"]+['"]);?/gm, 'var $1 = (await import($2)).default;')
    .replace(/^\s*import\s+(['"][^'"]+['"]);?/gm, 'await import($1);')
}

const run = (code) =>
  new Promise((resolve, reject) => {
    server.eval(code.trim() + '\n', server.context, 'code', (error, value) => (error ? reject(error) : resolve(value)))
  })

function failed(error) {
  const cause = error && error.err ? error.err : error
  const name = cause?.name ?? 'Error'
  answer({ type: 'error', name, value: String(cause?.message ?? cause), traceback: String(cause?.stack ?? cause) })
}

process.on('uncaughtException', failed)
process.on('unhandledRejection', failed)

async function serve() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { code, env } = JSON.parse(line)
    const before = {}
    for (const [name, value] of Object.entries(env)) {
      before[name] = process.env[name]
      process.env[name] = value
    }
    try {
      const value = await run(prepare(code))
      if (value !== undefined) {
        const text = typeof value === 'string' ? value : util.inspect(value)
        answer({ type: 'result', is_main_result: true, text })
      }
    } catch (error) {
      failed(error)
    }
    for (const [name, value] of Object.entries(before)) {
      if (value === undefined) delete process.env[name]
      else process.env[name] = value
    }
    // Output that is on its way comes first.
    await new Promise((resolve) => process.stdout.write('', resolve))
    answer({ type: 'done' })
  }
}
serve()
