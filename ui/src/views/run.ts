/** One column's request: its body, its stream, and the same call as curl and Python. */

import { errorOf, get, open, ApiError } from "../api";
import { readEvents } from "../sse";
import type { Json } from "../canonical";
import { curl, pythonCall, pythonHead, type Body, type Receipt } from "./call";
import type { Part } from "./columns";

const PATH = "/v1/chat/completions";

export interface Parameters {
  system: string;
  prompt: string;
  temperature: string;
  topP: string;
  maxTokens: string;
  seed: string;
  schema: string;
}

export interface Output {
  phase: "idle" | "waiting" | "streaming" | "done" | "stopped" | "failed";
  text: string;
  ttftMs: number | null;
  tokens: number | null;
  perSecond: number | null;
  finish: string | null;
  receiptId: string | null;
  receipt: Receipt | null;
  error: unknown;
}

export const NOTHING: Output = {
  phase: "idle",
  text: "",
  ttftMs: null,
  tokens: null,
  perSecond: null,
  finish: null,
  receiptId: null,
  receipt: null,
  error: null,
};

interface Chunk {
  choices: { delta: { content?: string | null }; finish_reason: string | null }[];
  usage?: { completion_tokens: number };
  serving?: Receipt;
}

/** Raises an error for a schema that is not JSON. */
export function bodyOf(parts: readonly Part[], base: string, parameters: Parameters): Body {
  const messages: Json[] = [];
  if (parameters.system.trim() !== "") messages.push({ role: "system", content: parameters.system });
  messages.push({ role: "user", content: parameters.prompt });
  const body: Body = { model: base };
  if (parts.length === 1 && parts[0]?.weight === 1) {
    body.model = parts[0].name;
  } else if (parts.length > 0) {
    body.adapters = parts.map((part) => part.name);
    body.adapter_weights = parts.map((part) => part.weight);
  }
  body.messages = messages;
  for (const [name, text] of [
    ["temperature", parameters.temperature],
    ["top_p", parameters.topP],
    ["max_tokens", parameters.maxTokens],
    ["seed", parameters.seed],
  ] as const) {
    if (text.trim() !== "") body[name] = Number(text);
  }
  if (parameters.schema.trim() !== "") {
    const schema = schemaOf(parameters.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

function schemaOf(text: string): Json {
  try {
    return JSON.parse(text) as Json;
  } catch (error) {
    throw new Error(`The JSON schema is not valid JSON: ${(error as Error).message}`);
  }
}

export async function runColumn(
  body: Body,
  signal: AbortSignal,
  show: (output: Output) => void,
): Promise<void> {
  let output: Output = { ...NOTHING, phase: "waiting" };
  const update = (change: Partial<Output>) => show((output = { ...output, ...change }));
  update({});
  const began = performance.now();
  let first: number | null = null;
  let numChunks = 0;
  try {
    const response = await open(PATH, {
      method: "POST",
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      accept: "text/event-stream",
      signal,
    });
    update({ receiptId: response.headers.get("x-loramux-receipt") });
    if (response.body === null) throw new ApiError(200, "The answer has no body.");
    let isComplete = false;
    for await (const event of readEvents(response.body)) {
      if (event.data === "[DONE]") {
        isComplete = true;
        break;
      }
      if (event.data.startsWith('{"error"')) throw errorOf(event.data, 500, null);
      const chunk = JSON.parse(event.data) as Chunk;
      const choice = chunk.choices[0];
      const text = choice?.delta.content ?? "";
      const now = performance.now();
      if (text !== "") {
        first ??= now;
        numChunks += 1;
      }
      const tokens = chunk.usage?.completion_tokens ?? output.tokens;
      const counted = tokens ?? numChunks;
      const passed = first === null ? 0 : now - first;
      update({
        phase: "streaming",
        text: output.text + text,
        ttftMs: first === null ? null : first - began,
        tokens,
        perSecond:
          text !== "" && counted > 1 && passed > 0
            ? ((counted - 1) * 1000) / passed
            : output.perSecond,
        finish: choice?.finish_reason ?? output.finish,
        receipt: chunk.serving ?? output.receipt,
      });
    }
    if (!isComplete) throw new ApiError(0, "The stream broke off before its end.");
    update({ phase: "done" });
    await readReceipt(output, update);
  } catch (error) {
    const isStopped = error instanceof DOMException && error.name === "AbortError";
    update(isStopped ? { phase: "stopped" } : { phase: "failed", error });
  }
}

/** Streams without a receipt inside name it in a header; keys without the scope do without. */
async function readReceipt(
  output: Output,
  update: (change: Partial<Output>) => void,
): Promise<void> {
  if (output.receipt !== null || output.receiptId === null) return;
  try {
    update({ receipt: await get<Receipt>(`/v1/receipts/${encodeURIComponent(output.receiptId)}`) });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}

const OWN = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "response_format", "stream"];

export const asCurl = (body: Body): string => curl(PATH, { ...body, stream: true }, "-N ");

export const asPython = (body: Body): string =>
  [
    ...pythonHead(),
    ...pythonCall("stream", "chat.completions.create", { ...body, stream: true }, OWN),
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
