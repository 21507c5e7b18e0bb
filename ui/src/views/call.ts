/** A call of the API as text: for curl, and for OpenAI's Python client. */

import { address, hasKey } from "../api";
import type { Json } from "../canonical";

export type Receipt = { [name: string]: Json };
export type Body = { [name: string]: Json };

/** Words of the client's functions; other fields are sent as `extra_body`. */
export function pythonCall(target: string, call: string, body: Body, own: readonly string[]): string[] {
  const fields = Object.entries(body);
  const lines = fields.filter(([name]) => own.includes(name)).map(([name, value]) => `    ${name}=${python(value)},`);
  const extra = fields.filter(([name]) => !own.includes(name));
  if (extra.length > 0) {
    const items = extra.map(([name, value]) => `        ${JSON.stringify(name)}: ${python(value)},`);
    lines.push("    extra_body={", ...items, "    },");
  }
  return [`${target} = client.${call}(`, ...lines, ")"];
}

export function pythonHead(...modules: string[]): string[] {
  const used = [...modules, ...(hasKey() ? ["os"] : [])].sort();
  const key = hasKey() ? 'os.environ["LORAMUX_API_KEY"]' : '"none"';
  return [
    ...used.map((name) => `import ${name}`),
    ...(used.length > 0 ? [""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address("/v1"))}, api_key=${key})`,
  ];
}

export function curl(path: string, body: Body, flags = ""): string {
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $LORAMUX_API_KEY"' : "";
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${flags}${address(path)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'`;
}

export function python(value: Json): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    const fields = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one as Json)}`);
    return `{${fields.join(", ")}}`;
  }
  return JSON.stringify(value);
}
