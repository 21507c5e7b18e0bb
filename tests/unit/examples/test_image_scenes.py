"""Scenes of the image demo: captions and pictures say the same."""

from __future__ import annotations

import torch

from examples.images.network import TEXT_TOKENS, make_tokenizer
from examples.images.scenes import COLOURS, PLACES, captions, make_scenes

NAMES = ["red apple", "rocket"]


def test_a_caption_names_what_its_picture_shows() -> None:
    torch.manual_seed(0)
    # An icon is one opaque colour: red for the apple, blue for the rocket.
    icons = torch.zeros(2, 16, 16, 4, dtype=torch.uint8)
    icons[..., 3] = 255
    icons[0, ..., 0] = icons[1, ..., 2] = 255
    tokenizer = make_tokenizer(captions(NAMES))
    scenes = make_scenes(NAMES, {"base": icons}, tokenizer, torch.device("cpu"))
    images, ids = scenes.draw(256, "base")
    assert images.shape == (256, 3, 16, 16) and ids.shape == (256, TEXT_TOKENS)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert {""} < set(texts)
    for text, image in zip(texts, images, strict=True):
        if text in NAMES:
            channel = 2 * NAMES.index(text)
            assert image[channel, 8, 8] == 1 and image[2 - channel, 8, 8] == -1
        for colour, values in COLOURS.items():
            if colour and text.startswith("small") and text.endswith(f"on a {colour} background"):
                corners = image[:, [0, 0, -1, -1], [0, -1, 0, -1]]
                paper = torch.tensor(values) / 127.5 - 1
                assert (corners - paper[:, None]).abs().amax(0).min() < 1e-2
    placed = [text for text in texts if any(place and place in text for place in PLACES)]
    assert placed and all(text.startswith("small") for text in placed)
