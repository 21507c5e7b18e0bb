/** A table of thousands of rows, of which only the visible ones exist. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

const ROW_HEIGHT = 40;
const OVERSCAN = 8;

export interface Column<Row> {
  id: string;
  title: string;
  /** Right-aligned. */
  isNumber?: boolean;
  /** Hidden on narrow screens. */
  isMinor?: boolean;
  width: string;
  cell: (row: Row) => ComponentChildren;
  /** What the rows are sorted by; without it the column cannot be sorted. */
  key?: (row: Row) => number | string;
}

export interface Order {
  id: string;
  isDescending: boolean;
}

interface TableProps<Row> {
  label: string;
  rows: readonly Row[];
  columns: readonly Column<Row>[];
  rowKey: (row: Row) => string;
  order: Order | null;
  onOrder: (order: Order) => void;
  onOpen: (row: Row) => void;
}

export function sorted<Row>(
  rows: readonly Row[],
  columns: readonly Column<Row>[],
  order: Order | null,
): readonly Row[] {
  const key = columns.find((column) => column.id === order?.id)?.key;
  if (order === null || key === undefined) return rows;
  const sign = order.isDescending ? -1 : 1;
  const keyed = rows.map((row) => [key(row), row] as const);
  keyed.sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0));
  return keyed.map(([, row]) => row);
}

export function Table<Row>(props: TableProps<Row>) {
  const { rows, columns, order } = props;
  const grid = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [active, setActive] = useState(0);
  useLayoutEffect(() => {
    const element = grid.current;
    if (element === null) return;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - OVERSCAN);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW_HEIGHT) + OVERSCAN);
  const current = Math.min(active, Math.max(0, rows.length - 1));
  const tracks = { "--tracks": columns.map((column) => column.width).join(" ") };
  const narrow = columns.filter((column) => !column.isMinor).map((column) => column.width);

  function move(to: number) {
    const next = Math.max(0, Math.min(rows.length - 1, to));
    setActive(next);
    const element = grid.current;
    if (element === null) return;
    if (next * ROW_HEIGHT < element.scrollTop) element.scrollTop = next * ROW_HEIGHT;
    const bottom = (next + 2) * ROW_HEIGHT - element.clientHeight;
    if (bottom > element.scrollTop) element.scrollTop = bottom;
  }

  function onKeyDown(event: KeyboardEvent) {
    // Enter and space on a button of the head sort.
    if (event.target !== event.currentTarget) return;
    const page = Math.max(1, Math.floor(height / ROW_HEIGHT) - 1);
    const steps: Record<string, number> = {
      ArrowDown: current + 1,
      ArrowUp: current - 1,
      PageDown: current + page,
      PageUp: current - page,
      Home: 0,
      End: rows.length - 1,
    };
    const to = steps[event.key];
    if (to !== undefined) {
      event.preventDefault();
      move(to);
    } else if (event.key === "Enter" && rows[current] !== undefined) {
      event.preventDefault();
      props.onOpen(rows[current] as Row);
    }
  }

  const style = { ...tracks, "--narrow-tracks": narrow.join(" ") };
  return (
    <div
      class="grid"
      role="grid"
      aria-label={props.label}
      aria-rowcount={rows.length + 1}
      aria-colcount={columns.length}
      aria-activedescendant={rows.length > 0 ? `row-${current}` : undefined}
      tabIndex={0}
      ref={grid}
      style={style}
      onKeyDown={onKeyDown}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <div role="rowgroup" class="heads">
        <div class="row head" role="row" aria-rowindex={1}>
          {columns.map((column) => (
            <Head key={column.id} column={column} order={order} onOrder={props.onOrder} />
          ))}
        </div>
      </div>
      <div class="rows" role="rowgroup" style={{ height: `${rows.length * ROW_HEIGHT}px` }}>
        {rows.slice(first, last).map((row, index) => (
          <div
            key={props.rowKey(row)}
            id={`row-${first + index}`}
            class={`row${first + index === current ? " current" : ""}`}
            role="row"
            aria-rowindex={first + index + 2}
            style={{ top: `${(first + index) * ROW_HEIGHT}px` }}
            onClick={() => {
              setActive(first + index);
              props.onOpen(row);
            }}
          >
            {columns.map((column) => (
              <div key={column.id} role="gridcell" class={cellClass(column)}>
                {column.cell(row)}
              </div>
            ))}
          </div>
        ))}
      </div>
    </div>
  );
}

interface HeadProps<Row> {
  column: Column<Row>;
  order: Order | null;
  onOrder: (order: Order) => void;
}

function Head<Row>({ column, order, onOrder }: HeadProps<Row>) {
  const isSorted = order?.id === column.id;
  const isDescending = isSorted && order.isDescending;
  if (column.key === undefined) {
    return (
      <div role="columnheader" class={cellClass(column)}>
        {column.title}
      </div>
    );
  }
  return (
    <div
      role="columnheader"
      class={cellClass(column)}
      aria-sort={isSorted ? (isDescending ? "descending" : "ascending") : "none"}
    >
      <button
        type="button"
        class="sort"
        onClick={() =>
          onOrder({ id: column.id, isDescending: isSorted ? !isDescending : Boolean(column.isNumber) })
        }
      >
        {column.title}
        <span aria-hidden="true">{isSorted ? (isDescending ? " ↓" : " ↑") : ""}</span>
      </button>
    </div>
  );
}

const cellClass = <Row,>(column: Column<Row>): string =>
  `cell${column.isNumber ? " number" : ""}${column.isMinor ? " minor" : ""}`;
