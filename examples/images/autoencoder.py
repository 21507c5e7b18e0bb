"""The demo's autoencoder: principal components of patches as weights of an AutoencoderTiny.

Its weights are computed, not trained. An encoder without blocks is linear: each layer with a stride
moves 2 x 2 places into channels; the fourth layer keeps the main components of 4 x 4 patches, the
last those of 2 x 2 of them. The decoder is the inverse. An upsampling repeats each place, so the
decoder marks even columns and rows, counted from the borders of 8 x 8 latents, and lets only the
channels of a place pass, with ReLU as a switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn

LATENT_CHANNELS = 16
COMPONENTS = 12
"""Numbers that are kept of a patch of 4 x 4 pixels."""
FEATURES = 48
"""3 colours of 4 x 4 pixels, or 12 components of 2 x 2 patches."""
DECODER_CHANNELS = 64
SCALE = 10.0
"""Latents are as small as this, because the decoder bends them with tanh."""
LIFT = 8.0
"""Is added to values that pass a ReLU."""
OFF = 32.0
"""Is subtracted from channels that a ReLU has to stop."""

# Channels of marks, from the last; inside of a block the same numbers are used for other marks.
ONE, EVEN_X, EVEN_Y, SOME_X, SOME_Y, LAST_X, LAST_Y = range(-1, -8, -1)
SAME, BEFORE, AFTER = (1, 1), (1, 0), (1, 2)
Row = tuple[int, dict[tuple[int, tuple[int, int]], float], float]
"""Target, weight by source and tap of the 3 x 3 kernel, bias."""


def make_autoencoder() -> AutoencoderTiny:
    vae = AutoencoderTiny(
        encoder_block_out_channels=(FEATURES,) * 4,
        num_encoder_blocks=(0,) * 4,
        decoder_block_out_channels=(DECODER_CHANNELS,) * 4,
        num_decoder_blocks=(2,) * 4,
        latent_channels=LATENT_CHANNELS,
        scaling_factor=SCALE,
    )
    return vae.requires_grad_(False)


@torch.no_grad()
def fit(vae: AutoencoderTiny, images: Tensor) -> None:
    """Set all weights from the pictures [row, 3, 64, 64] in -1 to 1."""
    for parameter in vae.parameters():
        parameter.zero_()
    _fit_encoder(vae, images)
    _fit_decoder(vae, images)


def _features(vae: AutoencoderTiny, images: Tensor, stop: int) -> Tensor:
    """Return [place, feature] after some layers of the encoder."""
    parts = [vae.encoder.layers[:stop]((part + 1) / 2) for part in images.split(32)]
    return torch.cat(parts).movedim(1, -1).reshape(-1, FEATURES)


def _components(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    mean = values.mean(0)
    _, scale, axes = torch.linalg.svd(values - mean, full_matrices=False)
    return axes[:count], scale[:count] / len(values) ** 0.5, mean


def _fit_encoder(vae: AutoencoderTiny, images: Tensor) -> None:
    first, second, third, fourth, last = vae.encoder.layers
    some = images[torch.randperm(len(images))[:200]]

    def gather(layer: nn.Conv2d, axes: Tensor) -> None:
        for place in range(4):
            rows = 4 * torch.arange(len(axes)) + place
            layer.weight[rows, : axes.shape[1], 1 + place // 2, 1 + place % 2] = axes

    first.weight[range(3), range(3), 1, 1] = 1
    gather(second, torch.eye(3))
    gather(third, torch.eye(12))
    gather(fourth, _components(_features(vae, some, 3), COMPONENTS)[0])
    axes, deviation, mean = _components(_features(vae, some, 4), LATENT_CHANNELS)
    # Halfway to equal variance: later components matter less, but are learnt.
    wanted = deviation.sqrt()
    wanted *= (LATENT_CHANNELS / wanted.square().sum()).sqrt()
    found = axes * (wanted / deviation)[:, None] / SCALE
    last.weight[:, :, 1, 1] = found
    last.bias.copy_(-found @ mean)


def _fit_decoder(vae: AutoencoderTiny, images: Tensor) -> None:
    layers = [layer for layer in vae.decoder.layers if hasattr(layer, "weight")]
    blocks = [layer.conv for layer in vae.decoder.layers if hasattr(layer, "conv")]
    inward, *upsampled, outward = layers
    fourth, last = vae.encoder.layers[3:]
    found, axes = last.weight[:, :, 1, 1], fourth.weight[::4, :, 1, 1]
    back = torch.linalg.pinv(found)
    some = images[:: max(1, len(images) // 200)]
    patches, pixels = _features(vae, some, 4).mean(0), _features(vae, some, 3).mean(0)

    # What the components leave out is as in the mean picture.
    inward.weight[:FEATURES, :, 1, 1] = back
    inward.bias[:FEATURES] = LIFT + patches - back @ (found @ patches + last.bias)
    _connect(inward, [(ONE, {}, 1.0)])
    _mark_latents(blocks[0], blocks[1])
    marks = (EVEN_X, SOME_X, SOME_X)
    for layer, mark, (mark_block, pass_block), count in zip(
        upsampled, marks, zip(blocks[2::2], blocks[3::2], strict=True), (12, 12, 3), strict=True
    ):
        _connect(layer, [(ONE, {(ONE, SAME): 1}, 0), *_both(EVEN_X, {(mark, SAME): 1})])
        _mark_places(mark_block)
        _pass_places(pass_block, count)
    copied = torch.eye(FEATURES)
    rest = pixels - axes.T @ (axes @ pixels)
    upsampled[0].weight[:FEATURES, :FEATURES, 1, 1] = copied
    upsampled[1].weight[:FEATURES, :COMPONENTS, 1, 1] = axes.T
    upsampled[1].weight[:FEATURES, ONE, 1, 1] = rest + LIFT - LIFT * axes.T.sum(1)
    upsampled[2].weight[:12, :12, 1, 1] = copied[:12, :12]
    outward.weight[range(3), range(3), 1, 1] = 1
    outward.bias.fill_(-LIFT)


def _connect(layer: nn.Conv2d, rows: Iterable[Row]) -> None:
    for target, sources, bias in rows:
        if layer.bias is not None:
            layer.bias[target] = bias
        for (source, (down, right)), weight in sources.items():
            layer.weight[target, source, down, right] = weight


def _both(
    target: int, sources: dict[tuple[int, tuple[int, int]], float], bias: float = 0.0
) -> list[Row]:
    """Return the row of a mark of columns, and that of rows: the channel before, turned."""
    turned = {(s if s == ONE else s - 1, tap[::-1]): w for (s, tap), w in sources.items()}
    return [(target, sources, bias), (target - 1, turned, bias)]


def _mark_latents(first: nn.Sequential, second: nn.Sequential) -> None:
    """Mark the even ones of 8 columns and rows: 0, 2 and 6, 4 from the nearer border."""
    _connect(first[0], [*_both(-2, {(ONE, BEFORE): -1}, 1), *_both(-4, {(ONE, AFTER): -1}, 1)])
    _connect(
        first[2],
        [
            *_both(-2, {(-2, SAME): 1}),
            *_both(-4, {(-2, BEFORE): 1}),
            *_both(-6, {(-4, AFTER): 1}),
        ],
    )
    _connect(
        first[4],
        [
            *_both(SOME_X, {(-2, SAME): 1, (-4, BEFORE): 1, (-6, SAME): 1}),
            *_both(LAST_X, {(-6, AFTER): 1}),
        ],
    )
    _connect(second[0], _both(-2, {(SOME_X, SAME): 1, (LAST_X, AFTER): 1}))
    _connect(second[2], _both(-2, {(-2, SAME): 1}))
    _connect(second[4], _both(EVEN_X, {(-2, SAME): 1}))


def _mark_places(block: nn.Sequential) -> None:
    """Mark the first of each pair of columns and rows: there the mark of its neighbour differs."""
    _connect(
        block[0],
        [
            *_both(-2, {(EVEN_X, SAME): 1, (EVEN_X, BEFORE): -1}),
            *_both(-4, {(EVEN_X, SAME): -1, (EVEN_X, BEFORE): 1}),
        ],
    )
    _connect(block[2], _both(-2, {(-2, SAME): 1, (-4, SAME): 1}))
    _connect(block[4], _both(SOME_X, {(-2, SAME): 1}))


def _pass_places(block: nn.Sequential, count: int) -> None:
    """Replace the first channels by those of 4 * count that belong to the place."""
    for channel, place in product(range(count), range(4)):
        odd_y, odd_x = divmod(place, 2)
        row = 4 * channel + place
        sources = {(row, SAME): 1.0}
        sources[SOME_X, SAME] = -OFF if odd_x else OFF
        sources[SOME_Y, SAME] = -OFF if odd_y else OFF
        _connect(block[0], [(row, sources, -OFF * (2 - odd_x - odd_y))])
        block[2].weight[channel, row, 1, 1] = 1
    for channel in range(count):
        _connect(block[0], [(FEATURES + channel, {(channel, SAME): 1}, 0)])
        _connect(block[2], [(FEATURES + channel, {(FEATURES + channel, SAME): 1}, 0)])
        new, old = (channel, SAME), (FEATURES + channel, SAME)
        _connect(block[4], [(channel, {new: 1, old: -1}, 0)])
