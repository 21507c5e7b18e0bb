"""vLLM's start flags: translated to the own ones, accepted without effect, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loramux.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Same:
    """Another name of an own flag."""

    flag: str


@dataclass(frozen=True, slots=True)
class Idle:
    """A switch that changes nothing here."""


@dataclass(frozen=True, slots=True)
class Only:
    """A flag whose value must be one of these, because the server works so anyway."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnyValue:
    """A flag whose value changes nothing here."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag that cannot be honoured, and what to do."""

    why: str


Fate = Same | Idle | Only | AnyValue | Refused
IDLE, ANY = Idle(), AnyValue()
ONE = Only(("1",))
_TLS = Refused("This server speaks plain HTTP: put a proxy with TLS in front of it.")
_PARALLEL = Refused("This server runs a model on one device.")

VLLM_FLAGS: dict[str, Fate] = {
    "--max-num-seqs": Same("--max-sequences"),
    "--max-num-batched-tokens": Same("--max-batch-tokens"),
    "--model-tag": Same("--model"),
    "--uvicorn-log-level": Same("--log-level"),
    "--allowed-origins": Same("--cors-origins"),
    "--enable-lora": IDLE,
    "--disable-log-requests": IDLE,
    "--no-enable-log-requests": IDLE,
    "--disable-log-stats": IDLE,
    "--enable-prefix-caching": IDLE,
    "--no-enable-prefix-caching": Same("--no-prefix-cache"),
    "--enable-chunked-prefill": IDLE,
    "--disable-frontend-multiprocessing": IDLE,
    "--fully-sharded-loras": IDLE,
    "--async-scheduling": IDLE,
    "--enforce-eager": IDLE,
    "--swap-space": ANY,
    "--lora-extra-vocab-size": ANY,
    "--max-log-len": ANY,
    "--tensor-parallel-size": ONE,
    "-tp": ONE,
    "--pipeline-parallel-size": ONE,
    "--data-parallel-size": ONE,
    "--lora-dtype": Only(("auto",)),
    "--kv-cache-dtype": Only(("auto",)),
    "--load-format": Only(("auto", "safetensors")),
    "--tokenizer-mode": Only(("auto",)),
    "--task": Only(("auto", "generate")),
    "--runner": Only(("auto", "generate")),
    "--generation-config": Only(("vllm",)),
    "--trust-remote-code": Refused("This server runs no code of a model: leave the flag out."),
    "--tokenizer": Refused("The tokenizer is the model's own: put its files into the folder."),
    "--quantization": Refused("The format of the weights is read from the model: leave it out."),
    "--revision": Refused("Write the revision into the model: --model org/name@revision."),
    "--seed": Refused("Send seed in each request."),
    "--chat-template": Refused("Put the chat template into the model's tokenizer_config.json."),
    "--root-path": Refused("Strip the prefix in the proxy that adds it."),
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--enable-expert-parallel": _PARALLEL,
    "--speculative-config": Refused("Speculative decoding is not supported: leave it out."),
}


def translate_vllm_flags(args: Sequence[str]) -> list[str]:
    """Returns the arguments with the own flags; raises InvalidRequest for what is refused."""
    return list(_translated(list(args)))


def _translated(args: list[str]) -> Iterator[str]:
    while args:
        arg = args.pop(0)
        name, has_value, value = arg.partition("=")
        fate = VLLM_FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)
        match fate:
            case None:
                yield arg
            case Same(flag):
                yield f"{flag}={value}" if has_value else flag
            case Refused(why):
                raise InvalidRequest(f"{name} is vLLM's. {why}")
            case Idle():
                pass
            case Only() | AnyValue():
                if not has_value:
                    value = args.pop(0) if args else ""
                if isinstance(fate, Only) and value not in fate.values:
                    raise InvalidRequest(
                        f"{name} must be {' or '.join(fate.values)} here, got {value!r}."
                    )
