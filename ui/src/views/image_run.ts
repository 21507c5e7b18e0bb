/** One column's image: its request, its stream of partial images, and the call as text. */

import { ApiError, errorOf, open } from "../api";
import { readEvents, type ServerEvent } from "../sse";
import { curl, pythonCall, pythonHead, type Body, type Receipt } from "./call";
import type { Part } from "./columns";

const PATH = "/v1/images/generations";
export const MAX_PARTIAL = 3;

/** As text, as they are in the form; empty: the model's default. */
export interface ImageParameters {
  prompt: string;
  negative: string;
  seed: string;
  size: string;
  steps: string;
  guidance: string;
  trueGuidance: string;
  partial: string;
}

export interface ImageOutput {
  phase: "idle" | "drawing" | "done" | "stopped" | "failed";
  /** The address of the newest image, in memory of this page. */
  url: string | null;
  /** Partial images so far. */
  numPartial: number;
  size: string | null;
  firstMs: number | null;
  totalMs: number | null;
  tokens: number | null;
  receipt: Receipt | null;
  /** What the model could not draw of the prompt. */
  warnings: readonly string[];
  error: unknown;
}

export const NOTHING: ImageOutput = {
  phase: "idle",
  url: null,
  numPartial: 0,
  size: null,
  firstMs: null,
  totalMs: null,
  tokens: null,
  receipt: null,
  warnings: [],
  error: null,
};

/** Gives the memory of an image back. */
export function forget(output: ImageOutput): void {
  if (output.url !== null) URL.revokeObjectURL(output.url);
}

export function bodyOf(parts: readonly Part[], base: string, parameters: ImageParameters): Body {
  const body: Body = { model: base, prompt: parameters.prompt, adapters: parts.map((part) => part.name) };
  if (parts.length > 0) body.adapter_weights = parts.map((part) => part.weight);
  if (parameters.negative.trim() !== "") body.negative_prompt = parameters.negative;
  if (parameters.size !== "") body.size = parameters.size;
  for (const [name, text] of [
    ["seed", parameters.seed],
    ["num_inference_steps", parameters.steps],
    ["guidance_scale", parameters.guidance],
    ["true_cfg_scale", parameters.trueGuidance],
    ["partial_images", parameters.partial],
  ] as const) {
    if (text.trim() !== "") body[name] = Number(text);
  }
  return body;
}

interface ImageEvent {
  b64_json: string;
  size: string;
  output_format: string;
  usage?: { output_tokens: number };
  serving?: Receipt;
  warnings?: string[];
}

export async function runImage(
  body: Body,
  signal: AbortSignal,
  show: (output: ImageOutput) => void,
): Promise<void> {
  let output: ImageOutput = { ...NOTHING, phase: "drawing" };
  const began = performance.now();
  const update = (change: Partial<ImageOutput>) => {
    const before = output;
    output = { ...output, ...change };
    show(output);
    if (before.url !== output.url) forget(before);
  };
  update({});
  try {
    const response = await open(PATH, {
      method: "POST",
      body: { ...body, stream: true },
      accept: "text/event-stream",
      signal,
    });
    if (response.body === null) throw new ApiError(response.status, "The answer has no body.");
    for await (const event of readEvents(response.body)) {
      const drawn = parse(event);
      const now = performance.now() - began;
      const common = { url: await imageUrl(drawn), size: drawn.size, firstMs: output.firstMs ?? now };
      if (event.name !== "image_generation.completed") {
        update({ ...common, numPartial: output.numPartial + 1 });
        continue;
      }
      const tokens = drawn.usage?.output_tokens ?? null;
      const told = { receipt: drawn.serving ?? null, warnings: drawn.warnings ?? [] };
      update({ ...common, ...told, phase: "done", totalMs: now, tokens });
      return;
    }
    throw new ApiError(0, "The stream broke off before its end.");
  } catch (error) {
    const isStopped = error instanceof DOMException && error.name === "AbortError";
    update(isStopped ? { phase: "stopped" } : { phase: "failed", error });
  }
}

function parse(event: ServerEvent): ImageEvent {
  if (event.data.startsWith('{"error"')) throw errorOf(event.data, 500, null);
  return JSON.parse(event.data) as ImageEvent;
}

const FORMATS = ["png", "jpeg", "webp"];

/** Only as an image: the page shows it by `img`, which runs nothing that a file may contain. */
async function imageUrl({ b64_json: text, output_format: format }: ImageEvent): Promise<string> {
  if (!FORMATS.includes(format)) throw new ApiError(0, `The image has the unknown format ${format}.`);
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: `image/${format}` }));
}

const OWN = ["model", "prompt", "size"];
const withoutStream = ({ partial_images: _, ...body }: Body): Body => body;

export const asCurl = (body: Body): string =>
  `${curl(PATH, withoutStream(body))} \\\n  | jq -r '.data[0].b64_json' | base64 -d > image.png`;

export const asPython = (body: Body): string =>
  [
    ...pythonHead("base64", "pathlib"),
    ...pythonCall("drawn", "images.generate", withoutStream(body), OWN),
    'pathlib.Path("image.png").write_bytes(base64.b64decode(drawn.data[0].b64_json))',
  ].join("\n");
