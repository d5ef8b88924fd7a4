"""Contexts that are Jupyter kernels; and what a Python kernel of ours shows."""

import asyncio
import importlib.util
import unittest

from support import error, result, run, started, text

HAS = all(importlib.util.find_spec(name) for name in ("jupyter_client", "ipykernel", "matplotlib", "pandas", "PIL"))
if HAS:
    from contexts import Died
    from kernels import Python


@unittest.skipUnless(HAS, "jupyter_client, ipykernel, matplotlib, pandas and PIL are not all here")
class PythonTest(unittest.IsolatedAsyncioTestCase):
    async def test_what_a_kernel_tells(self):
        async with started(Python, "python") as python:
            lines = await run(python, "import sys\nx = 20\nprint('a')\nprint('b', file=sys.stderr)\n'x' * 3")
            self.assertEqual((text(lines), text(lines, "stderr"), result(lines)["text"]), ("a\n", "b\n", "xxx"))
            self.assertTrue(result(lines)["is_main_result"])
            # Indented as a whole, as in a string of somebody's program; and a shell's command.
            self.assertEqual(result(await run(python, "\n    y = x + 1\n    y * 2"))["text"], "42")
            self.assertEqual(text(await run(python, "!pwd")).strip(), python.cwd)
            found = error(await run(python, "1/0"))
            self.assertEqual((found["name"], found["value"]), ("ZeroDivisionError", "division by zero"))
            self.assertNotIn("\x1b", found["traceback"])
            counts = []
            for _ in range(2):
                lines = []
                await python.run("None", {}, lines.append)
                counts.append(lines[0]["execution_count"])
            self.assertEqual(counts[1], counts[0] + 1)
            # Nothing of ours is among the user's names.
            own = result(await run(python, "[name for name in dir() if not name.startswith('_')]"))["json"]
            self.assertEqual(set(own) - {"x", "y", "sys", "In", "Out", "exit", "quit", "get_ipython", "open"}, set())

    async def test_environment_of_one_execution(self):
        async with started(Python, "python") as python:
            await run(python, "import os; os.environ['KEPT'] = 'before'")
            code = "(os.environ['NEW'], os.environ['KEPT'])"
            self.assertEqual(result(await run(python, code, {"NEW": "it's", "KEPT": "x"}))["text"], "(\"it's\", 'x')")
            code = "(os.environ.get('NEW'), os.environ['KEPT'])"
            self.assertEqual(result(await run(python, code))["text"], "(None, 'before')")

    async def test_interrupt_restart_and_death(self):
        async with started(Python, "python") as python:
            lines = []
            running = asyncio.ensure_future(python.run("x = 7; print('on')\nimport time; time.sleep(60)", {}, lines.append))
            while not text(lines):
                await asyncio.sleep(0.01)
            await python.interrupt()
            await running
            self.assertEqual(error(lines)["name"], "KeyboardInterrupt")
            self.assertEqual(result(await run(python, "x"))["text"], "7")
            with self.assertRaises(Died):
                await run(python, "import os; os._exit(1)")
            self.assertEqual(error(await run(python, "x"))["name"], "NameError")
            await run(python, "x = 1")
            await python.restart()
            self.assertEqual(error(await run(python, "x"))["name"], "NameError")

    async def test_rich_results(self):
        async with started(Python, "python") as python:
            code = "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4], label='a')\nplt.title('T')\nplt.show()"
            shown = result(await run(python, code))
            self.assertTrue(shown["png"].startswith("iVBOR"))
            self.assertEqual((shown["chart"]["type"], shown["chart"]["title"]), ("line", "T"))
            self.assertEqual(shown["chart"]["elements"], [{"label": "a", "points": [[1, 3], [2, 4]]}])
            code = "import pandas as pd\npd.DataFrame({'a': [1, None], 't': pd.to_datetime(['2024-01-02', None])})"
            table = result(await run(python, code))
            self.assertEqual(table["data"], {"a": [1.0, None], "t": ["2024-01-02T00:00:00", None]})
            self.assertIn("<table", table["html"])
            self.assertEqual(result(await run(python, "{'a': [1, 2.5], 'b': None}"))["json"], {"a": [1, 2.5], "b": None})
            self.assertNotIn("json", result(await run(python, "{'a': float('nan')}")))
            code = "from IPython.display import HTML, Markdown, Latex, SVG, Javascript, display\n"
            code += "for x in (HTML('<b>'), Markdown('# a'), Latex('$x$'), SVG('<svg></svg>'), Javascript('1')): display(x)"
            lines = [line for line in await run(python, code) if line["type"] == "result"]
            kinds = [{"html", "markdown", "latex", "svg", "javascript"} & set(line) for line in lines]
            self.assertEqual(kinds, [{"html"}, {"markdown"}, {"latex"}, {"svg"}, {"javascript"}])
            self.assertFalse(any(line["is_main_result"] for line in lines))
            code = "from PIL import Image\nImage.new('RGB', (4, 4)).save('a.png')"
            self.assertTrue(result(await run(python, code))["png"].startswith("iVBOR"))


if __name__ == "__main__":
    unittest.main()
