// Runs the case that the command line names: node FILE CASE URL.
import assert from "node:assert/strict";

export const QUESTION = "What is the capital of Italy?";
export const ANSWER_OF_SHOUT = "HEY! The capital of Italy is Rome!!!";
export const url = process.argv[3];

export async function runCase(cases) {
  const name = process.argv[2];
  assert.ok(Object.hasOwn(cases, name), `no case ${name}`);
  await cases[name]();
  console.log(`passed ${name}`);
}
