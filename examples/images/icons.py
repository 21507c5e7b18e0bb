"""Draw well-known objects from an npm package of SVG icons, Noto Emoji.

    mkdir icons && cd icons && npm pack @iconify-json/noto && tar xzf *.tgz
    pip install resvg-py pillow numpy && python examples/images/icons.py icons icons.npz

icons.npz then holds uint8 [object, 64, 64, RGBA] as `base`, in the order of OBJECTS.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 64
MARGIN = 4
BASE = "base"
OBJECTS = {
    "apple": "red-apple",
    "banana": "banana",
    "pineapple": "pineapple",
    "cheese": "cheese-wedge",
    "pizza": "pizza",
    "hamburger": "hamburger",
    "cupcake": "cupcake",
    "donut": "doughnut",
    "coffee": "hot-beverage",
    "cat": "cat-face",
    "dog": "dog-face",
    "pig": "pig-face",
    "fox": "fox",
    "panda": "panda",
    "frog": "frog",
    "owl": "owl",
    "fish": "fish",
    "whale": "whale",
    "sun": "sun",
    "moon": "crescent-moon",
    "star": "star",
    "rainbow": "rainbow",
    "fire": "fire",
    "tree": "deciduous-tree",
    "sunflower": "sunflower",
    "cactus": "cactus",
    "house": "house",
    "rocket": "rocket",
    "car": "automobile",
    "crown": "crown",
    "heart": "red-heart",
    "ghost": "ghost",
}
"""Name of the icon by the words of captions."""


def draw(icons: dict[str, Any], name: str) -> np.ndarray:
    """Return the icon as uint8 [64, 64, RGBA] with a transparent margin."""
    import resvg_py

    icon = icons["icons"][name]
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    body = icon["body"].replace("currentColor", "#111")
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{body}</svg>'
    )
    inner = SIDE - 2 * MARGIN
    drawn = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=4 * inner, height=4 * inner))
    image = Image.open(io.BytesIO(drawn)).convert("RGBA")
    paper = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
    paper.paste(image.resize((inner, inner), Image.Resampling.BOX), (MARGIN, MARGIN))
    return np.array(paper)


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    icons = json.loads((folder / "package" / "icons.json").read_text())
    drawn = np.stack([draw(icons, name) for name in OBJECTS.values()])
    np.savez_compressed(target, allow_pickle=False, **{BASE: drawn})
    print(f"{target}: {len(OBJECTS)} objects")


if __name__ == "__main__":
    main()
