/** What the server can generate with: its bases and adapters, for text and for images. */

import { get } from "../api";
import type { Part } from "./columns";

interface ModelEntry {
  id: string;
  parent?: string | null;
  modality?: string;
  weight?: number;
  trigger_words?: string[];
}

export interface ModelSet {
  /** null: the server has no base of this kind. */
  base: string | null;
  adapters: readonly ModelEntry[];
}

export interface Models {
  text: ModelSet;
  images: ModelSet;
}

export async function readModels(signal: AbortSignal): Promise<Models> {
  const { data } = await get<{ data: ModelEntry[] }>("/v1/models", signal);
  const isImage = (one: ModelEntry): boolean => one.modality === "image";
  return { text: setOf(data.filter((one) => !isImage(one))), images: setOf(data.filter(isImage)) };
}

function setOf(entries: readonly ModelEntry[]): ModelSet {
  const isBase = (one: ModelEntry): boolean => (one.parent ?? null) === null;
  const base = entries.find(isBase)?.id ?? entries[0]?.parent ?? null;
  return { base, adapters: entries.filter((one) => !isBase(one)) };
}

export const MAX_WEIGHT = 1.5;

/** An adapter with the weight that it is served with. */
export function partOf(adapter: ModelEntry): Part {
  const weight = adapter.weight ?? 1;
  return { name: adapter.id, weight: Math.min(MAX_WEIGHT, Math.max(0, weight)) };
}
