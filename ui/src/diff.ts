/** Word differences of two texts, by their longest common subsequence. */

export interface Piece {
  kind: "same" | "added" | "removed";
  text: string;
}

/** Longer texts are compared up to here: the table has the square of it. */
const MAX_WORDS = 1500;

export function diffWords(before: string, after: string): Piece[] {
  const a = words(before);
  const b = words(after);
  const width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] =
        a[i] === b[j]
          ? at(table, (i + 1) * width + j + 1) + 1
          : Math.max(at(table, (i + 1) * width + j), at(table, i * width + j + 1));
    }
  }
  const pieces: Piece[] = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(pieces, "same", b[j++] as string);
      i++;
    } else if (
      i < a.length &&
      (j === b.length || at(table, (i + 1) * width + j) >= at(table, i * width + j + 1))
    ) {
      add(pieces, "removed", a[i++] as string);
    } else {
      add(pieces, "added", b[j++] as string);
    }
  }
  return pieces;
}

const words = (text: string): string[] => (text.match(/\s+|[^\s]+/g) ?? []).slice(0, MAX_WORDS);
const at = (table: Uint16Array, index: number): number => table[index] as number;

function add(pieces: Piece[], kind: Piece["kind"], text: string): void {
  const last = pieces[pieces.length - 1];
  if (last !== undefined && last.kind === kind) last.text += text;
  else pieces.push({ kind, text });
}
