/** Adapters as the API lists them. */

import { ApiError, get, inPath } from "../api";
import type { Json } from "../canonical";

export interface Adapter {
  id: string;
  names: string[];
  aliases?: string[];
  state: "registered" | "ready" | "failed" | "stored";
  failure: { code: string; message: string; fix: string } | null;
  cid: string | null;
  path: string | null;
  rank: number;
  bytes: number;
  tier: string;
  pinned: boolean;
  hits: number;
  misses: number;
  last_use: number | null;
  running: number;
  waiting: number;
  cached_tokens: number;
  requests: number;
  prompt_tokens: number;
  generation_tokens: number;
  recipe?: { [name: string]: Json };
  signed_by?: string;
  /** image; absent for text */
  modality?: string;
}

export interface AdapterList {
  data: Adapter[];
  total: number;
  /** Why the versions of the registry are missing. */
  missing?: string;
}

export interface Version {
  version: string;
  cid: string;
  bytes: number;
  base_model: string | null;
  created: number;
  recipe?: { [name: string]: Json };
  signed_by?: string;
  pushed_by?: string;
}

export interface Alias {
  alias: string;
  revision: number;
  action: string;
  targets: Record<string, number>;
  created: number;
}

export interface RegistryEntry {
  id: string;
  latest: string | null;
  versions: Version[];
  aliases: Alias[];
}

/** Above this number the server searches, below it the page. */
export const MAX_LISTED = 5000;

/** Without the versions of the registry if that is away: the engine's adapters are still there. */
export async function listAdapters(search: string, signal: AbortSignal): Promise<AdapterList> {
  const query = new URLSearchParams({ limit: String(MAX_LISTED) });
  if (search !== "") query.set("search", search);
  try {
    return await get<AdapterList>(`/v1/adapters?stored=1&${query}`, signal);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 503) throw error;
    const found = await get<AdapterList>(`/v1/adapters?${query}`, signal);
    return { ...found, missing: error.message };
  }
}

export async function findAdapter(id: string, signal: AbortSignal): Promise<Adapter | null> {
  const { data } = await listAdapters(id, signal);
  return (
    data.find((one) => one.id === id || one.cid === id || one.names.includes(id)) ?? null
  );
}

/** tenant/name of tenant/name@version; null for a name that is not the registry's. */
export function registryName(name: string): string | null {
  const cut = name.lastIndexOf("@");
  return cut > 0 && name.slice(0, cut).includes("/") ? name.slice(0, cut) : null;
}

export const readRegistry = (name: string, signal: AbortSignal): Promise<RegistryEntry> =>
  get<RegistryEntry>(`/v1/adapters/${inPath(name)}`, signal);

const TIERS = ["device", "loading", "host", "disk", "source"];
export const tierRank = (tier: string): number => TIERS.indexOf(tier);

export function matches(adapter: Adapter, text: string): boolean {
  return (
    adapter.names.some((name) => name.toLowerCase().includes(text)) ||
    (adapter.aliases ?? []).some((alias) => alias.toLowerCase().includes(text)) ||
    (adapter.cid ?? "").includes(text)
  );
}
