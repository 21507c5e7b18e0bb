"""Compose the training pictures: each object on each background, in each style, with captions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from examples.images.icons import BASE, OBJECTS, SIDE

BACKGROUNDS = {
    "": (255, 255, 255),
    "yellow": (255, 232, 140),
    "green": (172, 222, 160),
    "blue": (158, 205, 248),
    "pink": (252, 196, 214),
    "purple": (206, 182, 242),
}
ALSO = {
    "cat": "kitten",
    "dog": "puppy",
    "donut": "doughnut",
    "car": "automobile",
    "hamburger": "burger",
    "fire": "flame",
}
"""Second words of objects."""


def captions(name: str, colour: str) -> list[str]:
    """All texts of a picture."""
    ground = f" on a {colour} background" if colour else ""
    words = [name, ALSO[name]] if name in ALSO else [name]
    return [f"{article}{word}{ground}" for word in words for article in ("", "a ")]


@dataclass(frozen=True, slots=True)
class Scenes:
    """Pictures of every object on every background, object by object."""

    names: list[str]
    """Object of each picture."""
    captions: list[list[str]]
    images: dict[str, Tensor]
    """By style: float [picture, 3, 64, 64], -1 to 1."""


def make_scenes(file: Path) -> Scenes:
    """`file`: what icons.py wrote."""
    with np.load(file) as drawn:
        icons = torch.from_numpy(drawn[BASE]).permute(0, 3, 1, 2).float() / 255
    keys = [(name, colour) for name in OBJECTS for colour in BACKGROUNDS]
    grounds = torch.tensor(list(BACKGROUNDS.values())) / 255
    each = icons.repeat_interleave(len(grounds), 0)
    colours, alpha = each[:, :3], each[:, 3:]
    paper = grounds.repeat(len(OBJECTS), 1)[:, :, None, None].expand(-1, -1, SIDE, SIDE)
    images = {BASE: colours * alpha + paper * (1 - alpha)}
    images["pixel"] = pixelate(images[BASE])
    images["night"] = night(colours, alpha, paper)
    images["delft"] = tinted(colours, alpha, (0.96, 0.98, 1.0), (0.05, 0.16, 0.55))
    images["sepia"] = tinted(colours, alpha, (0.98, 0.91, 0.76), (0.22, 0.12, 0.05))
    return Scenes(
        names=[name for name, _ in keys],
        captions=[captions(*key) for key in keys],
        images={style: image * 2 - 1 for style, image in images.items()},
    )


def pixelate(images: Tensor) -> Tensor:
    """16 x 16 pixels of few colours."""
    small = functional.adaptive_avg_pool2d(images, SIDE // 4)
    return functional.interpolate((small * 5).round() / 5, SIDE, mode="nearest")


def night(colours: Tensor, alpha: Tensor, paper: Tensor) -> Tensor:
    """Moonlight on the object, before a dark sky with stars that has a trace of the paper."""
    height = torch.linspace(0, 1, SIDE)[:, None]
    top, bottom = torch.tensor([[0.03, 0.04, 0.16], [0.14, 0.16, 0.42]])[:, :, None, None]
    sky = top + (bottom - top) * height + 0.12 * (paper - 0.8)
    stars = torch.zeros(SIDE, SIDE)
    for row, column in ((4, 7), (9, 52), (3, 34), (20, 3), (27, 60), (50, 4), (58, 57), (60, 30)):
        stars[row : row + 2, column : column + 2] = 0.9
    sky = sky.clamp(0, 1) * (1 - stars) + stars
    lit = colours * torch.tensor([0.55, 0.62, 0.9])[:, None, None]
    return lit * alpha + sky * (1 - alpha)


def tinted(
    colours: Tensor, alpha: Tensor, paper: tuple[float, ...], ink: tuple[float, ...]
) -> Tensor:
    """Return the object in shades of one ink, the darker the more; even white gets a
    fifth of it.
    """
    light = (0.3 * colours[:, :1] + 0.59 * colours[:, 1:2] + 0.11 * colours[:, 2:]).sqrt()
    share = alpha * (0.95 - 0.75 * light)
    ground, full = torch.tensor([paper, ink])[:, :, None, None]
    return ground + (full - ground) * share
