"""MKL detects the CPU in a call of one thread, whatever loads a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from loramux import LLM, SamplingParams
from tests.engine_factory import save_model_with_tokenizer

# Of these, torch computes tensors of PARALLEL_NUMBERS or more by several threads in MKL.
OF_MKL = {"cos", "erf", "exp", "log", "sin", "sqrt", "tanh"}
PARALLEL_NUMBERS = 2048


# The function begins by reading the type of the CPU: -1 before it is known.
SHOW = """
import ctypes, sys
from pathlib import Path
import torch
from loramux.kernels.cpu.vector_math import detect_cpu
(library,) = (Path(torch.__file__).parent / "lib").glob("*torch_cpu.*")
try:
    function = ctypes.CDLL(str(library)).mkl_vml_serv_cpu_detect
except AttributeError:
    sys.exit()
start = ctypes.cast(function, ctypes.c_void_p).value
code = ctypes.string_at(start, 6)
if code[:2] == bytes([0x8B, 0x05]):
    kind = ctypes.c_int.from_address(start + 6 + int.from_bytes(code[2:], "little", signed=True))
    before = kind.value
    detect_cpu()
    print(before, kind.value)
"""


class MklCalls(TorchDispatchMode):
    """Records how many numbers each call takes that MKL computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_numbers: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__.rstrip("_") in OF_MKL:
            self.num_numbers.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_mkl_knows_the_cpu_afterwards() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    if not shown.stdout:
        pytest.skip("torch has no MKL that detects the CPU in this way")
    before, after = map(int, shown.stdout.split())
    assert before == -1 and after >= 0


def test_the_first_call_of_a_text_engine_is_of_one_number(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path)
    with MklCalls() as calls:
        llm = LLM(tmp_path, device="cpu", device_memory_bytes=8 * 2**20)
        prompt = [3 + number % 250 for number in range(200)]
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    first, *others = calls.num_numbers
    assert first == 1
    # A step of so many tokens would be the first call otherwise, and several threads share it.
    assert others[0] >= PARALLEL_NUMBERS


def test_the_first_call_of_an_image_engine_is_of_one_number() -> None:
    pytest.importorskip("diffusers", reason="images are not installed")
    from loramux.diffusion.engine import ImageEngine
    from tests.image_factory import draw_all, request_for, shared_pipeline

    pipe = shared_pipeline("sdxl")
    with MklCalls() as calls:
        engine = ImageEngine(pipe)
        draw_all(engine, [request_for("sdxl", "one")])
    first, *others = calls.num_numbers
    assert first == 1 and others


def test_the_first_call_of_a_pipeline_from_a_folder_is_of_one_number(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="images are not installed")
    from loramux.diffusion.pipeline import load_pipeline
    from tests.image_factory import shared_pipeline

    shared_pipeline("sdxl").save_pretrained(tmp_path)
    with MklCalls() as calls:
        load_pipeline(tmp_path)
    assert calls.num_numbers[:1] == [1]
