"""Compose scenes of icons with captions, on the device: image and token ids of a whole batch.

A caption is `[small|big] NAME [on the left|...] [on a COLOUR background]`, or
`NAME and NAME [on a COLOUR background]`. A scene can be drawn in any style: the same caption then
has a picture in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from examples.images.network import TEXT_TOKENS

COLOURS = {
    "": (255, 255, 255),
    "red": (214, 69, 65),
    "orange": (240, 150, 60),
    "yellow": (250, 220, 90),
    "green": (110, 180, 95),
    "blue": (80, 140, 220),
    "purple": (150, 105, 195),
    "pink": (245, 170, 190),
    "grey": (150, 150, 150),
    "black": (30, 30, 34),
}
SIZES = {"": 0.8, "small": 0.45, "big": 1.0}
SMALL = 1
PLACES = {
    "": (0.0, 0.0),
    "on the left": (-1.0, 0.0),
    "on the right": (1.0, 0.0),
    "at the top": (0.0, -1.0),
    "at the bottom": (0.0, 1.0),
}
ON_WHITE = ("ink",)
"""Styles that ignore the background's colour."""
PAIR_SHARE = 0.15
"""Share of scenes with two icons."""
NO_CAPTION = 0.1
"""Share of scenes with an empty caption, for guidance."""


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a tensor that is made once: a CUDA graph cannot copy from the host."""
    return torch.tensor(values, device=device)


def background_words(colour: str) -> str:
    return f"on a {colour} background" if colour else ""


def captions(names: list[str]) -> list[str]:
    """Texts that hold all words of captions."""
    words = [*SIZES, *PLACES, *map(background_words, COLOURS), "and"]
    return [*names, *words]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Numbers of the phrases of a batch of captions."""

    name: Tensor
    other: Tensor
    size: Tensor
    place: Tensor
    colour: Tensor
    is_pair: Tensor
    is_silent: Tensor


@dataclass(frozen=True, slots=True)
class Scenes:
    """Draws random scenes of some icons."""

    icons: dict[str, Tensor]
    """By style: [name, RGBA premultiplied, side, side], 0 to 1."""
    tokens: dict[str, Tensor]
    """By kind of phrase: [phrase, tokens], padded with 0."""
    numbers: dict[str, Tensor]

    def draw(self, count: int, style: str) -> tuple[Tensor, Tensor]:
        """Return images [count, 3, side, side] from -1 to 1, and the token ids of captions."""
        device = self.tokens["names"].device

        def pick(limit: int) -> Tensor:
            return torch.randint(limit, (count,), device=device)

        colour, place, size = pick(len(COLOURS)), pick(len(PLACES)), pick(len(SIZES))
        words = Words(
            name=pick(len(self.tokens["names"])),
            other=pick(len(self.tokens["names"])),
            size=size,
            place=place * (size == SMALL),  # only small icons have a place
            colour=colour * (torch.rand(count, device=device) < 0.5),  # or white
            is_pair=torch.rand(count, device=device) < PAIR_SHARE,
            is_silent=torch.rand(count, device=device) < NO_CAPTION,
        )
        ids = self._ids(words)
        is_pair = words.is_pair
        scale = torch.where(is_pair, 0.48, self.numbers["sizes"][size])
        at = self.numbers["places"][words.place]
        left = constant((-1.0, 0.0), device)
        at = torch.where(is_pair[:, None], left, at)
        paper = self.numbers["colours"][words.colour * (style not in ON_WHITE)][:, :, None, None]
        icons = self.icons[style]
        image = place_icons(paper, icons[words.name], scale, at)
        second = place_icons(image, icons[words.other], scale, -left.expand(count, 2))
        return torch.where(is_pair[:, None, None, None], second, image) * 2 - 1, ids

    def _ids(self, chosen: Words) -> Tensor:
        tokens, pair = self.tokens, chosen.is_pair[:, None]
        none = torch.zeros_like(tokens["ends"][:1])
        begin, end = (tokens["ends"][i : i + 1].expand(len(pair), -1) for i in (0, 1))
        words = torch.cat(
            [
                torch.where(pair, 0, tokens["sizes"][chosen.size]),
                tokens["names"][chosen.name],
                torch.where(pair, tokens["and"].expand(len(pair), -1), none),
                torch.where(pair, tokens["names"][chosen.other], 0),
                torch.where(pair, 0, tokens["places"][chosen.place]),
                tokens["colours"][chosen.colour],
            ],
            1,
        )
        words = torch.where(chosen.is_silent[:, None], 0, words)
        ids = torch.cat([begin, words, end], 1)
        # Padding goes behind all others, whose order stays.
        order = (ids == 0).to(torch.int32).argsort(dim=1, stable=True)
        ids = ids.gather(1, order)[:, :TEXT_TOKENS]
        return functional.pad(ids, (0, TEXT_TOKENS - ids.shape[1]))


def place_icons(image: Tensor, icons: Tensor, scale: Tensor, at: Tensor) -> Tensor:
    """Draw an icon [rows, RGBA, side, side] over each image, centred `at` (-1 to 1)."""
    rows, _, side, _ = icons.shape
    # A place moves the icon as far as it fits.
    shift = at * (1 - scale)[:, None]
    theta = torch.zeros(rows, 2, 3, device=icons.device)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / scale
    theta[:, :, 2] = -shift / scale[:, None]
    grid = functional.affine_grid(theta, [rows, 4, side, side], align_corners=False)
    drawn = functional.grid_sample(icons.float(), grid, align_corners=False)
    return drawn[:, :3] + image * (1 - drawn[:, 3:])


def make_scenes(
    names: list[str],
    icons: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Scenes:
    """`icons`: uint8 [name, side, side, RGBA] by style."""

    def ids(texts: list[str]) -> Tensor:
        found = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        longest = max(map(len, found))
        padded = [row + [0] * (longest - len(row)) for row in found]
        return torch.tensor(padded, device=device).reshape(len(texts), longest)

    def premultiplied(drawn: Tensor) -> Tensor:
        image = drawn.to(device).permute(0, 3, 1, 2).float() / 255
        return torch.cat([image[:, :3] * image[:, 3:], image[:, 3:]], 1).half()

    return Scenes(
        icons={style: premultiplied(drawn) for style, drawn in icons.items()},
        tokens={
            "names": ids(names),
            "sizes": ids(list(SIZES)),
            "places": ids(list(PLACES)),
            "colours": ids([background_words(colour) for colour in COLOURS]),
            "and": ids(["and"]),
            "ends": torch.tensor([[2], [3]], device=device),
        },
        numbers={
            "sizes": torch.tensor(list(SIZES.values()), device=device),
            "places": torch.tensor(list(PLACES.values()), device=device),
            "colours": torch.tensor(list(COLOURS.values()), device=device) / 255,
        },
    )


def pixelate(images: Tensor) -> Tensor:
    """24 x 24 pixels of few colours."""
    small = functional.adaptive_avg_pool2d(images, 24)
    return functional.interpolate((small * 3).round() / 3, images.shape[-1], mode="nearest")


def night(images: Tensor) -> Tensor:
    """Dark blue ground, bright things in moonlight."""
    light = (images.mean(1, keepdim=True) + 1) / 2
    ground = constant((-0.85, -0.8, -0.45), images.device)[:, None, None]
    shine = constant((1.1, 1.3, 1.35), images.device)[:, None, None]
    colour = (images - images.mean(1, keepdim=True)) * 0.6
    return (ground + shine * (1 - light) + colour).clamp(-1, 1)


EFFECTS = {"pixel": pixelate, "night": night}
"""Styles that are computed from the base's pictures."""
