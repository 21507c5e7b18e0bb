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
    "--enable-ssl-refresh": IDLE,
    # Tools, reasoning and counts of cached tokens are always there.
    "--enable-auto-tool-choice": IDLE,
    "--enable-reasoning": IDLE,
    "--enable-prompt-tokens-details": IDLE,
    "--enable-server-load-tracking": IDLE,
    "--enable-lora-bias": IDLE,
    "--enable-log-requests": IDLE,
    "--disable-uvicorn-access-log": IDLE,
    "--disable-custom-all-reduce": IDLE,
    "--disable-cascade-attn": IDLE,
    "--use-v2-block-manager": IDLE,
    "--guided-decoding-backend": ANY,
    "--structured-outputs-config": ANY,
    "--compilation-config": ANY,
    "--attention-backend": ANY,
    "--block-size": ANY,
    "--distributed-executor-backend": ANY,
    "--limit-mm-per-prompt": ANY,
    "--max-logprobs": ANY,
    "--max-seq-len-to-capture": ANY,
    "--num-scheduler-steps": ANY,
    "--swap-space": ANY,
    "--lora-extra-vocab-size": ANY,
    "--max-log-len": ANY,
    "--tensor-parallel-size": ONE,
    "-tp": ONE,
    "--pipeline-parallel-size": ONE,
    "--data-parallel-size": ONE,
    "--lora-dtype": Only(("auto",)),
    "--load-format": Only(("auto", "safetensors")),
    "--tokenizer-mode": Only(("auto",)),
    "--chat-template-content-format": Only(("auto", "string")),
    "--convert": Only(("auto", "none")),
    "--cpu-offload-gb": Only(("0",)),
    "--model-impl": Only(("auto",)),
    "--response-role": Only(("assistant",)),
    "--scheduling-policy": Only(("fcfs",)),
    "--task": Only(("auto", "generate")),
    "--runner": Only(("auto", "generate")),
    "--generation-config": Only(("vllm",)),
    "--trust-remote-code": Refused("This server runs no code of a model: leave the flag out."),
    "--tokenizer": Refused("The tokenizer is the model's own: put its files into the folder."),
    "--revision": Refused("Write the revision into the model: --model org/name@revision."),
    "--seed": Refused("Send seed in each request."),
    "--return-tokens-as-token-ids": Refused("Send return_tokens_as_token_ids in each request."),
    "--override-generation-config": Refused("Send the parameters in each request."),
    "--trust-request-chat-template": Refused("Give the template at the start: --chat-template."),
    "--long-lora-scaling-factors": Refused("Long LoRA is not supported: leave it out."),
    "--logits-processors": Refused("This server runs no code of others: leave it out."),
    "--hf-overrides": Refused("Change config.json in the model's folder."),
    "--download-dir": Refused("Set HF_HOME, the cache of the hub."),
    "--allow-credentials": Refused("Pages of other origins send no cookies here: leave it out."),
    "--enable-expert-parallel": _PARALLEL,
}


def translate_vllm_flags(args: Sequence[str]) -> list[str]:
    """Return the arguments with the own flags; raise InvalidRequest for what is refused."""
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
