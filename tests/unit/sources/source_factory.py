"""Adapters to fetch, and a fake clock."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from loramux.sources.config import FetchLimits
from loramux.sources.retry import Timing

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG = json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}).encode()
FAST = FetchLimits(max_attempts=3, part_bytes=4096)
# For servers that never reply. A busy machine may delay other replies too, hence the retries.
IMPATIENT = replace(FAST, read_timeout_s=0.3, max_attempts=10)


def make_weights(num_bytes: int = 10_000, *, seed: int = 0) -> bytes:
    """Return a safetensors file in which adjacent bytes differ."""
    content = bytes((index * 7 + index // 251 + seed) % 256 for index in range(num_bytes))
    header = {"lora": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + content


WEIGHTS = make_weights()


def adapter_files(folder: str = "", weights: bytes = WEIGHTS) -> dict[str, bytes]:
    prefix = f"{folder}/" if folder else ""
    return {f"{prefix}{CONFIG_NAME}": CONFIG, f"{prefix}{WEIGHTS_NAME}": weights}


@dataclass(slots=True)
class FakeTime:
    """A clock that sleeping advances at once; each reading advances it by `tick_s`."""

    now_s: float = 0.0
    tick_s: float = 0.0
    sleeps_s: list[float] = field(default_factory=list)

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        self.sleeps_s.append(delay_s)
        self.now_s += delay_s

    @property
    def timing(self) -> Timing:
        return Timing(clock=self.clock, sleep=self.sleep, draw=lambda: 0.5)


def entries(folder: Path) -> list[str]:
    """Return all entries of a folder, including leftovers."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
