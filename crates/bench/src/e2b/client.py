# The client of `atoll bench e2b`: does with E2B's own SDK what each line on stdin asks for, and says how long it took. One
# process does everything, as a program that uses the SDK would: what it costs to start Python is nobody's business here.
import json
import sys
import time

from e2b import Sandbox

boxes = {}


def create(asked):
    return Sandbox.create(asked["template"], timeout=600)


def interpret(asked):
    from e2b_code_interpreter import Sandbox as Interpreter

    return Interpreter.create(asked["template"], timeout=600)


for line in sys.stdin:
    asked = json.loads(line)
    box = boxes.get(asked.get("id"))
    answer = {}
    try:
        began = time.perf_counter()
        match asked["do"]:
            case "create":
                box = create(asked)
            case "interpret":
                box = interpret(asked)
            case "run":
                assert box.commands.run("true").exit_code == 0
            case "run_code":
                assert box.run_code("1+1").text == "2"
            case "pause":
                box.pause()
            case "connect":
                box.connect(timeout=600)
            case "kill":
                box.kill()
        answer["ms"] = (time.perf_counter() - began) * 1000
        boxes[box.sandbox_id] = box
        answer["id"] = box.sandbox_id
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
