// Vercel's `ai` with the providers for OpenAI-compatible servers and for OpenAI (POST /v1/responses).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, stepCountIs } from "ai";
import { Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER_OF_SHOUT, QUESTION, runCase, url } from "./case.mjs";

const provider = createOpenAICompatible({
  name: "loramux",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const settings = { prompt: QUESTION, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const asked = { ...settings, model: provider("shout") };
const City = z.object({ country: z.enum(["Italy", "France"]), is_capital: z.boolean() });
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const forced = { tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };

await runCase({
  async generateText() {
    const answer = await generateText(asked);
    assert.equal(answer.text, ANSWER_OF_SHOUT);
    assert.ok(answer.usage.outputTokens > 0);
  },
  async streamText() {
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    assert.equal(text, ANSWER_OF_SHOUT);
  },
  async generateObject() {
    City.parse((await generateObject({ ...asked, schema: City })).object);
    City.parse((await generateText({ ...asked, output: Output.object({ schema: City }) })).output);
    const streamed = streamObject({ ...asked, schema: City });
    let last = null;
    for await (const part of streamed.partialObjectStream) last = part;
    assert.deepEqual(City.parse(last), await streamed.object);
  },
  async tools() {
    const first = ({ stepNumber }) => ({ toolChoice: stepNumber < 2 ? forced.toolChoice : "none" });
    const loop = { ...asked, ...forced, stopWhen: stepCountIs(3), prepareStep: first };
    const answer = await generateText(loop);
    const results = answer.steps.flatMap((step) => step.toolResults);
    assert.equal(answer.steps.length, 3);
    assert.equal(results.length, 2);
    assert.match(results[0].output, /^sunny in (Rome|Paris)$/);
    assert.ok(answer.text);
    const streamed = streamText({ ...asked, ...forced });
    const calls = await streamed.toolCalls;
    assert.equal(calls[0].toolName, "weather");
  },
  async embedMany() {
    const model = provider.textEmbeddingModel("shout");
    const { embeddings } = await embedMany({ model, values: ["a cat", "a kitten"] });
    assert.equal(embeddings[1].length, 576);
  },
  async responses() {
    const responses = { ...settings, model: openai("shout") };
    assert.equal((await generateText(responses)).text, ANSWER_OF_SHOUT);
    let text = "";
    for await (const piece of streamText(responses).textStream) text += piece;
    assert.equal(text, ANSWER_OF_SHOUT);
    City.parse((await generateObject({ ...responses, schema: City })).object);
    const called = await generateText({ ...responses, ...forced });
    assert.equal(called.toolResults.length, 1);
  },
  async errors() {
    const wrong = generateText({ ...settings, model: provider("no-such-model") });
    await assert.rejects(wrong, (error) => APICallError.isInstance(error) && error.statusCode === 404);
  },
});
