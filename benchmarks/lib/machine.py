"""The machine of a measurement: its description, and the power and clock of its GPU.

A GPU at its power limit lowers its clock, so a timing at the limit depends on energy.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch

import loramux

_SAMPLE_MS = 20


def describe_machine(dtype: str, device: str = "cpu") -> dict[str, str]:
    packages = ("loramux", "torch", "transformers", "peft")
    if torch.device(device).type == "cuda":
        packages = ("loramux", "torch", "triton", "transformers")
    return {
        "device": _device_name(device),
        "CPU": f"{_cpu_name()} ({platform.machine()}), {torch.get_num_threads()} threads",
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "dtype": dtype,
        "Python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    if package == "loramux":
        return loramux.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_name(device: str) -> str:
    if torch.device(device).type != "cuda":
        return device
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory_gib:.0f} GiB"


def _cpu_name() -> str:
    if shutil.which("lscpu") is None:
        return platform.processor()
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "Model name" in line]
    return names[0] if names else platform.processor()


@dataclass(frozen=True, slots=True)
class Power:
    """Mean power draw and SM clock."""

    watts: float
    mhz: float


@dataclass(slots=True)
class PowerMeter:
    """Samples nvidia-smi while something is timed; it has no samples if nvidia-smi is missing."""

    device: int = 0
    _samples: list[Power] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> PowerMeter:
        command = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", f"--id={self.device}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={_SAMPLE_MS}"]
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
        """Return the mean of the samples from index `first` on, or None if there are none."""
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
                # The last line may be cut off, and a GPU may report "[N/A]".
                with suppress(ValueError):
                    watts, mhz = line.split(",")
                    self._samples.append(Power(float(watts), float(mhz)))


def visible_device() -> int:
    """Return nvidia-smi's index of the first GPU visible to this process, or 0 if unknown."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(first) if first.isdigit() else 0
