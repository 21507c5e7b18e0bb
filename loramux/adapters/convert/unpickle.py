"""Reads the tensors of a pickle and writes them as safetensors.

It runs as a script in a child process, so it imports no other module of loramux. It reads with
`weights_only`, which builds tensors and plain containers only, and within limits of memory and
time, because a hostile file could still ask for any amount of either.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
SPARE_BYTES = 2**30
COPIES = 4
MAX_CPU_S = 600


def limit_resources(file_bytes: int) -> None:
    """Limits the memory to that of the imported libraries and some copies of the file."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = used + COPIES * file_bytes + SPARE_BYTES
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, MAX_CPU_S)):
        _, most = resource.getrlimit(kind)
        bounded = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (bounded, bounded))


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(found, Mapping) and len(found) == 1 and next(iter(found)) in WRAPPERS:
        found = next(iter(found.values()))
    if not isinstance(found, Mapping):
        raise TypeError(f"it holds a {type(found).__name__} instead of named tensors")
    odd = [str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise TypeError(f"these entries are not tensors: {', '.join(sorted(odd)[:3])}")
    return {str(name): value.detach().contiguous().clone() for name, value in found.items()}


def main() -> None:
    source, destination = sys.argv[1:]
    torch.set_num_threads(1)
    limit_resources(Path(source).stat().st_size)
    try:
        tensors = read_tensors(source)
        save_file(tensors, destination)
    # The file is not trusted: whatever is wrong with it is reported in one line.
    except Exception as error:
        json.dump({"error": f"{type(error).__name__}: {error}"[:2000]}, sys.stdout)
        return
    json.dump({"tensors": len(tensors)}, sys.stdout)


if __name__ == "__main__":
    main()
