"""Rounds of segments: the adapters of rows that have several of them are added one by one."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.kernels.ops import Segment


def rounds_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Divides segments into rounds in which no row occurs twice, to be added in order.

    A row's segments stay in their order. Without common rows there is one round.
    """
    rounds: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.start):
        for members in rounds:
            if members[-1].stop <= segment.start:
                members.append(segment)
                break
        else:
            rounds.append([segment])
    return rounds
