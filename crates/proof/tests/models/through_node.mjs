// The published clients for JavaScript, unmodified, against a gateway whose providers are scripted.
// It is run from the directory in whose node_modules they are.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { embedMany, generateText, jsonSchema, streamText, tool } from "ai";
import { createGateway } from "@ai-sdk/gateway";

const origin = process.env.ATOLL_URL;
const apiKey = process.env.ATOLL_MODEL_KEY;
const manifest = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
let checks = 0;
const check = (condition, what) => {
  assert.ok(condition, typeof what === "string" ? what : JSON.stringify(what));
  checks += 1;
};
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };

const openai = new OpenAI({ baseURL: `${origin}/v1`, apiKey, maxRetries: 0 });
const claude = new Anthropic({ baseURL: origin, apiKey, maxRetries: 0 });
for (const provider of ["open", "claude", "gem", "bed"]) {
  const model = (role) => `${provider}/scripted-${role}`;
  const plain = await openai.chat.completions.create({ model: model("echo"), messages: [{ role: "user", content: "hello there" }] });
  check(plain.choices[0].message.content === "[scripted] hello there", plain);
  let text = "";
  const stream = await openai.chat.completions.create({ model: model("echo"), messages: [{ role: "user", content: "a b c" }], stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  check(text === "[scripted] a b c", text);
  const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
  const called = await openai.chat.completions.create({ model: model("tool"), messages: [{ role: "user", content: "weather?" }], tools });
  check(called.choices[0].message.tool_calls[0].function.name === "weather", called);
  const response = await openai.responses.create({ model: model("echo"), input: "hello there" });
  check(response.output_text === "[scripted] hello there", response);
  text = "";
  for await (const event of await openai.responses.create({ model: model("echo"), input: "a b", stream: true }))
    if (event.type === "response.output_text.delta") text += event.delta;
  check(text === "[scripted] a b", text);
  const message = await claude.messages.create({ model: model("echo"), max_tokens: 50, messages: [{ role: "user", content: "hello there" }] });
  check(message.content[0].text === "[scripted] hello there", message);
  const final = await claude.messages.stream({ model: model("echo"), max_tokens: 50, messages: [{ role: "user", content: "a b c" }] }).finalMessage();
  check(final.content[0].text === "[scripted] a b c" && final.usage.output_tokens === 4, final);
  const used = await claude.messages.create({ model: model("tool"), max_tokens: 50, messages: [{ role: "user", content: "weather?" }], tools: [{ name: "weather", input_schema: schema }] });
  check(used.content.find((part) => part.type === "tool_use").input.city === "Bern", used);
}
const vectors = await openai.embeddings.create({ model: "open/scripted-embed", input: ["one", "two words"] });
check(Math.round(vectors.data[1].embedding[0]) === 2, vectors);
check((await openai.models.list()).data.some((model) => model.id === "scripted-echo"), "the list of models");
await assert.rejects(() => openai.chat.completions.create({ model: "nobody-has-this", messages: [{ role: "user", content: "x" }] }), OpenAI.NotFoundError);
await assert.rejects(() => claude.messages.create({ model: "nobody-has-this", max_tokens: 1, messages: [{ role: "user", content: "x" }] }), Anthropic.NotFoundError);
checks += 2;

// The AI SDK's own protocol.
// Version 3 of the package speaks version 3 of the protocol, version 4 the next.
const spoken = manifest("@ai-sdk/gateway").version.startsWith("3.") ? "v3" : "v4";
const gateway = createGateway({ baseURL: `${origin}/${spoken}/ai`, apiKey });
let generation;
for (const provider of ["open", "claude", "gem", "bed"]) {
  const model = (role) => gateway(`${provider}/scripted-${role}`);
  const plain = await generateText({ model: model("echo"), prompt: "hello there", maxRetries: 0 });
  check(plain.text === "[scripted] hello there", plain);
  check(plain.usage.outputTokens === 3 && plain.finishReason === "stop", plain.usage);
  generation = plain.providerMetadata.gateway.generationId;
  const streamed = streamText({ model: model("echo"), system: "be brief", prompt: "a b c", maxRetries: 0 });
  let text = "";
  for await (const delta of streamed.textStream) text += delta;
  check(text === "[scripted] a b c" && (await streamed.usage).outputTokens === 4, text);
  const called = await generateText({
    model: model("tool"),
    prompt: "weather?",
    tools: { weather: tool({ description: "the weather", inputSchema: jsonSchema(schema) }) },
    maxRetries: 0,
  });
  check(called.toolCalls[0].toolName === "weather" && called.toolCalls[0].input.city === "Bern", called);
}
const thought = await generateText({ model: gateway("claude/scripted-think"), prompt: "ponder", maxRetries: 0 });
check(thought.reasoningText === "[scripted] thinking", thought.reasoningText);
const many = await embedMany({ model: gateway.embeddingModel("open/scripted-embed"), values: ["one", "two words"], maxRetries: 0 });
check(Math.round(many.embeddings[1][0]) === 2, many);
const catalogue = await gateway.getAvailableModels();
check(catalogue.models.some((entry) => entry.id === "scripted-echo"), catalogue);
const credits = await gateway.getCredits();
check(credits.balance !== undefined && credits.totalUsed !== undefined, credits);
const info = await gateway.getGenerationInfo({ id: generation });
check(info.id === generation && info.model === "bed/scripted-echo", info);
const today = new Date().toISOString().slice(0, 10);
const report = await gateway.getSpendReport({ startDate: today, endDate: today, groupBy: "model" });
check(report.results.some((row) => row.model === "scripted-echo" && row.requestCount > 0), report);
await assert.rejects(() => generateText({ model: gateway("nobody-has-this"), prompt: "x", maxRetries: 0 }), /nobody-has-this/);
checks += 1;
const versions = ["openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/gateway"].map((name) => `${name} ${manifest(name).version}`);
console.log(`${checks} checks with ${versions.join(", ")}`);
