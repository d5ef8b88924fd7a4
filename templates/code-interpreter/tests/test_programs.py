"""Contexts with pipes: Bash, JavaScript, TypeScript, Java."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import unittest

from support import error, result, run, started, text

import programs
from contexts import Died, Ended, Refused
from programs import Bash, Java, Node


def has_typescript():
    return shutil.which("node") and not subprocess.run(
        ["node", "-e", "require('typescript')"], capture_output=True, check=False
    ).returncode


class BashTest(unittest.IsolatedAsyncioTestCase):
    async def test_state_and_streams(self):
        async with started(Bash, "bash") as shell:
            self.assertEqual(text(await run(shell, "x=5; f() { echo f$1; }; cd /; pwd")), "/\n")
            lines = await run(shell, "f $x; pwd; echo oops >&2")
            self.assertEqual((text(lines), text(lines, "stderr")), ("f5\n/\n", "oops\n"))

    async def test_all_of_the_output_comes_before_the_end(self):
        async with started(Bash, "bash") as shell:
            lines = await run(shell, "seq 200000")
            self.assertEqual(text(lines), "".join(f"{n}\n" for n in range(1, 200001)))

    async def test_quotes_here_documents_and_stdin(self):
        async with started(Bash, "bash") as shell:
            lines = await run(shell, "cat <<'E'\n'it''s' \"$HOME\" `x` ü\nE\ncat\necho end")
            self.assertEqual(text(lines), "'it''s' \"$HOME\" `x` ü\nend\n")

    async def test_a_status_is_an_error(self):
        async with started(Bash, "bash") as shell:
            self.assertEqual(error(await run(shell, "echo a; false"))["value"], "1")
            self.assertIsNone(error(await run(shell, "true")))

    async def test_environment_of_one_execution(self):
        async with started(Bash, "bash") as shell:
            await run(shell, "export KEPT=before")
            env = {"NEW": "it's\nnew", "KEPT": "during"}
            lines = await run(shell, 'bash -c \'echo "$NEW $KEPT"\'', env)
            self.assertEqual(text(lines), "it's\nnew during\n")
            self.assertEqual(text(await run(shell, "echo ${NEW-none} $(printenv KEPT)")), "none before\n")
            with self.assertRaises(ValueError):
                await run(shell, "true", {"a b": "c"})

    async def test_an_interrupt_keeps_the_state(self):
        async with started(Bash, "bash") as shell:
            lines = []
            running = asyncio.ensure_future(shell.run("x=7; echo on; while true; do sleep 60; done", {}, lines.append))
            while not text(lines):
                await asyncio.sleep(0.01)
            await shell.interrupt()
            await running
            self.assertEqual(error(lines)["value"], "130")
            self.assertEqual(text(await run(shell, "echo $x")), "7\n")

    async def test_who_does_not_listen_is_ended(self):
        patience, programs.PATIENCE_SECONDS = programs.PATIENCE_SECONDS, 0.1
        self.addCleanup(setattr, programs, "PATIENCE_SECONDS", patience)
        async with started(Bash, "bash") as shell:
            lines = []
            code = "trap '' INT; echo on; (trap '' INT; sleep 60)"
            running = asyncio.ensure_future(shell.run(code, {}, lines.append))
            while not text(lines):
                await asyncio.sleep(0.01)
            await shell.interrupt()
            with self.assertRaises(Died):
                await running
            self.assertEqual(text(await run(shell, "echo again")), "again\n")

    async def test_an_exit_starts_it_anew(self):
        async with started(Bash, "bash") as shell:
            with self.assertRaises(Died):
                await run(shell, "x=1; exit 3")
            self.assertEqual(text(await run(shell, "echo ${x-none}")), "none\n")

    async def test_a_restart_ends_what_runs(self):
        async with started(Bash, "bash") as shell:
            lines = []
            running = asyncio.ensure_future(shell.run("echo on; sleep 60", {}, lines.append))
            while not text(lines):
                await asyncio.sleep(0.01)
            await shell.restart()
            with self.assertRaises(Ended):
                await running
            self.assertEqual(text(await run(shell, "echo again")), "again\n")

    async def test_no_such_directory(self):
        with self.assertRaises(Refused):
            await Bash("bash", "id", "/no/such/place").start()


@unittest.skipUnless(shutil.which("node"), "there is no node here")
class JavaScriptTest(unittest.IsolatedAsyncioTestCase):
    async def test_state_values_and_streams(self):
        async with started(Node, "javascript") as node:
            lines = await run(node, "let a = 20; function f() { return a * 2 }; console.log('x'); console.error('y')")
            self.assertEqual((text(lines), text(lines, "stderr")), ("x\n", "y\n"))
            self.assertEqual(result(await run(node, "f() + 2"))["text"], "42")
            self.assertEqual(result(await run(node, "({ a, s: 'x' })"))["text"], "{ a: 20, s: 'x' }")
            self.assertEqual(result(await run(node, "process.cwd()"))["text"], node.cwd)
            self.assertIsNone(result(await run(node, "undefined")))
            self.assertEqual(result(await run(node, "Promise.resolve(3)"))["text"], "3")
            self.assertEqual(result(await run(node, "({ _toHtml: () => '<b>' })"))["html"], "<b>")

    async def test_errors(self):
        async with started(Node, "javascript") as node:
            found = error(await run(node, "null.x"))
            self.assertEqual(found["name"], "TypeError")
            self.assertIn("program.js", found["traceback"])
            self.assertEqual(error(await run(node, "let = ="))["name"], "SyntaxError")
            self.assertEqual(error(await run(node, "throw 'word'"))["value"], "'word'")
            self.assertEqual(error(await run(node, "Promise.reject(new RangeError('far'))"))["name"], "RangeError")

    async def test_environment_of_one_execution(self):
        async with started(Node, "javascript") as node:
            self.assertEqual(result(await run(node, "process.env.NEW", {"NEW": "x"}))["text"], "x")
            self.assertIsNone(result(await run(node, "process.env.NEW")))

    async def test_an_interrupt_keeps_the_state(self):
        async with started(Node, "javascript") as node:
            await run(node, "var x = 7")
            for code in ("console.log(1); while (true) {}", "console.log(1); new Promise((done) => setTimeout(done, 60000))"):
                lines = []
                running = asyncio.ensure_future(node.run(code, {}, lines.append))
                while not text(lines):
                    await asyncio.sleep(0.01)
                await node.interrupt()
                await running
                self.assertIn("interrupted", error(lines)["value"])
            self.assertEqual(result(await run(node, "x"))["text"], "7")

    @unittest.skipUnless(has_typescript(), "there is no typescript here")
    async def test_what_only_modules_have(self):
        async with started(Node, "javascript") as node:
            code = "import { readFileSync as r } from 'fs'\nimport os, * as all from 'os'\nimport 'path'\ntypeof r + typeof os.cpus + typeof all"
            self.assertEqual(result(await run(node, code))["text"], "functionfunctionobject")
            code = "const { a, b: [c] } = await Promise.resolve({ a: 1, b: [2] }); class K { k() { return 4 } }; function g() { return 3 }; a + c + g()"
            self.assertEqual(result(await run(node, code))["text"], "6")
            self.assertEqual(result(await run(node, "a + c + g() + new K().k() + typeof r"))["text"], "10function")
            self.assertEqual(result(await run(node, "export const e = 5; e"))["text"], "5")
            # Inside of a function there is nothing to do.
            self.assertEqual(result(await run(node, "const h = async () => await 1; let once = 'a'; once"))["text"], "a")
            lines = await run(node, "await 1; for (const i of [1, 2]) console.log(i)\nawait Promise.resolve('last')")
            self.assertEqual((text(lines), result(lines)["text"]), ("1\n2\n", "last"))

    @unittest.skipUnless(has_typescript(), "there is no typescript here")
    async def test_typescript(self):
        async with started(Node, "typescript") as node:
            code = "interface P { n: number }\nenum E { A = 3 }\nconst p: P = { n: 4 }; p.n + E.A"
            self.assertEqual(result(await run(node, code))["text"], "7")
            code = "import { join } from 'path'\nconst s: string = await Promise.resolve('x'); s"
            self.assertEqual(result(await run(node, code))["text"], "x")
            self.assertEqual(result(await run(node, "join('a', s) as string"))["text"], "a/x")


def java_is_the_templates():
    if not shutil.which("javac"):
        return False
    version = subprocess.run(["javac", "-version"], capture_output=True, check=False, text=True).stdout
    return version.startswith("javac 21")


@unittest.skipUnless(java_is_the_templates(), "there is no Java compiler of the template's version here")
class JavaTest(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.classes = tempfile.TemporaryDirectory()
        subprocess.run(["javac", "-d", cls.classes.name, os.path.join(programs.HERE, "Run.java")], check=True)
        cls.argv = Java.argv
        Java.argv = lambda self: ["java", "-cp", cls.classes.name, "Run"]

    @classmethod
    def tearDownClass(cls):
        Java.argv = cls.argv
        cls.classes.cleanup()

    async def test_java(self):
        async with started(Java, "java") as java:
            code = 'int twice(int n) {\n  return 2 * n;\n}\nvar list = List.of(1, 2);\nSystem.out.println("ü");\ntwice(21)'
            lines = await run(java, code)
            self.assertEqual([line["text"] for line in lines if line["type"] == "stdout"], ["ü", "\n"])
            self.assertEqual(result(lines)["text"], "42")
            self.assertEqual(result(await run(java, 'list.size() + "x"'))["text"], "2x")
            found = error(await run(java, "int zero = 0; 1 / zero"))
            self.assertEqual((found["name"], found["value"]), ("java.lang.ArithmeticException", "/ by zero"))
            self.assertEqual(error(await run(java, "int n = true;"))["name"], "CompileError")
            self.assertEqual(result(await run(java, 'System.getProperty("NEW")', {"NEW": "x y"}))["text"], "x y")
            self.assertEqual(result(await run(java, 'System.getProperty("NEW", "none")'))["text"], "none")
            for code in ('System.out.println("on"); while (true) {}', 'System.out.println("on"); Thread.sleep(60000);'):
                lines = []
                running = asyncio.ensure_future(java.run(code, {}, lines.append))
                while not text(lines):
                    await asyncio.sleep(0.01)
                await java.interrupt()
                await running
                self.assertEqual(error(lines)["name"], "Interrupted")
            self.assertEqual(result(await run(java, "twice(4)"))["text"], "8")


if __name__ == "__main__":
    unittest.main()
