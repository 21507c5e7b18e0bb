"""Resolves the names in a request to the base, to an adapter, or to a sum of adapters."""

from __future__ import annotations

import asyncio
import difflib
import os.path
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from loramux.adapters.identity import CID_PREFIX, is_digest_start
from loramux.adapters.peft.folder import short_base_name
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.recipe import SUM_METHOD, CombinationOptions, check_options, make_recipe
from loramux.backend.text import TextCodec
from loramux.base.threads import QUERIES
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest
from loramux.registry.records import Resolved
from loramux.server.context import Context, HostContext
from loramux.server.errors import Forbidden, NotServed
from loramux.server.generate.prompts import split_prompts
from loramux.server.naming.combinations import open_version
from loramux.server.naming.names import (
    NamedAdapter,
    Selected,
    check_distinct,
    check_expected,
    full_name,
)
from loramux.server.naming.view import View
from loramux.types.adapter import vocab_size_of
from loramux.types.caller import Caller
from loramux.types.composition import (
    Term,
    check_count,
    check_weights,
    parse_sum,
    sum_text,
)
from loramux.types.modality import Modality
from loramux.wire.text import GenerationBody, OpenAiBody

MAX_LISTED = 1000
"""Adapters of the registry in a list of models; requests may name the others too."""
MAX_NAMES = 10_000
"""Names that are compared with the one of a request."""
MAX_CHARACTERS = 200
MAX_SHOWN = 3
_MAX_LOOSE = 200
"""Names among which also those are found that differ in several places."""


async def hint_for(context: HostContext, view: View, text: str) -> str:
    """Return sentences for an error message, each with a space before it; empty: there are none."""
    hints = []
    unloaded_s = context.names.unloaded_s(text) if view.sees_given(text) else None
    if unloaded_s is not None:
        when = datetime.fromtimestamp(unloaded_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        hints.append(f" It was unloaded at {when}: load it again.")
    if len(text) <= MAX_CHARACTERS:
        known = await _known(context, view)
        near = await asyncio.to_thread(nearest, text, known)
        if near:
            hints.append(f" Did you mean {' or '.join(near)}?")
    return "".join(hints)


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that are one slip away or equal but for their tenant, version or case.

    Among few names, also those that are alike.
    """
    known = list(dict.fromkeys(known))
    plain = _plain(text)
    found = [name for name in known if name != text and _is_near(plain, _plain(name))]
    if not found and len(known) <= _MAX_LOOSE:
        found = difflib.get_close_matches(text, known, n=MAX_SHOWN)
    return found[:MAX_SHOWN]


async def _known(context: HostContext, view: View) -> list[str]:
    names = list(context.base_names) if view.caller.may_use_base else []
    for given in context.names.given()[:MAX_NAMES]:
        if view.sees_given(given.name):
            names.append(given.name)
    if context.registry is not None:
        found = await QUERIES.run(context.registry.names_in, view, limit=MAX_LISTED)
        names += [str(adapter) for adapter in found]
    return names


def _plain(name: str) -> str:
    """Return the last part of a name, without version or tag, in lower case."""
    return name.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()


def _is_near(one: str, other: str) -> bool:
    """Whether two texts are equal, or one letter was changed, left out, added or swapped."""
    longest = max(len(one), len(other))
    if longest - min(len(one), len(other)) > 1:
        return False
    if one == other:
        return bool(one)
    start = len(os.path.commonprefix((one, other)))
    end = len(os.path.commonprefix((one[start:][::-1], other[start:][::-1])))
    left, right = one[start : len(one) - end], other[start : len(other) - end]
    is_swapped = len(left) == 2 and left == right[::-1]
    return longest > 2 and (max(len(left), len(right)) <= 1 or is_swapped)


# Refusals after which the files of an adapter are fetched or read again.
_MISSING_FILES = ("changed_on_disk", RefusalCode.UNREADABLE)
# A sum of eight names with their weights.
MAX_NAME_CHARACTERS = 16_384
BASE_WORDS = ("dummy", "tgi")
"""Models that clients send if none was chosen; the base, unless an adapter has the name."""


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The fields of a body that name what is to answer: `model` or `artifact`, and `adapters`."""

    model: str | None = None
    adapters: Sequence[str] | None = None
    adapter_weights: Sequence[float] | None = None
    param: str = "model"
    """The field that `model` was read from."""
    own_base_only: bool = False
    """An adapter that records another base is refused even if its shapes fit."""
    combination: CombinationOptions | None = None
    """How several adapters are combined; None: their deltas are added."""

    @property
    def names_nothing(self) -> bool:
        """Whether the client chose no model; an empty list of adapters is a choice."""
        return self.adapters is None and (not self.model or self.model in BASE_WORDS)

    def __str__(self) -> str:
        return "+".join(self.adapters or ()) or self.model or ""


async def select(context: HostContext, reference: ModelReference, *, caller: Caller) -> Selected:
    """`adapters` takes precedence over `model`; both must name something that is served."""
    selected = await _select_parts(context, reference, caller)
    if reference.combination is None:
        return selected
    return await _combine(context, selected, reference.combination, caller)


def combination_of(body: GenerationBody) -> CombinationOptions | None:
    """Return the combination that a body asks for; None: the deltas are added.

    Raises InvalidRequest for parameters without a method that uses them.
    """
    with _naming_body_fields():
        options = check_options(
            CombinationOptions(
                method=body.combination or SUM_METHOD,
                density=body.density,
                majority_sign_method=body.majority_sign_method,
                seed=body.combination_seed,
                svd_rank=body.svd_rank,
            )
        )
    return None if options.method == SUM_METHOD else options


@contextmanager
def _naming_body_fields() -> Iterator[None]:
    """Names the field of the body in errors about a recipe."""
    try:
        yield
    except InvalidRequest as error:
        param = {"weights": "adapter_weights", "seed": "combination_seed"}.get(
            error.param or "", error.param
        )
        raise InvalidRequest(str(error), param=param) from error


async def _combine(
    context: HostContext, selected: Selected, options: CombinationOptions, caller: Caller
) -> Selected:
    """Return the selection of the one adapter that the selected ones are combined to."""
    if context.combinations is None:
        raise InvalidRequest(
            f"This server adds adapters up, and makes no combination by {options.method}.",
            param="combination",
        )
    parts = selected.adapters
    _refuse_recipes(parts)
    with _naming_body_fields():
        recipe = make_recipe([part.cid for part in parts], [part.weight for part in parts], options)
    try:
        card = await context.combinations.add(recipe)
    except AdapterRefused as error:
        reason = error.reason
        for part in parts:
            reason = reason.replace(part.cid, part.full_name)
        raise AdapterRefused(error.code, reason, fix=error.fix) from error
    shown = f"{options.method}({sum_text((part.full_name, part.weight) for part in parts)})"
    combined = NamedAdapter(shown, card.cid, recipe=recipe, parts=parts)
    context.names.add_combination(combined, tenant=caller.tenant)
    return Selected(selected.model, (combined,))


def _refuse_recipes(parts: Sequence[NamedAdapter]) -> None:
    """Refuses recipes as parts of a combination, which is made of adapters with files."""
    for part in parts:
        resolved = part.part_of or part.resolved
        if resolved is not None and resolved.recipe is not None:
            raise InvalidRequest(
                f"{full_name(resolved)} is itself a recipe, {resolved.recipe}. Name its parts.",
                param="adapters",
            )


async def _select_parts(
    context: HostContext, reference: ModelReference, caller: Caller
) -> Selected:
    _check_length(reference.model, reference.param)
    for name in reference.adapters or ():
        _check_length(name, "adapters")
    finder = _finder(context, caller, own_base_only=reference.own_base_only)
    selected = await finder.select_model(reference.model, param=reference.param)
    if reference.adapters is None:
        if reference.adapter_weights is not None:
            raise InvalidRequest(
                "adapter_weights needs adapters to go with.", param="adapter_weights"
            )
        return selected
    terms = _terms(reference.adapters, reference.adapter_weights)
    if not terms:
        return Selected(context.base_names[0]) if selected.adapters else selected
    shown = terms[0][0] if len(terms) == 1 else sum_text(terms)
    return Selected(shown, await finder.find_all(terms, param="adapters"))


async def select_model(context: HostContext, model: str | None, *, caller: Caller) -> Selected:
    """Return what a name selects: the base, an adapter, or a sum such as `a+0.3*b`."""
    _check_length(model, "model")
    return await _finder(context, caller).select_model(model, param="model")


def _check_length(name: str | None, param: str) -> None:
    if name is not None and len(name) > MAX_NAME_CHARACTERS:
        raise NotServed(f"The {param} `{name[:100]}…` does not exist.", param=param)


def vocab_size_for(context: Context, selected: Selected) -> int:
    """Return the number of token ids that the selection can read and write."""
    known = context.backend.adapters
    cards = [known[cid] for cid, _ in selected.selection if cid in known]
    return vocab_size_of(cards, context.backend.card.vocab_size)


async def codec_for(context: Context, selected: Selected) -> TextCodec:
    """Return the tokenizer of the selection; missing files are restored, as those of a load."""
    backend, selection = context.backend, selected.selection
    try:
        return await backend.codec_for(selection)
    except (AdapterRefused, AdapterNotFound) as error:
        if isinstance(error, AdapterRefused) and error.code not in _MISSING_FILES:
            raise
        restored = [await context.names.restore(cid) for cid, _ in selection]
        if not any(restored):
            raise
    return await backend.codec_for(selection)


async def find_named(
    context: HostContext, text: str, *, param: str, caller: Caller
) -> tuple[NamedAdapter, ...] | None:
    """Return the adapters of a name, which the host has afterwards; None if there are none."""
    return await _finder(context, caller).find(text, param=param)


def check_base(selected: Selected, caller: Caller) -> None:
    """Raise Forbidden if the base alone would answer and the caller may not use it."""
    if not (caller.may_use_base or selected.used):
        raise Forbidden("This key may not use the base without an adapter. Name an adapter.")


def _finder(context: HostContext, caller: Caller, *, own_base_only: bool = False) -> _Finder:
    return _Finder(context, caller, context.view_of(caller), own_base_only=own_base_only)


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the adapters that one caller names."""

    context: HostContext
    caller: Caller
    view: View
    own_base_only: bool = False

    async def select_model(self, model: str | None, *, param: str) -> Selected:
        """Read the model as a single name, and as a sum if no such name was given.

        Names of the registry cannot be taken for sums: they have neither `+` nor `*`.
        """
        context = self.context
        if not model or model in context.base_names:
            return Selected(context.base_names[0])
        is_given = self.view.sees_given(model) and context.names.find(model) is not None
        inner = None if is_given else _after_base(context, model)
        if inner is not None:
            return replace(await self.select_model(inner, param=param), model=model)
        terms = None if is_given else parse_sum(model)
        if terms is None:
            found = await self.find(model, param=param)
            if found is None and model in BASE_WORDS:
                return Selected(context.base_names[0])
            if found is None:
                raise await self._unknown(f"The {param}", model, param)
            context.names.check_alone(found, param=param)
            return Selected(model, found)
        check_count(len(terms), param=param)
        check_weights((weight for _, weight in terms), param=param)
        return Selected(model, await self.find_all(terms, param=param))

    async def find_all(self, terms: Sequence[Term], *, param: str) -> tuple[NamedAdapter, ...]:
        """Find all terms of a sum at once; each must be another adapter.

        A term that is itself a sum of the registry stands for its weighted parts.
        """
        results = await asyncio.gather(
            *(self.find(name, param=param) for name, _ in terms), return_exceptions=True
        )
        adapters: list[NamedAdapter] = []
        for (name, weight), found in zip(terms, results, strict=True):
            if isinstance(found, BaseException):
                raise found
            if found is None:
                raise await self._unknown("The adapter", name, param)
            adapters += [replace(one, weight=weight * one.weight) for one in found]
        check_count(len(adapters), param=param)
        check_weights((one.weight for one in adapters), param=param)
        check_distinct(adapters, param=param)
        self.context.names.check_alone(adapters, param=param)
        return tuple(adapters)

    async def find(self, text: str, *, param: str) -> tuple[NamedAdapter, ...] | None:
        """Return the adapters of a name, which the host has afterwards; None if there are none.

        There is one, except for a sum of the registry.
        """
        context = self.context
        if text in context.base_names:
            return None
        expected = (self.caller.expected or {}).get(text)
        # No content is allowed: the name is that of an adapter that was unloaded elsewhere.
        is_hidden = expected is not None and not expected
        may_be_given = not is_hidden and self.view.sees_given(text)
        given = await context.names.identify(text) if may_be_given else None
        if given is not None and given.cid is not None:
            check_expected(text, given.cid, expected)
            return (NamedAdapter(text, given.cid, given.name, expected=expected),)
        resolved = await self._resolve(text, param)
        if resolved is not None and resolved.modality != context.modality:
            raise other_modality(full_name(resolved), resolved.modality)
        folder = context.folder if may_be_given else None
        if resolved is None and folder is not None and await folder.find(text):
            return await self.find(text, param=param)
        if resolved is None:
            if may_be_given:
                _refuse_foreign(context, text)
            found = _find_by_cid(context, text, param, self.view)
            return None if found is None else (found,)
        if self.own_base_only:
            _require_own_base(context, resolved)
        return await open_version(context.names, context.combinations, resolved, text)

    async def _unknown(self, what: str, name: str, param: str) -> NotServed:
        hint = await hint_for(self.context, self.view, name)
        missed = self.context.missed_registry
        return NotServed(f"{what} `{name}` does not exist.{hint}{missed}", param=param)

    async def _resolve(self, text: str, param: str) -> Resolved | None:
        registry = self.context.registry
        if registry is None:
            return None
        try:
            return await registry.resolve(text, sticky_key=self.caller.sticky_key, view=self.view)
        except AdapterNotFound:
            return None
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param) from error


def _refuse_foreign(context: HostContext, text: str) -> None:
    """Refuses the given name of an adapter of another model of this server."""
    for modality, names in context.foreign.items():
        if names.find(text) is not None:
            raise other_modality(text, modality)


def other_modality(name: str, modality: Modality) -> AdapterRefused:
    """Return the refusal of an adapter on a route of another model than its own."""
    route = "/v1/images/generations" if modality == "image" else "/v1/chat/completions"
    return AdapterRefused(
        "other_modality",
        f"{name} is an adapter of {'an image' if modality == 'image' else 'a text'} model.",
        fix=f"Post to {route}.",
    )


def _require_own_base(context: HostContext, resolved: Resolved) -> None:
    recorded, card = resolved.base_model, context.backend.card
    if recorded is None:
        return
    own = {short_base_name(name) for name in (card.name, card.path, *context.base_names)}
    if short_base_name(recorded) not in own:
        raise AdapterRefused(
            "other_base",
            f"{full_name(resolved)} was made for the base {recorded[:200]!r}, and this server has "
            f"{context.base_names[0]!r}.",
            fix="Send it to a server of its own base.",
        )


def _find_by_cid(context: HostContext, text: str, param: str, view: View) -> NamedAdapter | None:
    """Find a given or combined adapter by its CID or a unique prefix of it."""
    digits = text.removeprefix(CID_PREFIX)
    if not is_digest_start(digits):
        return None
    start = CID_PREFIX + digits
    combined = () if context.combinations is None else context.combinations.recipes
    # A tenant names a combination by its parts, which may be shared with it no longer.
    made = combined if view.is_whole else ()
    found: dict[str, str | None] = {cid: None for cid in made if cid.startswith(start)}
    for given in context.names.given():
        is_meant = given.cid is not None and given.cid.startswith(start)
        if is_meant and given.cid is not None and view.sees_given(given.name):
            found[given.cid] = given.name
    if len(found) > 1:
        raise InvalidRequest(
            f"{len(found)} content ids begin with {CID_PREFIX}{digits}. Give more digits.",
            param=param,
        )
    return next((NamedAdapter(text, cid, name) for cid, name in found.items()), None)


def openai_reference(
    context: Context, body: OpenAiBody, *, prompts: str | list[Any] = ""
) -> ModelReference:
    """Return what a body of OpenAI's routes names, by `model`, `adapters` or SGLang's `lora_path`.

    As with SGLang, `base:adapter` in `model` precedes `lora_path`.
    """
    model, param = body.model, "model"
    adapter = _lora_path(body.lora_path, prompts)
    if adapter is not None and (model is None or _after_base(context, model) is None):
        is_base = not model or model in (*context.base_names, *BASE_WORDS)
        if not is_base or body.adapters is not None:
            raise InvalidRequest(
                "lora_path names an adapter, and so does "
                f"{'adapters' if is_base else 'model'}. Send one of them.",
                param="lora_path",
            )
        model, param = adapter, "lora_path"
    return ModelReference(
        model, body.adapters, body.adapter_weights, param=param, combination=combination_of(body)
    )


def _lora_path(asked: str | list[str | None] | None, prompts: str | list[Any]) -> str | None:
    if not isinstance(asked, list):
        return asked or None
    num_prompts = len(split_prompts(prompts))
    if len(asked) != num_prompts:
        raise InvalidRequest(
            f"lora_path has {len(asked)} entries for {num_prompts} prompts.", param="lora_path"
        )
    if len(set(asked)) > 1:
        raise InvalidRequest(
            "lora_path must name one adapter for all prompts of this route: send them apart, or "
            "use /generate.",
            param="lora_path",
        )
    return asked[0] or None


def _after_base(context: HostContext, model: str) -> str | None:
    """Return the adapter of `base:adapter`, as SGLang and Ray write it; None: another form."""
    for name in sorted(context.base_names, key=len, reverse=True):
        if model.startswith(f"{name}:"):
            return model[len(name) + 1 :]
    return None


def _terms(adapters: Sequence[str], weights: Sequence[float] | None) -> list[Term]:
    check_count(len(adapters), param="adapters")
    if weights is None:
        return [(name, 1.0) for name in adapters]
    if len(weights) != len(adapters):
        raise InvalidRequest(
            f"adapter_weights has {len(weights)} entries for {len(adapters)} adapters.",
            param="adapter_weights",
        )
    check_weights(weights, param="adapter_weights")
    return list(zip(adapters, weights, strict=True))
