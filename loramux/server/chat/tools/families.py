"""How models write tool calls: one table, from which grammar, parser and history are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The texts around the names and arguments of calls: opening, call, separator, …, closing.

    A call is `before_name`, the name, `before_arguments`, the arguments as JSON, `after_call`.
    """

    name: str
    opening: str = ""
    before_name: str
    before_arguments: str
    after_call: str
    separator: str
    closing: str = ""
    marks: tuple[str, ...] = ()
    """Parts of these texts that are one token in the models that know them."""
    text_precedes: bool = True
    """Whether text may stand before the calls; otherwise an answer is either text or calls."""
    wraps_text: bool = False
    """Whether text is written as a JSON object too."""
    one_call: bool = False
    """Whether an answer has at most one call."""
    short_ids: bool = False
    """Whether the template takes ids of nine letters and digits only."""
    reads_tools: bool = True
    """Whether the chat template lists the tools; otherwise a system message does."""

    @property
    def begin(self) -> str:
        """The text that begins the first call."""
        return self.opening + self.before_name


HERMES = Family(
    name="hermes",
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_call="}\n</tool_call>",
    separator="\n",
    marks=("<tool_call>", "</tool_call>"),
)
LLAMA3 = Family(
    name="llama3_json",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_call="}",
    separator="; ",
    text_precedes=False,
)
MISTRAL = Family(
    name="mistral",
    opening="[TOOL_CALLS][",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_call="}",
    separator=", ",
    closing="]",
    marks=("[TOOL_CALLS]",),
    short_ids=True,
)
MISTRAL_ARGS = Family(
    name="mistral_args",
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_call="",
    separator="",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    short_ids=True,
)
GENERIC = Family(
    name="generic",
    before_name='{"tool_call": {"name": "',
    before_arguments='", "arguments": ',
    after_call="}}",
    separator="",
    text_precedes=False,
    wraps_text=True,
    one_call=True,
    reads_tools=False,
)
TEXT_BEGIN, TEXT_END = '{"response": ', "}"
"""Around the text of a family that wraps it, which is a JSON string."""
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, GENERIC)} | {
    "qwen": HERMES
}
# Formats that have the tags of Hermes and no JSON between them.
_OTHER_FORMATS = ("<function=", "<arg_key>", "<parameter=")


@runtime_checkable
class ToolCodec(Protocol):
    """A codec that also shows its chat template and the ids of its added tokens."""

    def tokenizer_info(self) -> dict[str, Any]: ...

    def added_token_id(self, text: str) -> int | None: ...


def find_family(codec: TextCodec, override: str | None = None) -> Family:
    """Return the family of a base model: `override` by its name, else by the chat template."""
    return family_of_template(template_of(codec)) if override is None else family_named(override)


def family_named(name: str) -> Family:
    if name not in FAMILIES:
        raise InvalidRequest(
            f"--tool-call-parser: there is no format {name!r}. {suggest(name, list(FAMILIES))}",
            param="tool_call_parser",
        )
    return FAMILIES[name]


def family_of_template(template: str) -> Family:
    """Return the family whose calls a chat template writes; GENERIC if it is none of them."""
    if "tools" not in template or any(text in template for text in _OTHER_FORMATS):
        return GENERIC
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA3
    return GENERIC


def token_of(codec: TextCodec, text: str) -> int | None:
    """Return the id of an added token with this text; None if there is none."""
    return codec.added_token_id(text) if isinstance(codec, ToolCodec) else None


def template_of(codec: TextCodec) -> str:
    """Return the text of the chat template, or of all of them; empty if there is none."""
    if not isinstance(codec, ToolCodec):
        return ""
    template = codec.tokenizer_info().get("chat_template")
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""
