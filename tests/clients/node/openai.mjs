// OpenAI's Node client.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ANSWER_OF_SHOUT, QUESTION, runCase, url } from "./case.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const asked = { model: "shout", messages, temperature: 0, max_tokens: 100 };
const City = z.object({ country: z.enum(["Italy", "France"]), is_capital: z.boolean() });
const Weather = z.object({ city: z.enum(["Rome", "Paris"]) });
const weather = zodFunction({ name: "weather", parameters: Weather });
const forced = { type: "function", function: { name: "weather" } };

await runCase({
  async text() {
    const answer = await client.chat.completions.create(asked);
    assert.equal(answer.choices[0].message.content, ANSWER_OF_SHOUT);
    const prompt = { model: "pirate", prompt: "Once upon a time", max_tokens: 4 };
    assert.ok((await client.completions.create(prompt)).choices[0].text);
    const models = (await client.models.list()).data.map((model) => model.id);
    assert.ok(models.includes("shout"));
  },
  async stream() {
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "";
    let usage = null;
    for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, ANSWER_OF_SHOUT);
    assert.ok(usage.completion_tokens > 0);
    const runner = client.chat.completions.stream(asked);
    assert.equal(await runner.finalContent(), ANSWER_OF_SHOUT);
  },
  async parse() {
    const answer = await client.chat.completions.parse({
      ...asked,
      response_format: zodResponseFormat(City, "city"),
    });
    City.parse(answer.choices[0].message.parsed);
  },
  async tools() {
    const answer = await client.chat.completions.parse({
      ...asked,
      tools: [weather],
      tool_choice: forced,
    });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    Weather.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
  },
  async runTools() {
    for (const stream of [false, true]) {
      const called = [];
      const tool = zodFunction({
        name: "weather",
        parameters: Weather,
        function: (given) => {
          called.push(given.city);
          return "sunny";
        },
      });
      const runner = client.chat.completions.runTools(
        { ...asked, tools: [tool], tool_choice: "required", stream },
        { maxChatCompletions: 3 },
      );
      await runner.done();
      assert.equal(called.length, 3);
      assert.ok(called.every((city) => ["Rome", "Paris"].includes(city)));
      const roles = runner.messages.map((message) => message.role).join(" ");
      assert.match(roles, /^user( assistant tool){3}$/);
    }
  },
  async embeddings() {
    const ask = (more) =>
      client.embeddings.create({ model: "shout", input: ["a cat", "a kitten"], ...more });
    const [packed, plain] = [await ask({}), await ask({ encoding_format: "float" })];
    assert.equal(packed.data[1].embedding.length, 576);
    const far = plain.data[0].embedding.filter(
      (value, i) => Math.abs(value - packed.data[0].embedding[i]) > 1e-3,
    );
    assert.equal(far.length, 0);
  },
  async responses() {
    const given = { model: "shout", input: QUESTION, temperature: 0 };
    assert.equal((await client.responses.create(given)).output_text, ANSWER_OF_SHOUT);
    const stream = client.responses.stream(given);
    assert.equal((await stream.finalResponse()).output_text, ANSWER_OF_SHOUT);
    const format = { format: zodTextFormat(City, "city") };
    City.parse((await client.responses.parse({ ...given, text: format })).output_parsed);
    const tools = [{ type: "function", name: "weather", parameters: z.toJSONSchema(Weather) }];
    const choice = { type: "function", name: "weather" };
    const answer = await client.responses.create({ ...given, tools, tool_choice: choice });
    assert.equal(answer.output[0].type, "function_call");
    Weather.parse(JSON.parse(answer.output[0].arguments));
  },
  async errors() {
    const wrong = client.chat.completions.create({ ...asked, model: "no-such-model" });
    await assert.rejects(wrong, NotFoundError);
    const content = "word ".repeat(9000);
    const long = client.chat.completions.create({ ...asked, messages: [{ role: "user", content }] });
    await assert.rejects(long, BadRequestError);
  },
});
