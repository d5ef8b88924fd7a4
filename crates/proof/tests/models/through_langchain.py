"""LangChain's published chat models, unmodified, against a gateway whose providers are scripted."""

import os
from importlib.metadata import version

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

ORIGIN = os.environ["ATOLL_URL"]
KEY = os.environ["ATOLL_MODEL_KEY"]
CHECKS = 0


def check(condition, what):
    global CHECKS
    assert condition, what
    CHECKS += 1


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city} scripted_call_1"


class City(BaseModel):
    """A city."""

    city: str


def chat(name, **options):
    return ChatOpenAI(model=name, base_url=ORIGIN + "/v1", api_key=KEY, max_retries=0, **options)


def claude(name):
    return ChatAnthropic(model=name, base_url=ORIGIN, api_key=KEY, max_retries=0, max_tokens=100)


def talk(make):
    """What both kinds can: answers, streams, tools and their results."""
    answer = make("echo").invoke([SystemMessage("be brief"), HumanMessage("hello there")])
    check(answer.text == "[scripted] hello there", answer)
    check(answer.usage_metadata["output_tokens"] == 3, answer.usage_metadata)
    streamed = None
    for piece in make("echo").stream("one two three"):
        streamed = piece if streamed is None else streamed + piece
    check(streamed.text == "[scripted] one two three", streamed)
    model = make("tool").bind_tools([weather])
    messages = [HumanMessage("weather?")]
    called = model.invoke(messages)
    call = called.tool_calls[0]
    check(call["name"] == "weather" and call["args"] == {"city": "Bern"}, called)
    messages += [called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    check("sunny in Bern" in model.invoke(messages).text, "the result of a tool")


def main():
    for provider in ["open", "claude", "gem", "bed"]:
        talk(lambda role, provider=provider: chat(f"{provider}/scripted-{role}"))
        talk(lambda role, provider=provider: chat(f"{provider}/scripted-{role}", use_responses_api=True))
        talk(lambda role, provider=provider: claude(f"{provider}/scripted-{role}"))
    shaped = chat("open/scripted-json").with_structured_output(City, method="json_schema").invoke("where?")
    check(shaped.city == "Bern", shaped)
    embedder = OpenAIEmbeddings(
        model="open/scripted-embed", base_url=ORIGIN + "/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    check(round(embedder.embed_query("two words")[0]) == 2, "an embedding")
    packages = ["langchain-core", "langchain-openai", "langchain-anthropic"]
    print(f"{CHECKS} checks with " + ", ".join(f"{name} {version(name)}" for name in packages))


main()
