"""The published OpenAI and Anthropic clients for Python, unmodified, against a gateway whose providers are scripted."""

import asyncio
import os

import anthropic
import openai

ORIGIN = os.environ["ATOLL_URL"]
KEY = os.environ["ATOLL_MODEL_KEY"]
CHECKS = 0


def check(condition, what):
    global CHECKS
    assert condition, what
    CHECKS += 1


TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def chat(client, model):
    """Chat Completions with everything in it."""
    plain = client.chat.completions.create(model=model("echo"), messages=[{"role": "user", "content": "hello there"}])
    check(plain.choices[0].message.content == "[scripted] hello there", plain)
    check(plain.choices[0].finish_reason == "stop", plain)
    check((plain.usage.prompt_tokens, plain.usage.completion_tokens) == (2, 3), plain.usage)

    text, usage, finish = "", None, None
    stream = client.chat.completions.create(
        model=model("echo"),
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    check(text == "[scripted] one two three", text)
    check(finish == "stop" and usage.completion_tokens == 4, usage)

    unasked = client.chat.completions.create(model=model("echo"), messages=[{"role": "user", "content": "x"}], stream=True)
    check(all(chunk.usage is None for chunk in unasked), "usage that nobody asked for")

    tools = [{"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": TOOL}}]
    messages = [{"role": "user", "content": "weather?"}]
    called = client.chat.completions.create(model=model("tool"), messages=messages, tools=tools, tool_choice="auto")
    call = called.choices[0].message.tool_calls[0]
    check(called.choices[0].finish_reason == "tool_calls", called)
    check(call.function.name == "weather" and '"Bern"' in call.function.arguments, call)
    messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny scripted_call_1"}]
    answered = client.chat.completions.create(model=model("tool"), messages=messages, tools=tools)
    check("sunny" in answered.choices[0].message.content, answered)

    seen = client.chat.completions.create(
        model=model("echo"),
        messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": PIXEL}}]}],
    )
    check("look" in seen.choices[0].message.content, seen)

    limited = client.chat.completions.create(model=model("full"), messages=[{"role": "user", "content": "go"}], max_completion_tokens=7)
    check(limited.usage.completion_tokens == 7 and limited.choices[0].finish_reason == "length", limited)


def structured(client, model):
    import pydantic

    class City(pydantic.BaseModel):
        city: str

    parsed = client.chat.completions.parse(
        model=model("json"), messages=[{"role": "user", "content": "where?"}], response_format=City
    )
    check(parsed.choices[0].message.parsed.city == "Bern", parsed)


def responses(client, model):
    plain = client.responses.create(model=model("echo"), input="hello there", instructions="be brief")
    check(plain.output_text == "[scripted] hello there", plain)
    check(plain.status == "completed" and plain.usage.output_tokens == 3, plain.usage)
    kinds, text = [], ""
    for event in client.responses.create(model=model("echo"), input=[{"role": "user", "content": "one two"}], stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    check(text == "[scripted] one two", text)
    check(kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds)
    with client.responses.stream(model=model("think"), input="ponder") as stream:
        final = [event for event in stream][-1].response
    check("ponder" in final.output_text, final)
    tools = [{"type": "function", "name": "weather", "parameters": TOOL, "strict": False}]
    called = client.responses.create(model=model("tool"), input="weather?", tools=tools)
    call = [item for item in called.output if item.type == "function_call"][0]
    check(call.name == "weather", called)
    follow = [{"role": "user", "content": "weather?"}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answered = client.responses.create(model=model("tool"), input=follow, tools=tools)
    check("sunny" in answered.output_text, answered)


def openai_errors(client, model):
    for action, error, status in [
        (lambda: client.chat.completions.create(model="nobody-has-this", messages=[{"role": "user", "content": "x"}]), openai.NotFoundError, 404),
        (lambda: client.chat.completions.create(model=model("429"), messages=[{"role": "user", "content": "x"}]), openai.RateLimitError, 429),
        (lambda: client.chat.completions.create(model=model("500"), messages=[{"role": "user", "content": "x"}]), openai.InternalServerError, 500),
        (lambda: openai.OpenAI(base_url=ORIGIN + "/v1", api_key="atm_wrong", max_retries=0).models.list(), openai.AuthenticationError, 401),
    ]:
        try:
            action()
            check(False, f"{error} was expected")
        except error as found:
            check(found.status_code == status and found.body["message"], found)


def messages(client, model):
    plain = client.messages.create(model=model("echo"), max_tokens=100, messages=[{"role": "user", "content": "hello there"}])
    check(plain.content[0].text == "[scripted] hello there", plain)
    check(plain.stop_reason == "end_turn" and (plain.usage.input_tokens, plain.usage.output_tokens) == (2, 3), plain)
    with client.messages.stream(
        model=model("echo"), max_tokens=100, system="be brief", messages=[{"role": "user", "content": "one two three"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(text == "[scripted] one two three" and final.usage.output_tokens == 4, final)
    tools = [{"name": "weather", "description": "the weather", "input_schema": TOOL, "cache_control": {"type": "ephemeral"}}]
    asked = [{"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]}]
    called = client.messages.create(model=model("tool"), max_tokens=100, messages=asked, tools=tools)
    use = [part for part in called.content if part.type == "tool_use"][0]
    check(called.stop_reason == "tool_use" and use.input == {"city": "Bern"}, called)
    asked += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny scripted_call_1"}]},
    ]
    answered = client.messages.create(model=model("tool"), max_tokens=100, messages=asked, tools=tools)
    check("sunny" in answered.content[0].text, answered)
    seen = client.messages.create(
        model=model("echo"),
        max_tokens=100,
        messages=[{"role": "user", "content": [
            {"type": "text", "text": "look"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        ]}],
    )
    check("look" in seen.content[0].text, seen)
    counted = client.messages.count_tokens(model=model("echo"), messages=[{"role": "user", "content": "how many are these"}])
    check(counted.input_tokens > 0, counted)


def thinking(client):
    """Signatures come through where the provider signs."""
    thought = client.messages.create(
        model="claude/scripted-think",
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000},
        messages=[{"role": "user", "content": "ponder"}],
    )
    check(thought.content[0].type == "thinking" and thought.content[0].signature, thought)
    again = client.messages.create(
        model="claude/scripted-echo",
        max_tokens=4000,
        messages=[
            {"role": "user", "content": "ponder"},
            {"role": "assistant", "content": thought.content},
            {"role": "user", "content": "and now"},
        ],
    )
    check("and now" in again.content[0].text, again)


def anthropic_errors(client, model):
    for action, error, status in [
        (lambda: client.messages.create(model="nobody-has-this", max_tokens=9, messages=[{"role": "user", "content": "x"}]), anthropic.NotFoundError, 404),
        (lambda: client.messages.create(model=model("429"), max_tokens=9, messages=[{"role": "user", "content": "x"}]), anthropic.RateLimitError, 429),
        (lambda: anthropic.Anthropic(base_url=ORIGIN, api_key="atm_wrong", max_retries=0).models.list(), anthropic.AuthenticationError, 401),
    ]:
        try:
            action()
            check(False, f"{error} was expected")
        except error as found:
            check(found.status_code == status and found.body["error"]["message"], found)


async def at_once():
    client = openai.AsyncOpenAI(base_url=ORIGIN + "/v1", api_key=KEY, max_retries=0)

    async def one(number):
        answer = await client.chat.completions.create(
            model="open/scripted-echo", messages=[{"role": "user", "content": f"number {number}"}]
        )
        return answer.choices[0].message.content == f"[scripted] number {number}"

    check(all(await asyncio.gather(*[one(number) for number in range(50)])), "answers were mixed up")


def main():
    client = openai.OpenAI(base_url=ORIGIN + "/v1", api_key=KEY, max_retries=0)
    claude = anthropic.Anthropic(base_url=ORIGIN, api_key=KEY, max_retries=0)
    for provider in ["open", "claude", "gem", "bed"]:
        model = lambda role, provider=provider: f"{provider}/scripted-{role}"
        chat(client, model)
        responses(client, model)
        messages(claude, model)
    # A provider that speaks Responses itself: nothing is translated.
    responses(client, lambda role: f"resp/scripted-{role}")
    structured(client, lambda role: f"open/scripted-{role}")
    structured(client, lambda role: f"claude/scripted-{role}")
    structured(client, lambda role: f"bed/scripted-{role}")
    thinking(claude)
    openai_errors(client, lambda role: f"open/scripted-{role}")
    anthropic_errors(claude, lambda role: f"claude/scripted-{role}")
    vectors = client.embeddings.create(model="open/scripted-embed", input=["one", "two words"], dimensions=3)
    check([round(v) for v in vectors.data[1].embedding] == [2, 2, 2] and vectors.usage.prompt_tokens == 3, vectors)
    check(any(model.id == "scripted-echo" for model in client.models.list()), "the list of models")
    check(client.models.retrieve("scripted-echo").id == "scripted-echo", "one model")
    check(any(model.id == "scripted-echo" for model in claude.models.list()), "the list of models")
    asyncio.run(at_once())
    print(f"{CHECKS} checks with openai {openai.__version__} and anthropic {anthropic.__version__}")


main()
