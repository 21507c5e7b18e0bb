"""The sizes of a model from its config alone: no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.backend import BaseShapes, ProjectionShape
from loramux.errors import UnsupportedModel
from loramux.models.architectures import DecoderConfig, parse_config, target_modules
from loramux.models.gguf_file import Metadata, gguf_architecture, hf_config, open_gguf
from loramux.models.loader import model_name, read_config, read_json_object


@dataclass(frozen=True, slots=True)
class DescribedModel:
    name: str
    config: DecoderConfig
    shapes: BaseShapes


def describe_model(path: Path) -> DescribedModel:
    """`path`: a Hugging Face folder, a GGUF file, or a config.json without its folder."""
    config = parse_config(read_any_config(path))
    name = model_name(path.resolve().parent if path.suffix == ".json" else path)
    return DescribedModel(name, config, base_shapes(config))


def read_any_config(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise UnsupportedModel(
            f"{path} does not exist: give a Hugging Face model folder, its config.json or a "
            ".gguf file."
        )
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    return read_config(path) if path.is_dir() else read_json_object(path)


def read_gguf_config(path: Path) -> Mapping[str, Any]:
    """What config.json would say; the tensors are not touched."""
    reader = open_gguf(path)
    metadata = Metadata((name, field.contents()) for name, field in reader.fields.items())
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return hf_config(metadata, gguf_architecture(metadata), tied=tied)


def base_shapes(config: DecoderConfig) -> BaseShapes:
    projections = tuple(
        ProjectionShape(target.projection, target.in_features, target.out_features)
        for target in target_modules(config)
        if target.layer == 0
    )
    return BaseShapes(
        num_layers=config.num_layers,
        projections=projections,
        kv_token_elements=config.num_layers * 2 * config.kv_size,
        num_parameters=num_parameters(config, projections),
    )


def num_parameters(config: DecoderConfig, projections: tuple[ProjectionShape, ...]) -> int:
    hidden = config.hidden_size
    has_bias = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        "o_proj": config.o_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias),
    }
    linears = sum(
        shape.out_features * (shape.in_features + has_bias[shape.name]) for shape in projections
    )
    norms = hidden * (4 if config.sandwich_norms else 2)
    # One weight per head: the fused norm repeats what the checkpoint has once.
    head_norms = (config.q_size + config.kv_size) if config.qk_norm else 0
    embeddings = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return config.num_layers * (linears + norms + head_norms) + embeddings + hidden
