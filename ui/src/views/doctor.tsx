/** The doctor's report on an adapter; its files are read for it. */

import { useState } from "preact/hooks";
import { get, inPath } from "../api";
import { bytes } from "../format";
import { Failure, Loading } from "../parts/basics";
import { useLoaded } from "../parts/load";

interface Module {
  path: string;
  rank: number;
  alpha: number;
  scale: number;
  dtype: string;
  projection: string;
  layer: number;
  effect: number | null;
}

interface Refusal {
  code: string;
  reason: string;
  fix: string;
}

interface Report {
  refusal: Refusal | null;
  size_bytes: number | null;
  modules: Module[];
  parts: { kind: string; module: string; layer: number; num_rows: number; width: number }[];
  fields: { name: string; value: unknown; status: string; note: string }[];
  tensors_used: number;
  tensors_unused: string[];
  warnings: string[];
}

/** On an adapter of an image model; only a refused one has a refusal, and that alone. */
interface ImageReport {
  refusal?: Refusal | null;
  formats?: string[];
  method?: string;
  /** By component of the pipeline. */
  components?: Record<string, number>;
  /** Rank: number of modules. */
  ranks?: Record<string, number>;
  size_bytes?: number;
  device_bytes?: number;
  trigger_words?: string[];
}

export function Doctor({ name }: { name: string }) {
  const [isWanted, setWanted] = useState(false);
  const report = useLoaded(
    isWanted ? (signal) => get<Report | ImageReport>(`/v1/doctor/${inPath(name)}`, signal) : null,
    [name, isWanted],
  );
  return (
    <div class="card">
      <div class="toolbar">
        <h2>Doctor</h2>
        <span class="spacer" />
        {!isWanted && (
          <button type="button" onClick={() => setWanted(true)}>
            Examine the files
          </button>
        )}
      </div>
      {isWanted && report.isLoading && <Loading what="the report" />}
      {report.error !== null && <Failure error={report.error} retry={report.reload} />}
      {report.value !== null && (
        <>
          <Verdict refusal={report.value.refusal ?? null} />
          {"modules" in report.value ? <Findings report={report.value} /> : <ImageFindings report={report.value} />}
        </>
      )}
    </div>
  );
}

function Verdict({ refusal }: { refusal: Refusal | null }) {
  if (refusal === null) return <p class="good">This adapter can be served.</p>;
  return (
    <div class="failure">
      <strong>Refused: {refusal.code}</strong>
      <p>{refusal.reason}</p>
      <p>{refusal.fix}</p>
    </div>
  );
}

const sizeOf = (size: number | undefined): string => (size === undefined ? "–" : bytes(size));

function ImageFindings({ report }: { report: ImageReport }) {
  const counts = (of: Record<string, number> = {}): string =>
    Object.entries(of)
      .map(([name, number]) => `${name} (${number})`)
      .join(", ") || "–";
  const facts: [string, string][] = [
    ["Method", report.method ?? "–"],
    ["Names of modules", (report.formats ?? []).join(", ") || "–"],
    ["Modules", counts(report.components)],
    ["Ranks", counts(report.ranks)],
    ["Size of the file", sizeOf(report.size_bytes)],
    ["On the device", sizeOf(report.device_bytes)],
    ["Trigger words", (report.trigger_words ?? []).join(", ") || "none"],
  ];
  if (report.refusal) return null;
  return (
    <dl class="facts wide">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function Findings({ report }: { report: Report }) {
  return (
    <>
      {report.warnings.map((warning) => (
        <p key={warning} class="note">
          {warning}
        </p>
      ))}
      <p class="line">
        {report.size_bytes !== null && `${bytes(report.size_bytes)}, `}
        {report.tensors_used} tensors used
        {report.tensors_unused.length > 0 && `, ${report.tensors_unused.length} unused: ${report.tensors_unused.slice(0, 8).join(", ")}`}
      </p>
      {report.modules.length > 0 && <Modules modules={report.modules} />}
      {report.parts.length > 0 && (
        <p class="line">
          Beside low rank: {[...new Set(report.parts.map((part) => `${part.kind} on ${part.module}`))].join(", ")}
        </p>
      )}
      <details>
        <summary>{report.fields.length} fields of the configuration</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Fields">
          <table class="plain-table">
            <tbody>
              {report.fields.map((field) => (
                <tr key={field.name}>
                  <th scope="row">{field.name}</th>
                  <td>
                    <code>{JSON.stringify(field.value)}</code>
                  </td>
                  <td>{field.status}</td>
                  <td class="muted">{field.note}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </>
  );
}

/** A row for all layers in which a projection has the same rank and scale. */
function Modules({ modules }: { modules: readonly Module[] }) {
  const groups = new Map<string, { first: Module; layers: number; effect: number }>();
  for (const one of modules) {
    const key = [one.projection || one.path, one.rank, one.alpha, one.scale, one.dtype].join("|");
    const found = groups.get(key) ?? { first: one, layers: 0, effect: 0 };
    groups.set(key, {
      first: found.first,
      layers: found.layers + 1,
      effect: Math.max(found.effect, one.effect ?? 0),
    });
  }
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Modules">
      <table class="plain-table">
        <thead>
          <tr>
            <th>Projection</th>
            <th>Layers</th>
            <th>Rank</th>
            <th>Alpha</th>
            <th>Scale</th>
            <th>Type</th>
            <th>Largest |ΔW|</th>
          </tr>
        </thead>
        <tbody>
          {[...groups.values()].map(({ first, layers, effect }) => (
            <tr key={`${first.path}${first.rank}`}>
              <td>{first.projection || first.path}</td>
              <td>{layers}</td>
              <td>{first.rank}</td>
              <td>{first.alpha}</td>
              <td>{Number(first.scale.toPrecision(4))}</td>
              <td>{first.dtype}</td>
              <td>{effect.toPrecision(3)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
