"""The inputs of a step in one pinned host buffer, copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.lora.segmented import Ints
from loramux.memory.device import Fence, host_buffer

# Fields begin at multiples of 64 bytes, so that vectors of any type are aligned.
_ALIGN_WORDS = 16


def align(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS


class HostBuffer:
    """Fields of int32 words at fixed device addresses, each filled on the host from its front.

    The last field may be sent in part. `num_ahead` words owned by the device precede the fields.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, *, num_ahead: int = 0) -> None:
        sizes = [*map(align, sizes[:-1]), sizes[-1]]
        self.all = torch.zeros(num_ahead + sum(sizes), dtype=torch.int32, device=device)
        self._sent = self.all[num_ahead:]
        self.fields = torch.split(self._sent, sizes)
        self._last_at = sum(sizes[:-1])
        # Double buffering: one is filled while the device reads the other.
        self._hosts = [_Host(sizes, device) for _ in range(2)]

    @property
    def host(self) -> list[Ints]:
        """The fields of this step, to be filled before `send`."""
        return self._hosts[0].fields

    def begin(self) -> None:
        """Begin a step; the fields hold their values of two steps ago."""
        self._hosts.reverse()
        self._hosts[0].wait()

    def send(self, num_last: int) -> None:
        """Copy all fields and `num_last` words of the last one, without waiting for the device."""
        host, words = self._hosts[0], self._last_at + num_last
        self._sent[:words].copy_(host.words[:words], non_blocking=True)
        host.sent(self._sent.device)


class _Host:
    """One host copy of the fields, and the fence after the device has read it."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.words = host_buffer(device)(sum(sizes), torch.int32)
        self.words.zero_()
        self.fields: list[Ints] = np.split(self.words.numpy(), np.cumsum(sizes)[:-1])
        self._fence: Fence | None = None

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._fence = Fence(device)

    def wait(self) -> None:
        if self._fence is not None:
            self._fence.wait()
