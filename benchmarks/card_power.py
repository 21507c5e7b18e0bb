"""What a card draws and how fast it runs while something is timed, by `nvidia-smi`.

A card that draws all the power that it may lowers its clock: what is timed then depends on energy.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

_EVERY_MS = 20


@dataclass(frozen=True, slots=True)
class Power:
    watts: float
    mhz: float


@dataclass(slots=True)
class PowerMeter:
    """Runs beside what is timed; where there is no `nvidia-smi`, it finds nothing."""

    device: int = 0
    _samples: list[Power] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> PowerMeter:
        command = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", f"--id={self.device}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
        with suppress(OSError):
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def mean(self, first: int = 0) -> Power | None:
        """Of all samples from the first one on; None: there are none."""
        samples = self._samples[first:]
        if not samples:
            return None
        count = len(samples)
        watts = sum(sample.watts for sample in samples) / count
        return Power(watts, sum(sample.mhz for sample in samples) / count)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                # A line that is cut off, or "[N/A]" of a card that does not tell.
                with suppress(ValueError):
                    watts, mhz = line.split(",")
                    self._samples.append(Power(float(watts), float(mhz)))


def visible_device() -> int:
    """The first card that this process may use, as `nvidia-smi` counts them; 0 if not known."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0
