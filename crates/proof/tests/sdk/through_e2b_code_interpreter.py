"""Every call of E2B's code interpreter SDK for Python, in every language, against the server that the environment names.
Unmodified SDK, our own questions.

    through_e2b_code_interpreter.py [CHART.png]

Prints one line per part; ends with an exception if an answer is not what E2B documents.
"""

import base64
import json
import statistics
import sys
import time

from e2b import TimeoutException
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import ChartType

parts = []


def part(function):
    parts.append(function)
    return function


def tidy(sandbox):
    """All interpreters at once are more than fits into a small sandbox; they come back when they are asked for."""
    for context in sandbox.list_code_contexts():
        if context.language not in ("python", "javascript"):
            sandbox.remove_code_context(context)


@part
def streams(sandbox):
    out, err, results = [], [], []
    code = "import sys, time\nfor i in range(3): print(i, flush=True)\nprint('e', file=sys.stderr)\n'done'"
    run = sandbox.run_code(code, on_stdout=out.append, on_stderr=err.append, on_result=results.append)
    assert "".join(message.line for message in out) == "0\n1\n2\n" and err[0].line == "e\n", (out, err)
    assert run.text == "done" and len(results) == 1 and run.error is None
    assert "".join(run.logs.stdout) == "0\n1\n2\n"
    failed = sandbox.run_code("def f():\n    1/0\nf()", on_error=results.append)
    assert failed.error.name == "ZeroDivisionError" and "in f()" in failed.error.traceback, failed.error
    assert results[-1].name == "ZeroDivisionError"


@part
def languages(sandbox):
    for language, code, text, stdout in [
        ("python", "print('x'); 6*7", "42", "x\n"),
        ("js", "console.log('x'); 6*7", "42", "x\n"),
        ("ts", "const n: number = await Promise.resolve(6); console.log('x'); n*7", "42", "x\n"),
        ("bash", "echo x", None, "x\n"),
        ("r", "cat('x\\n'); 6*7", "[1] 42", "x\n"),
        ("java", 'System.out.println("x"); 6*7', "42", "x\n"),
    ]:
        run = sandbox.run_code(code, language=language, timeout=120)
        assert run.error is None, (language, run.error)
        assert "".join(run.logs.stdout) == stdout, (language, run.logs)
        assert text is None or run.results[-1].text.strip() == text, (language, run.results)
    # Their errors have names, and an execution may have an environment of its own.
    for language, code, name in [
        ("python", "no_such_name", "NameError"),
        ("js", "noSuchName", "ReferenceError"),
        ("ts", "null.x", "TypeError"),
        ("bash", "false", "ExitStatus"),
        ("r", "stop('no')", "ERROR"),
        ("java", "throw new IllegalStateException()", "java.lang.IllegalStateException"),
    ]:
        run = sandbox.run_code(code, language=language, timeout=120)
        assert run.error and run.error.name == name, (language, run.error)
        variable = {"java": 'System.getProperty("FOO")', "bash": "echo $FOO", "r": "Sys.getenv('FOO')"}
        variable = variable.get(language, "process.env.FOO" if language in ("js", "ts") else "import os; os.environ['FOO']")
        run = sandbox.run_code(variable, language=language, envs={"FOO": "bar"})
        assert "bar" in (run.results[-1].text if run.results else "".join(run.logs.stdout)), (language, run)


@part
def charts(sandbox):
    code = """
import matplotlib.pyplot as plt
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
left.plot([1, 2, 3, 4], [1, 4, 9, 16], marker="o", label="squares")
left.set(title="Growth", xlabel="Time (s)", ylabel="Height (m)"); left.legend()
right.bar(["apples", "pears"], [15, 9], label="basket"); right.set(title="Fruit", ylabel="Weight (kg)")
plt.show()
"""
    (shown,) = sandbox.run_code(code, timeout=120).results
    assert base64.b64decode(shown.png).startswith(b"\x89PNG")
    assert shown.chart.type == ChartType.SUPERCHART
    line, bars = shown.chart.elements
    assert (line.type, line.title, line.x_unit) == (ChartType.LINE, "Growth", "s")
    assert line.elements[0].points == [(1, 1), (2, 4), (3, 9), (4, 16)], line.elements[0].points
    assert [(bar.label, bar.value) for bar in bars.elements] == [("apples", 15), ("pears", 9)]
    if len(sys.argv) > 1:
        with open(sys.argv[1], "wb") as file:
            file.write(base64.b64decode(shown.png))
        print(json.dumps(shown.chart.to_dict()))
    table = sandbox.run_code("import pandas as pd; pd.DataFrame({'a': [1, 2], 'b': ['x', None]})", timeout=120).results[0]
    assert table.data == {"a": [1, 2], "b": ["x", None]} and "<table" in table.html
    assert sandbox.run_code("{'a': [1]}").results[0].json == {"a": [1]}
    code = "from IPython.display import *\nfor x in (HTML('<b>'), Markdown('#'), Latex('$x$'), SVG('<svg></svg>'), Javascript('1')): display(x)"
    html, markdown, latex, svg, javascript = sandbox.run_code(code).results
    assert all((html.html, markdown.markdown, latex.latex, svg.svg, javascript.javascript))
    picture = sandbox.run_code("plot(1:3)", language="r", timeout=120).results[-1]
    assert base64.b64decode(picture.png).startswith(b"\x89PNG")


@part
def contexts(sandbox):
    assert {"python", "javascript"} <= {context.language for context in sandbox.list_code_contexts()}
    context = sandbox.create_code_context(language="python", cwd="/root")
    assert (context.language, context.cwd) == ("python", "/root")
    sandbox.run_code("x = 1")
    assert sandbox.run_code("x", context=context).error.name == "NameError"
    assert sandbox.run_code("import os; os.getcwd()", context=context).text == "/root"
    sandbox.run_code("y = 2", context=context)
    sandbox.restart_code_context(context)
    assert sandbox.run_code("y", context=context).error.name == "NameError"
    sandbox.remove_code_context(context)
    assert context.id not in [one.id for one in sandbox.list_code_contexts()]


@part
def interrupts(sandbox):
    for language, long, keep, ask in [
        ("python", "import time; time.sleep(300)", "kept = 5", "kept"),
        ("js", "await new Promise((done) => setTimeout(done, 300000))", "var kept = 5", "kept"),
        ("bash", "sleep 300", "kept=5", "echo $kept"),
        ("r", "Sys.sleep(300)", "kept <- 5", "kept"),
        ("java", "Thread.sleep(300000);", "int kept = 5;", "kept"),
    ]:
        sandbox.run_code(keep, language=language)
        try:
            sandbox.run_code(long, language=language, timeout=2)
        except TimeoutException:
            pass
        else:
            raise AssertionError(f"{language}: it was to take too long")
        run = sandbox.run_code(ask, language=language, timeout=60)
        assert "5" in (run.results[-1].text if run.results else "".join(run.logs.stdout)), (language, run)


@part
def speed(sandbox):
    times = []
    for _ in range(60):
        began = time.perf_counter()
        assert sandbox.run_code("1+1").text == "2"
        times.append((time.perf_counter() - began) * 1000)
    times = sorted(times[10:])
    print(f'run_code("1+1"): p50 {statistics.median(times):.1f} ms, p95 {times[int(len(times) * 0.95)]:.1f} ms', flush=True)


def main():
    began = time.perf_counter()
    sandbox = Sandbox.create(timeout=900)
    try:
        assert sandbox.run_code("1+1").text == "2"
        print(f"created, and the first execution done, in {time.perf_counter() - began:.2f} s", flush=True)
        for one in parts:
            one(sandbox)
            tidy(sandbox)
            print(one.__name__, "ok", flush=True)
    finally:
        sandbox.kill()
    print("all ok")


main()
