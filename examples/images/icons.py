"""Draw emoji of one name in several art styles, from npm packages of SVG icons.

    mkdir icons && cd icons && npm pack @iconify-json/noto @iconify-json/fluent-emoji \\
        @iconify-json/fluent-emoji-flat @iconify-json/fluent-emoji-high-contrast
    for f in *.tgz; do mkdir "${f%.tgz}" && tar xzf "$f" -C "${f%.tgz}"; done
    pip install resvg-py pillow && python examples/images/icons.py icons icons.zip

icons.zip then holds STYLE/NAME.png, 96 x 96 with transparency, for the names that every style has.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = 96
BASE = "base"
STYLES = {
    BASE: "noto",
    "ink": "fluent-emoji-high-contrast",
    "flat": "fluent-emoji-flat",
    "clay": "fluent-emoji",
}
_LEFT_OUT = """
woman man women men person people boy girl button oclock thirty keycap arrow flag wheelchair
hand hands index palm palms fist tone hair facing input aries taurus gemini cancer leo virgo
libra scorpius sagittarius capricorn aquarius pisces ophiuchus mark sign symbol
"""
LEFT_OUT = frozenset(_LEFT_OUT.split())
"""Words of names that are left out: persons, signs and letters."""


def read_icons(folder: Path, package: str) -> dict[str, Any]:
    pattern = f"iconify-json-{package}-[0-9]*/package/icons.json"
    (file,) = folder.glob(pattern)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def draw(icons: dict[str, Any], name: str) -> bytes:
    """Return the icon as PNG."""
    import resvg_py

    icon = icons["icons"][name]
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    body = icon["body"].replace("currentColor", "#111")
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{body}</svg>'
    )
    drawn = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE))
    image = Image.open(io.BytesIO(drawn)).convert("RGBA").resize((SIZE, SIZE))
    target = io.BytesIO()
    image.save(target, "PNG", optimize=True)
    return target.getvalue()


def common_names(sets: dict[str, dict[str, Any]]) -> list[str]:
    names = set.intersection(*(set(icons["icons"]) for icons in sets.values()))
    return sorted(name for name in names if not LEFT_OUT & set(name.split("-")))


def load(file: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the names, and uint8 [name, 96, 96, RGBA] of each style."""
    with zipfile.ZipFile(file) as archive:
        names = sorted({path.split("/")[1].removesuffix(".png") for path in archive.namelist()})
        drawn = {
            style: np.stack(
                [
                    np.asarray(Image.open(io.BytesIO(archive.read(f"{style}/{name}.png"))))
                    for name in names
                ]
            )
            for style in STYLES
        }
    return [name.replace("-", " ") for name in names], drawn


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    sets = {style: read_icons(folder, package) for style, package in STYLES.items()}
    names = common_names(sets)
    with zipfile.ZipFile(target, "w") as archive:
        for style, icons in sets.items():
            for name in names:
                archive.writestr(f"{style}/{name}.png", draw(icons, name))
            print(f"{style}: {len(names)} icons", flush=True)


if __name__ == "__main__":
    main()
