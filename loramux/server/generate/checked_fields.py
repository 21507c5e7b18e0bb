"""Checks the fields of bodies that a route does not have, and warns of those that no API has."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.context import HostContext
from loramux.server.http.body import decode, read_body
from loramux.server.http.call import Call


@dataclass(frozen=True, slots=True)
class Foreign:
    """A field that changes an answer."""

    harmless: tuple[Any, ...] = ()
    """Values that change nothing, and are accepted."""
    use: str = ""
    """What to send instead."""


_ADAPTER = Foreign(use="name the adapter in model")
_LENGTH = Foreign(use="send max_tokens")
_TIME = Foreign((0, -1), "send timeout, in seconds")
_NUM_CHOICES = Foreign((1,), "send n")
_INSIDE = Foreign(({},), "put its fields into the body itself")
_NO = Foreign()
_OFF = Foreign((False,))
_NONE_OF = Foreign(([],))
_ZERO = Foreign((0,))
_ONE = Foreign((1,))


def _each(names: str, foreign: Foreign) -> dict[str, Foreign]:
    return dict.fromkeys(names.split(), foreign)


FOREIGN_FIELDS: dict[str, Foreign] = {
    # Names of an adapter: the request must not run on the base instead.
    **_each("adapter adapter_id adapter_name adapter_source lora_dir lora_id lora_name", _ADAPTER),
    **_each("lora_path lora_request", _ADAPTER),
    "api_token": Foreign(use="send it with adapter_source, to a route that takes both"),
    "lora": Foreign(([],), "name the adapters in model or adapters"),
    "merged_adapters": Foreign(use="send adapters, adapter_weights and combination"),
    # Objects of other servers that hold fields of the body.
    **_each("extra_body generationConfig options parameters sampling_params", _INSIDE),
    # The form of the answer.
    "response_format": Foreign(({"type": "text"},)),
    **_each("ebnf format grammar json_schema regex response_schema structural_tag stop_regex", _NO),
    **_each("guided_choice guided_grammar guided_json guided_regex structured_outputs", _NO),
    "guided_whitespace_pattern": _NO,
    "tools": _NONE_OF,
    "tool_choice": Foreign(("none",)),
    "tool_prompt": _NO,
    "functions": _NONE_OF,
    "function_call": Foreign(("none",)),
    "guideline": _NO,
    "modalities": Foreign((["text"],)),
    **_each("audio prediction search_parameters web_search_options", _NO),
    **_each("plugins response_mime_type", _NO),
    "container": Foreign(use="no code runs here, so leave it out"),
    "mcp_servers": Foreign(([],), "call the server yourself, and send its functions as tools"),
    "transforms": _NONE_OF,
    "enable_search": _OFF,
    "enable_thinking": Foreign(use="send chat_template_kwargs"),
    **_each("prompt_mode thinking_budget thinking_token_budget", _NO),
    "reasoning": Foreign(({},), "send reasoning_effort"),
    "separate_reasoning": Foreign((True,)),
    "think": _OFF,
    "thinking": Foreign(({"type": "disabled"},), "send chat_template_kwargs"),
    "verbosity": Foreign(("medium",)),
    # Lengths.
    **_each("max_length max_new_tokens max_output_tokens n_predict num_predict", _LENGTH),
    **_each("max_gen_len max_gen_toks max_tokens_to_sample", _LENGTH),
    **_each("max_time t_max_predict_ms", _TIME),
    **_each("min_length min_new_tokens min_tokens", Foreign((0,), "send min_tokens")),
    **_each("ban_eos_token ignore_eos_token", Foreign((False,), "send ignore_eos")),
    **_each("truncate truncate_prompt_tokens", Foreign(use="send truncate_prompt_tokens")),
    **_each("n_keep min_keep", _ZERO),
    # Sampling.
    "allowed_token_ids": _NO,
    "bad_words": _NONE_OF,
    **_each("banned_strings banned_tokens", Foreign(([], ""), "send bad_words")),
    "custom_token_bans": Foreign(([], ""), "send logit_bias"),
    "best_of": _NO,
    **_each("n_cmpl num_return_sequences", _NUM_CHOICES),
    "do_sample": Foreign((True,), "send temperature: 0 for greedy answers"),
    **_each("stop_sequence stop_sequences stopping_strings", Foreign(([],), "send stop")),
    **_each("random_seed sampler_seed sampling_seed", Foreign(use="send seed")),
    **_each("sampler_order sampler_priority samplers", _NONE_OF),
    **_each("rep_pen repeat_penalty", Foreign((1,), "send repetition_penalty")),
    **_each("repeat_last_n repetition_penalty_range", Foreign((-1,))),
    **_each("rep_pen_range rep_pen_slope", _ZERO),
    **_each("dry_multiplier dynatemp_range mirostat mirostat_mode xtc_probability", _ZERO),
    **_each("cfg_scale guidance_scale", _ONE),
    "negative_prompt": Foreign(("",)),
    **_each("dynamic_temperature temperature_last", _OFF),
    **_each("epsilon_cutoff eta_cutoff penalty_alpha smoothing_factor top_a", _ZERO),
    "no_repeat_ngram_size": _ZERO,
    "top_n_sigma": Foreign((0, -1)),
    **_each("encoder_repetition_penalty length_penalty tfs_z typical typical_p", _ONE),
    **_each("beam_width num_beam_groups num_beams", _ONE),
    "use_beam_search": _OFF,
    "watermark": _OFF,
    "logits_processors": _NONE_OF,
    **_each("custom_logit_processor repetition_detection", _NO),
    **_each("custom_params extra_args vllm_xargs", Foreign(({},))),
    # Prompts.
    "add_special_tokens": _OFF,
    **_each("chat_template template", Foreign(use="start the server with --chat-template")),
    **_each("context history system", Foreign(("", []), "put it into the prompt or messages")),
    **_each("instructions system_prompt", Foreign(("", []), "put it into the prompt or messages")),
    "context_management": Foreign(({},)),
    "safe_prompt": _OFF,
    "add_bos_token": Foreign((True,), "send add_special_tokens"),
    "spaces_between_special_tokens": Foreign((True,)),
    **_each("input_type prompt_name", Foreign(use="put it into the input")),
    "late_chunking": _OFF,
    **_each("input_prefix input_suffix", Foreign(("",), "put it into the prompt")),
    "documents": _NONE_OF,
    "echo": _OFF,
    **_each("audio_data image_data images video_data", _NONE_OF),
    "mm_processor_kwargs": Foreign(({},)),
    **_each("input_embeds multimodal_data prompt_embeds", _NO),
    "reasoning_effort": Foreign(("none",)),
    "session_params": _NO,
    "suffix": Foreign(("",)),
    # What is reported, and when it is computed.
    "include_reasoning": Foreign((True,)),
    "decoder_input_details": Foreign((False,), "send prompt_logprobs"),
    "kv_transfer_params": Foreign(({},)),
    "logprob_token_ids": _NONE_OF,
    "n_probs": Foreign((0,), "send logprobs"),
    "post_sampling_probs": _OFF,
    "priority": _ZERO,
    "prompt_logprobs": _NO,
    "response_fields": _NONE_OF,
    "return_full_text": Foreign((False,), "send echo"),
    "return_hidden_states": _OFF,
    "return_logprob": Foreign((False,), "send logprobs"),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "token_ids_logprob": _NONE_OF,
    "top_n_tokens": Foreign((0,), "send top_logprobs"),
}  # fmt: skip

OWN_FIELDS: dict[str, Foreign] = {
    **_each("max_tokens max_completion_tokens temperature seed timeout cache_salt", _NO),
    **_each("n top_p repetition_penalty", _ONE),
    **_each("min_p frequency_penalty presence_penalty top_logprobs", _ZERO),
    "top_k": Foreign((0, -1)),
    "logit_bias": Foreign(({},)),
    **_each("stop stop_token_ids adapters", _NONE_OF),
    **_each("include_stop_str_in_output ignore_eos continue_final_message", _OFF),
    **_each("skip_special_tokens add_generation_prompt", Foreign((True,))),
    "logprobs": Foreign((False,)),
    "chat_template_kwargs": Foreign(({},)),
}
"""Fields of the own API that other bodies that generate do not have."""


NEUTRAL_FIELDS = frozenset(
    (
        # OpenAI and gateways before it
        *("metadata", "moderation", "provider", "route", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "store", "stream_options", "usage", "user"),
        *("client_metadata", "max_tool_calls", "parallel_tool_calls"),
        # Anthropic
        *("betas", "cache_control", "inference_geo"),
        # vLLM and SGLang
        *("guided_decoding_backend", "media_io_kwargs", "request_id"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
        *("log_metrics", "return_text_in_logprobs", "rid", "stream_interval", "stream_reasoning"),
        # llama.cpp; the details of samplers that are off
        *("cache_prompt", "id_slot", "return_progress", "slot_id", "t_max_prompt_ms"),
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "timings_per_token"),
        "xtc_threshold",
        # Ollama
        *("f16_kv", "keep_alive", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx"),
        *("num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "use_mlock"),
        *("rope_frequency_base", "rope_frequency_scale", "shift", "use_mmap", "vocab_only"),
    )
)
"""Fields of other servers that change no answer here."""


class UnsupportedFields:
    """The fields of the tables that are not fields of a route's body.

    A body's `inner` is the name and the type of an object in it that has fields of its own.
    """

    def __init__(self, body: type[msgspec.Struct], *, generates: bool = True) -> None:
        own = _fields(body)
        self._inner: tuple[str, type[msgspec.Struct]] | None = getattr(body, "inner", None)
        table = OWN_FIELDS | FOREIGN_FIELDS if generates else FOREIGN_FIELDS
        self._foreign = {name: one for name, one in table.items() if name not in own}
        self._plain = {_plain(name): name for name in own}
        self._silent = frozenset(own) | NEUTRAL_FIELDS

    @property
    def names(self) -> Collection[str]:
        return self._foreign.keys()

    def check(self, raw: bytes, *, num_choices: int = 1) -> list[str]:
        """Return the names of unknown fields; raises InvalidRequest for a field of the tables."""
        given = decode(raw, dict[str, msgspec.Raw])
        others = [name for name in given if name not in self._silent]
        return [name for name in others if not self._is_known(name, given[name], num_choices)]

    def nearest(self, name: str) -> list[str]:
        """Return the body's own fields whose names are like this one."""
        return difflib.get_close_matches(name, self._plain.values())

    def _is_known(self, name: str, raw: msgspec.Raw, num_choices: int) -> bool:
        """Whether a field is in the tables with a value that changes nothing."""
        foreign = self._foreign.get(name)
        if foreign is None:
            meant = self._plain.get(_plain(name))
            if meant is not None and bytes(raw) != b"null":
                raise InvalidRequest(f"{name} is no field of this route: send {meant}.", param=name)
            return False
        value = decode(bytes(raw), object)
        is_num_choices = name == "best_of" and value == num_choices
        if value is not None and value not in foreign.harmless and not is_num_choices:
            raise InvalidRequest(
                f"{name} is not supported by this route: {self._instead(name, foreign)}.",
                param=name,
            )
        return True

    def _instead(self, name: str, foreign: Foreign) -> str:
        """Return what to do, unless it would be to send a field that the route does not have
        either.
        """
        if self._inner is not None and name in _fields(self._inner[1]):
            return f"put it into {self._inner[0]}"
        sent = foreign.use.removeprefix("send ").split(" ")[0].strip(",:")
        return foreign.use if foreign.use and sent not in self._foreign else "leave it out"


def _plain(name: str) -> str:
    """Return a name without what differs between spellings such as max_tokens and maxTokens."""
    return name.replace("_", "").replace("-", "").lower()


def _fields(body: type[msgspec.Struct]) -> Collection[str]:
    return {field.encode_name for field in msgspec.structs.fields(body)}


@cache
def unsupported_in(body: type[msgspec.Struct], *, generates: bool = True) -> UnsupportedFields:
    return UnsupportedFields(body, generates=generates)


def field_table() -> str:
    """Return the tables as the documentation shows them: what to do instead, and the fields."""
    groups: dict[str, list[str]] = {}
    for name, foreign in FOREIGN_FIELDS.items():
        groups.setdefault(foreign.use or "leave it out", []).append(f"`{name}`")
    rows = [f"| {', '.join(sorted(names))} | {use} |" for use, names in sorted(groups.items())]
    own = ", ".join(f"`{name}`" for name in sorted(OWN_FIELDS))
    return "\n".join(
        ["| fields | instead |", "|---|---|", *rows, "", f"Of the own API: {own}.", ""]
    )


BodyT = TypeVar("BodyT", bound=msgspec.Struct)

MAX_NAMED = 8
"""Unknown fields that a warning names."""
MAX_NAME_CHARACTERS = 64


async def read_fields(
    context: HostContext, http: Call, kind: type[BodyT], *, generates: bool = True
) -> BodyT:
    """Decode the body; refuses fields that would change the answer and are not known."""
    raw = await read_body(http, context.options.max_body_bytes)
    http.facts.body = raw
    body = decode(raw, kind)
    check_fields(context, http, kind, raw, generates=generates)
    return body


def read_inner(
    context: HostContext,
    http: Call,
    place: str,
    fields: Mapping[str, Any] | None,
    kind: type[BodyT],
) -> BodyT:
    """Decode the object in the field `place` of a body, under the rules of the body itself."""
    raw = msgspec.json.encode(fields or {})
    check_fields(context, http, kind, raw, place=place)
    return decode(raw, kind)


def check_fields(  # noqa: PLR0913  (what differs between the routes)
    context: HostContext,
    http: Call,
    kind: type[msgspec.Struct],
    raw: bytes,
    *,
    generates: bool = True,
    num_choices: int = 1,
    place: str = "",
) -> None:
    """Raise InvalidRequest for a field that must not be ignored; what becomes of unknown fields is
    a setting.

    `place`: the field of the body that the bytes are.
    """
    table = unsupported_in(kind, generates=generates)
    unknown = table.check(raw, num_choices=num_choices)
    if not unknown or context.options.unknown_fields == "ignore":
        return
    inside = f"{place}." if place else ""
    if context.options.unknown_fields == "refuse":
        raise _refusal(table, unknown[0], inside)
    shown = ", ".join(inside + name[:MAX_NAME_CHARACTERS] for name in unknown[:MAX_NAMED])
    rest = len(unknown) - MAX_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    http.warn(f"unknown fields were ignored: {shown}{more}")


def _refusal(table: UnsupportedFields, name: str, inside: str) -> InvalidRequest:
    near = [f"{inside}{one}" for one in table.nearest(name)]
    shown = f"{inside}{name[:MAX_NAME_CHARACTERS]}"
    hint = f"Did you mean {' or '.join(near)}?" if near else "Leave it out."
    return InvalidRequest(f"{shown} is no field of this route. {hint}", param=shown)
