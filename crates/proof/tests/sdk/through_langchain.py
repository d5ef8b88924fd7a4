"""LangChain's Deep Agents on E2B's integration from PyPI, with a model that only reads its lines.

The model writes a program with one tool, runs it with another, reads what it printed, and says so. Everything but the model
is what anybody would install."""

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_e2b import E2BSandbox

PROGRAM = "total = sum(range(11))\nprint('the total is', total)\n"
SCRIPT = [
    ("write_file", {"file_path": "/home/user/total.py", "content": PROGRAM}),
    ("execute", {"command": "python3 /home/user/total.py"}),
    ("read_file", {"file_path": "/home/user/total.py"}),
]


class Scripted(BaseChatModel):
    """Calls the tools of the script one after the other, then repeats what the second one said."""

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        names = {getattr(tool, "name", None) for tool in tools}
        missing = {name for name, _ in SCRIPT} - names
        assert not missing, f"the agent has no tools {missing} on this backend"
        return self

    def _generate(self, messages, stop=None, run_manager=None, **_):
        said = [message for message in messages if isinstance(message, ToolMessage)]
        if len(said) < len(SCRIPT):
            name, args = SCRIPT[len(said)]
            call = {"name": name, "args": args, "id": f"call-{len(said)}", "type": "tool_call"}
            answer = AIMessage(content="", tool_calls=[call])
        else:
            answer = AIMessage(content=f"It printed: {said[1].content}")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def main():
    sandbox = Sandbox.create("base", timeout=120)
    try:
        agent = create_deep_agent(model=Scripted(), backend=E2BSandbox(sandbox=sandbox))
        outcome = agent.invoke({"messages": [{"role": "user", "content": "What is 0 + 1 + ... + 10?"}]})
        messages = outcome["messages"]
        results = [message for message in messages if isinstance(message, ToolMessage)]
        assert len(results) == len(SCRIPT), messages
        assert all(result.status == "success" for result in results), results
        assert "the total is 55" in results[1].content, results[1]
        assert "sum(range(11))" in results[2].content, results[2]
        assert "the total is 55" in messages[-1].content, messages[-1]
        # It happened in the sandbox, not here.
        assert sandbox.files.read("/home/user/total.py") == PROGRAM
    finally:
        sandbox.kill()
    print("all ok")


main()
