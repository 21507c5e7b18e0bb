/** The table of all adapters. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { CallerReport } from "../api";
import { age, bytes, count, shortCid } from "../format";
import { Empty, Failure, Loading, StateChip, TierChip } from "../parts/basics";
import { useLoaded } from "../parts/load";
import { sorted, Table, type Column, type Order } from "../parts/table";
import { goTo } from "../router";
import { Store, useStore } from "../store";
import { listAdapters, matches, MAX_LISTED, tierRank, type Adapter } from "./adapter_data";
import { PushDialog } from "./push";

const REFRESH_MS = 15_000;
const search = new Store("");
const order = new Store<Order | null>(null);

const COLUMNS: readonly Column<Adapter>[] = [
  {
    id: "name",
    title: "Name",
    width: "minmax(9rem, 3fr)",
    key: (one) => one.id,
    cell: (one) => <Names adapter={one} />,
  },
  {
    id: "tier",
    title: "Tier",
    width: "minmax(6rem, 9rem)",
    key: (one) => tierRank(one.tier),
    cell: (one) => <TierChip tier={one.tier} pinned={one.pinned} />,
  },
  { id: "rank", title: "Rank", width: "4rem", isNumber: true, isMinor: true, key: (one) => one.rank, cell: (one) => one.rank || "–" },
  { id: "bytes", title: "Size", width: "5.5rem", isNumber: true, isMinor: true, key: (one) => one.bytes, cell: (one) => bytes(one.bytes) },
  { id: "hits", title: "Hits", width: "5rem", isNumber: true, isMinor: true, key: (one) => one.hits, cell: (one) => count(one.hits) },
  {
    id: "requests",
    title: "Requests",
    width: "6rem",
    isNumber: true,
    isMinor: true,
    key: (one) => one.requests,
    cell: (one) => count(one.requests),
  },
  {
    id: "last",
    title: "Last use",
    width: "7rem",
    isMinor: true,
    isNumber: true,
    key: (one) => one.last_use ?? 0,
    cell: (one) => age(one.last_use),
  },
  { id: "state", title: "State", width: "6.5rem", isMinor: true, key: (one) => one.state, cell: (one) => <StateChip state={one.state} /> },
  {
    id: "cid",
    title: "CID",
    width: "8.5rem",
    isMinor: true,
    key: (one) => one.cid ?? "",
    cell: (one) => <code title={one.cid ?? ""}>{one.cid === null ? "–" : shortCid(one.cid)}</code>,
  },
];

function Names({ adapter }: { adapter: Adapter }) {
  const more = adapter.names.length - 1;
  return (
    <span class="names" title={[...adapter.names, ...(adapter.aliases ?? [])].join("\n")}>
      <b>{adapter.names[0] ?? (adapter.cid === null ? adapter.id : shortCid(adapter.cid))}</b>
      {adapter.modality === "image" && <span class="alias">image</span>}
      {more > 0 && <span class="muted"> +{more}</span>}
      {(adapter.aliases ?? []).map((alias) => (
        <span key={alias} class="alias">
          {alias.slice(alias.lastIndexOf("@"))}
        </span>
      ))}
    </span>
  );
}

export function Adapters({ caller }: { caller: CallerReport }) {
  const text = useStore(search);
  const sorting = useStore(order);
  const [asked, setAsked] = useState("");
  const [isPushing, setPushing] = useState(false);
  const listed = useLoaded((signal) => listAdapters(asked, signal), [asked]);
  const list = listed.value;
  const isPartial = list !== null && (asked !== "" || list.total > list.data.length);
  useEffect(() => {
    // The page filters by itself what it has as a whole.
    if (!isPartial && asked === "") return;
    const timer = setTimeout(() => setAsked(text.trim()), 200);
    return () => clearTimeout(timer);
  }, [text, isPartial]);
  useEffect(() => {
    const timer = setInterval(() => document.visibilityState === "visible" && listed.reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [listed.reload]);
  const wanted = text.trim().toLowerCase();
  const rows = useMemo(() => {
    const data = list?.data ?? [];
    return sorted(wanted === "" ? data : data.filter((one) => matches(one, wanted)), COLUMNS, sorting);
  }, [list, wanted, sorting]);
  const isAdmin = caller.scopes.includes("admin");

  return (
    <section class="fill">
      <div class="toolbar">
        <h1>Adapters</h1>
        <input
          type="search"
          aria-label="Search adapters"
          placeholder="Search names, aliases, CIDs"
          value={text}
          onInput={(event) => search.set(event.currentTarget.value)}
        />
        <span class="muted" role="status">
          {list === null ? "" : `${count(rows.length)} of ${count(list.total)}`}
          {list !== null && list.total > list.data.length && `; the first ${count(MAX_LISTED)} are loaded, search for others`}
        </span>
        <span class="spacer" />
        {isAdmin && caller.has_registry && (
          <button type="button" class="primary" onClick={() => setPushing(true)}>
            Push an adapter
          </button>
        )}
      </div>
      {list?.missing !== undefined && (
        <p class="note" role="status">
          The registry is away: only adapters that the engine knows are listed. {list.missing}
        </p>
      )}
      {listed.error !== null && <Failure error={listed.error} retry={listed.reload} />}
      {list === null && listed.error === null && <Loading what="adapters" />}
      {list !== null && rows.length === 0 && (
        <Empty title={list.data.length === 0 && wanted === "" ? "No adapters yet" : "No adapter matches"}>
          {list.data.length === 0 && wanted === ""
            ? "Start the server with --lora-modules, or push one into its registry."
            : "Try a part of a name, an alias or a CID."}
        </Empty>
      )}
      {rows.length > 0 && (
        <Table
          label="Adapters"
          rows={rows}
          columns={COLUMNS}
          rowKey={(one) => one.cid ?? one.id}
          order={sorting}
          onOrder={(next) => order.set(next)}
          onOpen={(one) => goTo("adapters", one.names[0] ?? one.cid ?? one.id)}
        />
      )}
      {isPushing && (
        <PushDialog
          caller={caller}
          onClose={(pushed) => {
            setPushing(false);
            if (pushed !== null) goTo("adapters", pushed);
          }}
        />
      )}
    </section>
  );
}
