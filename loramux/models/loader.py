"""Loads a decoder from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loramux.errors import UnsupportedModel
from loramux.kernels.cpu.vector_math import detect_cpu
from loramux.models.architectures import DecoderConfig, parse_config
from loramux.models.checkpoint import checkpoint_slots
from loramux.models.decoder import Decoder
from loramux.models.digests import model_digest
from loramux.models.folder import (
    config_files,
    eos_token_ids,
    listed,
    model_name,
    read_config,
    weight_files,
)
from loramux.models.gguf_file import converted_folder
from loramux.models.linear_method import StoredFormats, quantisation_at_load
from loramux.models.packed_slots import PackedSlot
from loramux.models.quantised.checkpoint import (
    PackedRead,
    dequantised_weights,
    packed_modules,
)
from loramux.models.tensor_files import NamedRead, stored_weights
from loramux.models.text_config import text_config
from loramux.types.vision import text_name

Progress = Callable[[str, float], None]

# Buffers in old checkpoints that are recomputed from the config.
DERIVED_TENSORS = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    decoder: Decoder
    config: DecoderConfig
    name: str
    tokenizer_folder: Path
    """Holds tokenizer.json, and tokenizer_config.json with the chat template."""
    eos_token_ids: tuple[int, ...]
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    reading: Future[str]
    """Done when all weights are in the decoder; its result is the digest."""

    @property
    def digest(self) -> str:
        """Identity of config and weights: sha256:<hex>. Waits until the weights are read."""
        return self.reading.result()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    max_model_len: int | None = None
    """The context that is served; None for the longest."""
    quantization: str = "none"
    """The format that the weights of the layers are kept in."""


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | Callable[[DecoderConfig], torch.dtype],
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    before_reading: Callable[[Decoder], None] | None = None,
    options: LoadOptions | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder with safetensors, or a GGUF file, which is converted once.

    dtype: a function chooses it from the config
    before_reading: changes the decoder's linears while their weights are undefined; the weights are
    then read on a thread, see LoadedModel.reading
    """
    options = options or LoadOptions()
    detect_cpu()
    folder = converted_folder(path, progress=progress) if path.suffix == ".gguf" else path
    hf_config = text_config(read_config(folder))
    config = parse_config(read_config(folder), max_model_len=options.max_model_len)
    files = weight_files(folder)
    chosen = dtype if isinstance(dtype, torch.dtype) else dtype(config)
    kept = quantisation_at_load(options.quantization, torch.device(device), chosen)
    if kept is None and config.quantisation is not None:
        kept = StoredFormats(config.quantisation, packed_modules(files, config.quantisation))
    decoder = Decoder(config, dtype=chosen, device=device, quantisation=kept)
    if before_reading is not None:
        before_reading(decoder)
    read = partial(read_weights, decoder, folder, files, progress=progress)
    return LoadedModel(
        decoder=decoder.eval(),
        config=config,
        name=model_name(path),
        tokenizer_folder=folder,
        eos_token_ids=eos_token_ids(folder, hf_config),
        hf_config=hf_config,
        reading=done(read()) if before_reading is None else on_thread(read),
    )


def read_weights(
    decoder: Decoder, folder: Path, files: list[Path], *, progress: Progress | None = None
) -> str:
    """Fill the decoder, and return the digest, which is computed meanwhile."""
    digest = on_thread(lambda: model_digest(config_files(folder), files))
    fill(decoder, files, progress=progress)
    return digest.result()


def on_thread(work: Callable[[], str]) -> Future[str]:
    """Run the work on a daemon thread, which does not keep a process alive that has failed."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="model files").start()
    return future


def done(digest: str) -> Future[str]:
    """Return the finished reading of a model with this digest."""
    future: Future[str] = Future()
    future.set_result(digest)
    return future


def fill(decoder: Decoder, files: list[Path], *, progress: Progress | None = None) -> None:
    """Copy every tensor to its slot; raise UnsupportedModel for missing or extra ones."""
    slots = checkpoint_slots(decoder)
    num_slots = len(slots)
    extra: list[str] = []
    for name, read in weights_of(decoder, files):
        path = text_name(name) if decoder.config.is_vision_model else name
        if path is None:
            continue  # a tensor of the image encoder
        # A model without a head has no prefix.
        slot = slots.pop(path, None) or slots.pop(f"model.{path}", None)
        if slot is None:
            extra.append(name)
            continue
        if isinstance(read, PackedRead) and isinstance(slot, PackedSlot):
            slot.fill_packed(read)
        else:
            slot.fill(name, read())
        if progress is not None:
            progress("Loading weights", 1 - len(slots) / num_slots)
    ignored = {"lm_head.weight"} if decoder.config.tie_embeddings else set()
    extra = [n for n in extra if n not in ignored and not DERIVED_TENSORS.search(n)]
    if slots:
        raise UnsupportedModel(f"The weights lack {listed(sorted(slots))}.")
    if extra:
        raise UnsupportedModel(
            f"The weights hold tensors that {decoder.config.architecture} does not have, or has "
            f"twice: {listed(sorted(extra))}."
        )


def weights_of(decoder: Decoder, files: list[Path]) -> Iterator[NamedRead]:
    """Yield the names of all weights with functions that read them in floating point."""
    quantisation = decoder.config.quantisation
    if quantisation is None:
        return stored_weights(files)
    return dequantised_weights(files, quantisation, decoder.norm.weight.device)
