/** Versions and aliases of an adapter of the registry, and the changes of them. */

import { useState } from "preact/hooks";
import { inPath, send, type CallerReport } from "../api";
import { bytes, moment, shortCid } from "../format";
import { Field } from "../parts/basics";
import { Action } from "../parts/dialog";
import { goTo, link } from "../router";
import type { Alias, RegistryEntry } from "./adapter_data";
import { PushDialog } from "./push";

type Opened =
  | { kind: "push" }
  | { kind: "promote"; version: string }
  | { kind: "split" }
  | { kind: "rollback"; alias: Alias }
  | { kind: "delete"; reference: string };

interface VersionsProps {
  caller: CallerReport;
  entry: RegistryEntry;
  isAdmin: boolean;
  onChange: () => void;
}

export function Versions({ caller, entry, isAdmin, onChange }: VersionsProps) {
  const [opened, setOpened] = useState<Opened | null>(null);
  const close = (done: boolean) => {
    setOpened(null);
    if (done) onChange();
  };
  return (
    <div class="card">
      <div class="toolbar">
        <h2>Versions of {entry.id}</h2>
        <span class="spacer" />
        {isAdmin && (
          <>
            <button type="button" onClick={() => setOpened({ kind: "push" })}>
              Push a version
            </button>
            {entry.versions.length > 1 && (
              <button type="button" onClick={() => setOpened({ kind: "split" })}>
                Split
              </button>
            )}
            <button type="button" class="danger" onClick={() => setOpened({ kind: "delete", reference: entry.id })}>
              Delete all
            </button>
          </>
        )}
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Versions">
        <table class="plain-table">
          <thead>
            <tr>
              <th>Version</th>
              <th>Aliases</th>
              <th>Size</th>
              <th>Pushed</th>
              <th>CID</th>
              {isAdmin && <th>Change</th>}
            </tr>
          </thead>
          <tbody>
            {entry.versions.map((one) => (
              <tr key={one.version}>
                <td>
                  <a href={link("adapters", `${entry.id}@${one.version}`)}>{one.version}</a>
                </td>
                <td>{aliasText(entry.aliases, one.version)}</td>
                <td>{one.recipe === undefined ? bytes(one.bytes) : "recipe"}</td>
                <td>{moment(one.created)}</td>
                <td>
                  <code title={one.cid}>{shortCid(one.cid)}</code>
                </td>
                {isAdmin && (
                  <td class="buttons">
                    <button type="button" class="small" onClick={() => setOpened({ kind: "promote", version: one.version })}>
                      Promote
                    </button>
                    <button
                      type="button"
                      class="small danger"
                      onClick={() => setOpened({ kind: "delete", reference: `${entry.id}@${one.version}` })}
                    >
                      Delete
                    </button>
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {entry.aliases.length > 0 && (
        <ul class="plain aliases">
          {entry.aliases.map((alias) => (
            <li key={alias.alias}>
              <span class="alias">@{alias.alias}</span> {targetText(alias)}{" "}
              <span class="muted">
                {alias.action}, revision {alias.revision}, {moment(alias.created)}
              </span>
              {isAdmin && (
                <>
                  {alias.revision > 1 && (
                    <button type="button" class="small" onClick={() => setOpened({ kind: "rollback", alias })}>
                      Roll back
                    </button>
                  )}
                  <button
                    type="button"
                    class="small danger"
                    onClick={() => setOpened({ kind: "delete", reference: `${entry.id}@${alias.alias}` })}
                  >
                    Delete
                  </button>
                </>
              )}
            </li>
          ))}
        </ul>
      )}
      {opened?.kind === "push" && (
        <PushDialog
          caller={caller}
          reference={entry.id}
          onClose={(pushed) => {
            close(pushed !== null);
          }}
        />
      )}
      {opened?.kind === "promote" && <Promote entry={entry} version={opened.version} onClose={close} />}
      {opened?.kind === "split" && <Split entry={entry} onClose={close} />}
      {opened?.kind === "rollback" && <Rollback entry={entry} alias={opened.alias} onClose={close} />}
      {opened?.kind === "delete" && <Delete entry={entry} reference={opened.reference} onClose={close} />}
    </div>
  );
}

const aliasText = (aliases: readonly Alias[], version: string): string =>
  aliases
    .filter((alias) => version in alias.targets)
    .map((alias) => `@${alias.alias}`)
    .join(" ") || "–";

function targetText(alias: Alias): string {
  const targets = Object.entries(alias.targets);
  const total = targets.reduce((sum, [, weight]) => sum + weight, 0);
  if (targets.length === 1) return targets[0]?.[0] ?? "";
  return targets.map(([version, weight]) => `${version} ${Math.round((100 * weight) / total)} %`).join(", ");
}

interface ChangeProps {
  entry: RegistryEntry;
  onClose: (done: boolean) => void;
}

/** The revision that the page shows: the server refuses if the alias was moved meanwhile. */
const revisionOf = (entry: RegistryEntry, alias: string): number | null =>
  entry.aliases.find((one) => one.alias === alias)?.revision ?? null;

function Promote({ entry, version, onClose }: ChangeProps & { version: string }) {
  const [alias, setAlias] = useState("prod");
  const [warm, setWarm] = useState(false);
  const run = () =>
    send("POST", `/v1/adapters/${inPath(entry.id)}/promote`, {
      version,
      alias,
      warm,
      if_revision: revisionOf(entry, alias),
    });
  return (
    <Action title={`Promote ${entry.id}@${version}`} verb="Promote" run={run} onClose={onClose}>
      <AliasField entry={entry} alias={alias} setAlias={setAlias} />
      <WarmField warm={warm} setWarm={setWarm} />
    </Action>
  );
}

function Split({ entry, onClose }: ChangeProps) {
  const [alias, setAlias] = useState("prod");
  const [warm, setWarm] = useState(false);
  const [weights, setWeights] = useState<Record<string, string>>({});
  const run = () => {
    const given = Object.entries(weights)
      .map(([version, weight]) => [version, Number(weight)] as const)
      .filter(([, weight]) => weight > 0);
    return send("POST", `/v1/adapters/${inPath(entry.id)}/split`, {
      weights: Object.fromEntries(given),
      alias,
      warm,
      if_revision: revisionOf(entry, alias),
    });
  };
  return (
    <Action title={`Split ${entry.id} between versions`} verb="Split" run={run} onClose={onClose}>
      <AliasField entry={entry} alias={alias} setAlias={setAlias} />
      <div class="split">
        {entry.versions.map(({ version }) => (
          <Field key={version} label={version} hint="share">
            <input
              type="number"
              min={0}
              step={1}
              value={weights[version] ?? ""}
              placeholder="0"
              onInput={(event) => setWeights({ ...weights, [version]: event.currentTarget.value })}
            />
          </Field>
        ))}
      </div>
      <WarmField warm={warm} setWarm={setWarm} />
    </Action>
  );
}

function Rollback({ entry, alias, onClose }: ChangeProps & { alias: Alias }) {
  const [warm, setWarm] = useState(false);
  const run = () =>
    send("POST", `/v1/adapters/${inPath(entry.id)}/rollback`, {
      alias: alias.alias,
      warm,
      if_revision: alias.revision,
    });
  return (
    <Action title={`Roll back ${entry.id}@${alias.alias}`} verb="Roll back" run={run} onClose={onClose}>
      <p>The alias moves back to what it was before {targetText(alias)}. Running requests finish on it.</p>
      <WarmField warm={warm} setWarm={setWarm} />
    </Action>
  );
}

function Delete({ entry, reference, onClose }: ChangeProps & { reference: string }) {
  const isAll = reference === entry.id;
  const run = () => send("DELETE", `/v1/adapters/${inPath(reference)}`);
  return (
    <Action
      title={`Delete ${reference}`}
      verb="Delete"
      confirmation={reference}
      run={run}
      onClose={(done) => {
        onClose(done);
        if (done && isAll) goTo("adapters");
      }}
    >
      <p>{isAll ? "All versions and aliases are removed." : "Requests that name it will fail."}</p>
    </Action>
  );
}

function AliasField({ entry, alias, setAlias }: {
  entry: RegistryEntry;
  alias: string;
  setAlias: (alias: string) => void;
}) {
  const now = entry.aliases.find((one) => one.alias === alias);
  return (
    <Field label="Alias" hint={now === undefined ? "new" : `now ${targetText(now)}`}>
      <input value={alias} required onInput={(event) => setAlias(event.currentTarget.value.trim())} />
    </Field>
  );
}

function WarmField({ warm, setWarm }: { warm: boolean; setWarm: (warm: boolean) => void }) {
  return (
    <label class="check">
      <input type="checkbox" checked={warm} onChange={(event) => setWarm(event.currentTarget.checked)} />
      Load it first, so that no request waits for it
    </label>
  );
}
