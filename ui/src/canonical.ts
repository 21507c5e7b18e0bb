/** Canonical JSON (RFC 8785): JavaScript's own numbers and strings, and names in UTF-16 order. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export function canonical(value: Json): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value !== null && typeof value === "object") {
    const names = Object.keys(value).sort(byCodeUnits);
    return `{${names.map((name) => `${JSON.stringify(name)}:${canonical(value[name] as Json)}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

const byCodeUnits = (a: string, b: string): number => (a < b ? -1 : a > b ? 1 : 0);
