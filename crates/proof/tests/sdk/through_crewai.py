"""CrewAI's own tools for E2B, as an agent of CrewAI calls them, with the version of E2B's SDK that CrewAI pins."""

import os
from importlib.metadata import version

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai_tools.tools.e2b_sandbox_tool import E2BExecTool, E2BFileTool


def main():
    print(f"crewai-tools {version('crewai-tools')} on e2b {version('e2b')}")
    fresh = E2BExecTool(template="base", sandbox_timeout=120)
    assert fresh.run(command="echo $((6 * 7))")["stdout"] == "42\n"

    kept = E2BExecTool(template="base", persistent=True, sandbox_timeout=120, envs={"WHO": "crew"})
    try:
        assert kept.run(command="echo $WHO > note; pwd", cwd="/tmp")["stdout"] == "/tmp\n"
        # The other tool comes to the same sandbox by its id: `connect`.
        same = kept._persistent_sandbox.sandbox_id
        files = E2BFileTool(sandbox_id=same)
        assert "crew" in str(files.run(action="read", path="/tmp/note"))
        # Not `append`: the tool hands the SDK what that does not take, whoever serves it.
        files.run(action="write", path="/tmp/dir/a.txt", content="one")
        assert kept.run(command="cat /tmp/dir/a.txt")["stdout"] == "one"
        assert "a.txt" in str(files.run(action="list", path="/tmp/dir"))
        attached = E2BExecTool(sandbox_id=same)
        assert attached.run(command="cat /tmp/note")["stdout"] == "crew\n"
    finally:
        kept.close()
    print("all ok")


main()
