"""Draw the plot of a benchmark's JSON record, on any machine with matplotlib.

python -m benchmarks.lib.plots FILE.json [FILE.png]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

NO_MATPLOTLIB = "matplotlib is not installed; install it with: pip install 'loramux[bench]'."
_PANEL_INCHES = (7.0, 4.2)
_MAX_STRAIGHT_LABELS = 60
"""Labels with more characters in all are drawn at an angle."""


def plot_record(record: dict[str, Any], target: Path) -> bool:
    """Draw all charts of a record; return False if matplotlib is missing and nothing was drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for section in record["sections"] for panel in section["panels"]]
    columns = min(2, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{record['benchmark']}  ({record['machine'].get('device', '')})")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        draw_panel(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(target, dpi=110)
    return True


def draw_panel(axis: Any, panel: dict[str, Any]) -> None:
    positions = range(len(panel["x"]))
    series = panel["series"]
    if panel["kind"] == "lines":
        for name, values in series.items():
            pairs = [(i, v) for i, v in zip(positions, values, strict=True) if v is not None]
            axis.plot([i for i, _ in pairs], [v for _, v in pairs], marker="o", label=name)
    else:
        width = 0.8 / max(1, len(series))
        for number, (name, values) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            heights = [0.0 if value is None else value for value in values]
            axis.bar([position + shift for position in positions], heights, width, label=name)
    labels = [str(name) for name in panel["x"]]
    is_angled = sum(map(len, labels)) > _MAX_STRAIGHT_LABELS
    alignment = "right" if is_angled else "center"
    axis.set_xticks(list(positions), labels, rotation=30 if is_angled else 0, ha=alignment)
    axis.set_title(panel["title"])
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])
    axis.grid(axis="y", alpha=0.3)
    if series:
        axis.legend(fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, metavar="FILE.json")
    parser.add_argument("target", type=Path, nargs="?", metavar="FILE.png")
    arguments = parser.parse_args()
    target = arguments.target or arguments.record.with_suffix(".png")
    if not plot_record(json.loads(arguments.record.read_text()), target):
        sys.exit(NO_MATPLOTLIB)
    print(f"written: {target}")


if __name__ == "__main__":
    main()
