// Makes a script of a program that has `import`, `export` or `await` at its top level, or that is TypeScript:
//
//   import { a } from 'm'              var a, b;
//   const b = await f(a)      ──>      (async () => { ({ a } = await import('m'));
//   b + 1                                (b = await f(a));
//                                        return { value: (b + 1) }; })()
//
// What must hold: what is declared at the top level is there for the next program; the value is that of the last
// expression; a program without any of these is left as it is.

const NEEDED = /\b(await|import|export)\b/

function topLevel(code, language) {
  if (language !== 'typescript' && !NEEDED.test(code)) return { text: code, wrapped: false }
  const ts = require('typescript')
  if (language === 'typescript') {
    const options = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, isolatedModules: true }
    // Imports that only have types go; others stay, used here or by a later program.
    options.verbatimModuleSyntax = true
    options.importsNotUsedAsValues = ts.ImportsNotUsedAsValues?.Preserve
    options.preserveValueImports = true
    code = ts.transpileModule(code, { compilerOptions: options }).outputText.replace(/^export \{\};?\n?/m, '')
    if (!NEEDED.test(code)) return { text: code, wrapped: false }
  }
  const file = ts.createSourceFile('program.mjs', code, ts.ScriptTarget.Latest, true, ts.ScriptKind.JS)
  if (!file.statements.some((statement) => isModular(ts, statement))) return { text: code, wrapped: false }
  return { text: wrap(ts, file), wrapped: true }
}

// Whether it has what only a module may, outside of functions.
function isModular(ts, statement) {
  if (ts.isImportDeclaration(statement) || ts.isExportDeclaration(statement) || ts.isExportAssignment(statement)) return true
  if (ts.canHaveModifiers(statement) && ts.getModifiers(statement)?.some(isExport(ts))) return true
  const awaits = (node) => {
    if (ts.isAwaitExpression(node) || (ts.isForOfStatement(node) && node.awaitModifier)) return true
    if (ts.isFunctionLike(node) || ts.isClassLike(node)) return false
    return ts.forEachChild(node, (child) => awaits(child) || undefined) ?? false
  }
  return awaits(statement)
}

const isExport = (ts) => (modifier) =>
  modifier.kind === ts.SyntaxKind.ExportKeyword || modifier.kind === ts.SyntaxKind.DefaultKeyword

function wrap(ts, file) {
  const names = []
  const functions = []
  const body = file.statements.map((statement, at) => {
    const last = at === file.statements.length - 1
    if (ts.isImportDeclaration(statement)) return imported(ts, statement, names)
    if (ts.isExportDeclaration(statement)) return reexported(statement)
    if (ts.isExportAssignment(statement)) return `(${statement.expression.getText()});`
    const start = withoutExport(ts, statement)
    const text = file.text.slice(start, statement.end)
    if (ts.isVariableStatement(statement)) {
      const { declarations } = statement.declarationList
      for (const declaration of declarations) bound(ts, declaration.name, names)
      return `(${declarations.map((declaration) => declaration.getText()).join(', ')});`
    }
    if (ts.isFunctionDeclaration(statement) && statement.name) {
      names.push(statement.name.text)
      functions.push(statement.name.text)
      return text
    }
    if (ts.isClassDeclaration(statement) && statement.name) {
      names.push(statement.name.text)
      return `(${statement.name.text} = ${text});`
    }
    if (last && ts.isExpressionStatement(statement)) return `return { value: (${statement.expression.getText()}) };`
    return text
  })
  const declared = names.length ? `var ${[...new Set(names)].join(', ')};\n` : ''
  const hoisted = functions.map((name) => `globalThis.${name} = ${name};\n`).join('')
  return `${declared}(async () => {\n${hoisted}${body.join('\n')}\nreturn {};\n})()`
}

function withoutExport(ts, statement) {
  const modifiers = ts.canHaveModifiers(statement) ? (ts.getModifiers(statement) ?? []) : []
  const exported = modifiers.filter(isExport(ts))
  return exported.length ? exported[exported.length - 1].end : statement.getStart()
}

function imported(ts, statement, names) {
  const from = `await import(${statement.moduleSpecifier.getText()})`
  const clause = statement.importClause
  if (!clause) return `${from};`
  const parts = []
  if (clause.name) {
    names.push(clause.name.text)
    parts.push(`default: ${clause.name.text}`)
  }
  const bindings = clause.namedBindings
  if (bindings && ts.isNamespaceImport(bindings)) {
    names.push(bindings.name.text)
    const whole = `(${bindings.name.text} = ${from});`
    return parts.length ? `${whole}\n({ ${parts[0]} } = ${bindings.name.text});` : whole
  }
  for (const element of bindings?.elements ?? []) {
    names.push(element.name.text)
    parts.push(element.propertyName ? `${element.propertyName.text}: ${element.name.text}` : element.name.text)
  }
  return `({ ${parts.join(', ')} } = ${from});`
}

// Nobody can import from here; what another module does when it is loaded is still to be done.
const reexported = (statement) => (statement.moduleSpecifier ? `await import(${statement.moduleSpecifier.getText()});` : '')

function bound(ts, name, names) {
  if (ts.isIdentifier(name)) return names.push(name.text)
  for (const element of name.elements) {
    if (!ts.isOmittedExpression(element)) bound(ts, element.name, names)
  }
}

module.exports = { topLevel }
