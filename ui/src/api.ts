/** Calls of the server's API. The key is kept for this tab alone and sent in a header. */

import { Store } from "./store";
import { readEvents, type ServerEvent } from "./sse";

const KEY = "loramux.key";

export interface CallerReport {
  tenant: string;
  key_id: string | null;
  scopes: string[];
  adapters: string[] | null;
  may_use_base: boolean;
  is_operator: boolean;
  base: string;
  version: string;
  has_registry: boolean;
  allows_folders: boolean;
  signs_receipts: boolean;
}

/** 0: the server was not reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly reason: string | null = null,
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }
}

/** True after an answer with 401: the page then asks for a key. */
export const needsKey = new Store(false);
export const hasKey = (): boolean => sessionStorage.getItem(KEY) !== null;

/** Starts the page again, so that nothing of another key remains. */
export function changeKey(key: string | null): void {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
  location.reload();
}

export interface Call {
  method?: string;
  body?: unknown;
  signal?: AbortSignal;
  accept?: string;
}

export function address(path: string): string {
  return new URL(`..${path}`, document.baseURI).href;
}

export const inPath = (name: string): string => name.split("/").map(encodeURIComponent).join("/");

export async function open(path: string, call: Call = {}): Promise<Response> {
  const headers = new Headers({ accept: call.accept ?? "application/json" });
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  if (call.body !== undefined) headers.set("content-type", "application/json");
  let response: Response;
  try {
    response = await fetch(address(path), {
      method: call.method ?? "GET",
      headers,
      body: call.body === undefined ? null : JSON.stringify(call.body),
      signal: call.signal ?? null,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const failure = await failureOf(response);
  if (failure.status === 401) needsKey.set(true);
  throw failure;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await open(path, signal === undefined ? {} : { signal });
  return (await response.json()) as T;
}

export async function send<T>(method: string, path: string, body?: unknown): Promise<T> {
  const response = await open(path, body === undefined ? { method } : { method, body });
  return (await response.json()) as T;
}

/** The events of a streamed answer, with the answer itself. */
export async function stream(
  path: string,
  call: Call,
): Promise<[Response, AsyncGenerator<ServerEvent>]> {
  const response = await open(path, { ...call, accept: "text/event-stream" });
  if (response.body === null) throw new ApiError(response.status, "The answer has no body.");
  return [response, readEvents(response.body)];
}

async function failureOf(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  const wait = Number(response.headers.get("retry-after"));
  return errorOf(text, response.status, Number.isFinite(wait) && wait > 0 ? wait : null);
}

export function errorOf(text: string, status: number, retryAfterS: number | null): ApiError {
  try {
    const { error } = JSON.parse(text) as {
      error: { message: string; code?: number; reason?: string };
    };
    const code = typeof error.code === "number" ? error.code : status;
    return new ApiError(code, error.message, error.reason ?? null, retryAfterS);
  } catch {
    return new ApiError(status, `The server answered with status ${status}.`, null, retryAfterS);
  }
}
