/** The page of one adapter. */

import { useState } from "preact/hooks";
import { send, inPath, type CallerReport } from "../api";
import { age, bytes, count, shortCid } from "../format";
import { connection, history } from "../live";
import { Copied, Empty, Failure, Loading, StateChip, TierChip } from "../parts/basics";
import { LineChart } from "../parts/charts";
import { useLoaded } from "../parts/load";
import { link } from "../router";
import { useStore } from "../store";
import { findAdapter, readRegistry, registryName, type Adapter } from "./adapter_data";
import { Doctor } from "./doctor";
import { ReceiptRows } from "./receipt_rows";
import { Versions } from "./versions";

interface AdapterPageProps {
  caller: CallerReport;
  id: string;
}

export function AdapterPage({ caller, id }: AdapterPageProps) {
  const found = useLoaded((signal) => findAdapter(id, signal), [id]);
  const adapter = found.value;
  const registered = adapter?.names.map(registryName).find((name) => name !== null) ?? null;
  const registry = useLoaded(
    registered === null ? null : (signal) => readRegistry(registered, signal),
    [registered],
  );
  const isAdmin = caller.scopes.includes("admin");
  if (found.error !== null && adapter === null) return <Failure error={found.error} retry={found.reload} />;
  if (adapter === null) {
    return found.isLoading ? (
      <Loading what={id} />
    ) : (
      <Empty title={`There is no adapter ${id}`}>
        <a href={link("adapters")}>All adapters</a>
      </Empty>
    );
  }
  const reload = () => {
    found.reload();
    registry.reload();
  };
  return (
    <section class="adapter-page">
      <p class="crumbs">
        <a href={link("adapters")}>Adapters</a> <span aria-hidden="true">/</span>
      </p>
      <div class="toolbar">
        <h1>{adapter.names[0] ?? shortCid(adapter.cid ?? adapter.id)}</h1>
        <TierChip tier={adapter.tier} pinned={adapter.pinned} />
        <StateChip state={adapter.state} />
        {adapter.modality === "image" && <span class="alias">image</span>}
        <span class="spacer" />
        {isAdmin && adapter.names[0] !== undefined && <Residency adapter={adapter} onDone={reload} />}
      </div>
      {adapter.failure !== null && (
        <div class="failure">
          <strong>Refused: {adapter.failure.code}</strong>
          <p>{adapter.failure.message}</p>
          <p>{adapter.failure.fix}</p>
        </div>
      )}
      <Facts adapter={adapter} />
      {registry.error !== null && <Failure error={registry.error} retry={registry.reload} />}
      {registry.value !== null && (
        <Versions caller={caller} entry={registry.value} isAdmin={isAdmin} onChange={reload} />
      )}
      {adapter.recipe !== undefined && <Recipe recipe={adapter.recipe} />}
      <Traffic name={adapter.names[0] ?? adapter.cid ?? ""} />
      {isAdmin && caller.is_operator && adapter.recipe === undefined && (
        <Doctor name={adapter.names[0] ?? adapter.cid ?? ""} />
      )}
      {caller.has_registry && adapter.cid !== null && <ReceiptRows caller={caller} cid={adapter.cid} />}
    </section>
  );
}

function Facts({ adapter }: { adapter: Adapter }) {
  const facts: [string, string][] = [
    ["Rank", adapter.rank === 0 ? "–" : String(adapter.rank)],
    ["Size", bytes(adapter.bytes)],
    ["Requests", count(adapter.requests)],
    ["Tokens in / out", `${count(adapter.prompt_tokens)} / ${count(adapter.generation_tokens)}`],
    ["Found on the device", `${count(adapter.hits)} of ${count(adapter.hits + adapter.misses)}`],
    ["Last use", age(adapter.last_use)],
    ["Running / waiting", `${adapter.running} / ${adapter.waiting}`],
    ["Cached tokens", count(adapter.cached_tokens)],
  ];
  if (adapter.signed_by !== undefined) facts.push(["Signed by", adapter.signed_by]);
  return (
    <div class="card">
      <dl class="facts wide">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {adapter.cid !== null && (
        <p class="line">
          <span class="muted">CID</span> <code class="long">{adapter.cid}</code> <Copied text={adapter.cid} />
        </p>
      )}
      {adapter.names.length + (adapter.aliases ?? []).length > 1 && (
        <p class="line">
          <span class="muted">Names</span> {[...adapter.names, ...(adapter.aliases ?? [])].join(", ")}
        </p>
      )}
      {adapter.path !== null && (
        <p class="line">
          <span class="muted">Files</span> <code class="long">{adapter.path}</code>
        </p>
      )}
    </div>
  );
}

/** Pin and warm: they change no name, and can be undone. */
function Residency({ adapter, onDone }: { adapter: Adapter; onDone: () => void }) {
  const [error, setError] = useState<unknown>(null);
  const [what, setWhat] = useState("");
  const path = `/v1/adapters/${inPath(adapter.names[0] as string)}`;
  async function call(name: string, method: string, way: string) {
    setWhat(name);
    setError(null);
    try {
      await send(method, `${path}/${way}`);
      onDone();
    } catch (failed) {
      setError(failed);
    }
    setWhat("");
  }
  return (
    <>
      <button type="button" disabled={what !== ""} onClick={() => void call("warm", "POST", "warm")}>
        {what === "warm" ? "Warming…" : "Warm"}
      </button>
      <button
        type="button"
        disabled={what !== ""}
        onClick={() => void call("pin", adapter.pinned ? "DELETE" : "POST", "pin")}
      >
        {adapter.pinned ? "Unpin" : "Pin"}
      </button>
      {error !== null && <Failure error={error} />}
    </>
  );
}

function Recipe({ recipe }: { recipe: { [name: string]: unknown } }) {
  const parts = (recipe.parts ?? []) as { cid: string; weight: number; name?: string }[];
  const rest = Object.entries(recipe).filter(([name]) => name !== "parts");
  return (
    <div class="card">
      <h2>Recipe</h2>
      <ul class="plain">
        {parts.map((part) => (
          <li key={part.cid}>
            <b>{part.weight}</b> × <a href={link("adapters", part.name ?? part.cid)}>{part.name ?? shortCid(part.cid)}</a>
          </li>
        ))}
      </ul>
      <dl class="facts wide">
        {rest.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{typeof value === "object" ? JSON.stringify(value) : String(value)}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

/** Tokens a second of this adapter, by the live view's history. */
function Traffic({ name }: { name: string }) {
  const samples = useStore(history);
  const isForbidden = useStore(connection) === "forbidden";
  const values = samples.map((sample, index) => {
    const now = sample.traffic[name];
    const before = samples[index - 1];
    const then = before?.traffic[name];
    if (now === undefined || before === undefined || then === undefined) return null;
    return Math.max(0, now - then) / Math.max(0.1, sample.time - before.time);
  });
  const hasTraffic = values.some((value) => value !== null);
  return (
    <div class="card">
      {hasTraffic ? (
        <LineChart
          title="Traffic"
          unit="tokens/s"
          times={samples.map((sample) => sample.time)}
          series={[{ name: "generated", colour: "c1", values }]}
          format={(value) => value.toFixed(value < 10 ? 1 : 0)}
        />
      ) : (
        <>
          <h2>Traffic</h2>
          <p class="muted">
            {isForbidden
              ? "This key may not follow the engine: that needs the scope metrics or admin, and no tenant."
              : "No tokens since this page was opened."}
          </p>
        </>
      )}
    </div>
  );
}
