"""The recipe of a combined adapter: its parts, their weights and the method, with a digest.

A recipe has one canonical form whatever the order in which its parts were named, so that its digest
identifies the combination before it is made. This module imports neither torch nor the PEFT reader.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from loramux.adapters.identity import CID_PREFIX, parse_cid
from loramux.base.canonical_json import MAX_EXACT_INTEGER, canonical_json
from loramux.errors import InvalidRequest, suggest

FORMAT = "loramux-merge/1"
RECIPE_KEY = "loramux_recipe"
"""The key of the safetensors metadata of a combined adapter that holds its recipe."""
SUM_METHOD = "cat"
"""The method whose result is exactly the weighted sum."""
MAX_PARTS = 16
MAX_SVD_RANK = 2**15
DTYPES = ("float32", "bfloat16", "float16")
SIGN_METHODS = ("total", "frequency")
MAX_RECIPE_CHARS = 2**16
# Refusal codes of sound adapters that a method cannot combine.
UNEQUAL_RANKS = "unequal_ranks"
ONLY_ALONE = "only_alone"

SignMethod = Literal["total", "frequency"]


@dataclass(frozen=True, slots=True)
class Method:
    """A combination method of PEFT: what it prunes, how it adds up, and on which tensors."""

    name: str
    pruning: Literal["none", "magnitude", "random"] = "none"
    votes: bool = False
    """Whether the parts elect a sign for each element (TIES)."""
    on_deltas: bool = False
    """Whether it works on scale * B @ A and cuts the sum to a rank (SVD), or on A and B alone."""

    @property
    def needs_equal_ranks(self) -> bool:
        return not self.on_deltas and self.name != "cat"


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("cat"),
        Method("linear"),
        Method("magnitude_prune", pruning="magnitude"),
        Method("ties", pruning="magnitude", votes=True),
        Method("dare_linear", pruning="random"),
        Method("dare_ties", pruning="random", votes=True),
        Method("svd", on_deltas=True),
        Method("magnitude_prune_svd", pruning="magnitude", on_deltas=True),
        Method("ties_svd", pruning="magnitude", votes=True, on_deltas=True),
        Method("dare_linear_svd", pruning="random", on_deltas=True),
        Method("dare_ties_svd", pruning="random", votes=True, on_deltas=True),
    )
}


@dataclass(frozen=True, slots=True)
class Part:
    cid: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationOptions:
    """The parameters of a combination beside its parts; a field that is not set is None."""

    method: str = "cat"
    density: float | None = None
    majority_sign_method: str | None = None
    seed: int | None = None
    svd_rank: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A checked combination; `make_recipe` makes it."""

    parts: tuple[Part, ...]
    """Sorted by CID; no CID occurs twice."""
    method: Method
    density: float | None
    """The share of elements that pruning keeps, in (0, 1]; None unless the method prunes."""
    majority_sign_method: SignMethod | None
    """None unless the method votes."""
    seed: int | None
    """The seed of random pruning; None unless the method prunes at random."""
    svd_rank: int | None
    """The rank of the result of an SVD method; None: the largest rank of a part."""
    dtype: str
    """The dtype of the tensors of the result."""

    def to_dict(self) -> dict[str, object]:
        """Return the canonical form; parameters without a value are left out."""
        optional = {
            "density": self.density,
            "majority_sign_method": self.majority_sign_method,
            "seed": self.seed,
            "svd_rank": self.svd_rank,
        }
        return {
            "format": FORMAT,
            "method": self.method.name,
            "parts": [{"cid": part.cid, "weight": part.weight} for part in self.parts],
            "dtype": self.dtype,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def encode(self) -> bytes:
        return canonical_json(self.to_dict())

    @property
    def cid(self) -> str:
        """The derived id: the digest of the recipe, with the prefix of a CID."""
        return CID_PREFIX + hashlib.sha256(self.encode()).hexdigest()


def make_recipe(
    cids: Sequence[str],
    weights: Sequence[float] | None = None,
    options: CombinationOptions | None = None,
) -> Recipe:
    """Check the parameters and return the recipe; raise InvalidRequest with the fix.

    Without `weights` each part has weight 1.
    """
    options = check_options(options or CombinationOptions())
    return Recipe(
        parts=_make_parts(cids, [1.0] * len(cids) if weights is None else weights),
        method=METHODS[options.method],
        density=options.density,
        majority_sign_method=cast("SignMethod | None", options.majority_sign_method),
        seed=options.seed,
        svd_rank=options.svd_rank,
        dtype=options.dtype,
    )


def check_options(options: CombinationOptions) -> CombinationOptions:
    """Return the options with the defaults of the method; raise InvalidRequest with the fix."""
    method = find_method(options.method)
    return CombinationOptions(
        method=method.name,
        density=_check_density(method, options.density),
        majority_sign_method=_check_sign_method(method, options.majority_sign_method),
        seed=_check_seed(method, options.seed),
        svd_rank=_check_svd_rank(method, options.svd_rank),
        dtype=_check_dtype(options.dtype),
    )


def decode_recipe(text: str | bytes) -> Recipe:
    """Decode the canonical form; raise InvalidRequest for any other text."""
    try:
        if len(text) > MAX_RECIPE_CHARS:
            raise ValueError(f"it is longer than {MAX_RECIPE_CHARS} characters")
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}")
        parts = [(part["cid"], part["weight"]) for part in fields["parts"]]
        options = {k: v for k, v in fields.items() if k not in ("format", "parts")}
        recipe = make_recipe(
            [cid for cid, _ in parts],
            [weight for _, weight in parts],
            CombinationOptions(**options),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"The text is not a recipe of {FORMAT}: {error}.") from error
    return recipe


def find_recipe(metadata: Mapping[str, object]) -> Recipe | None:
    """Return the recipe in the metadata of a weights file; None if there is no valid one."""
    text = metadata.get(RECIPE_KEY)
    if not isinstance(text, str):
        return None
    try:
        return decode_recipe(text)
    except InvalidRequest:
        return None


def find_method(name: str) -> Method:
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise InvalidRequest(
            f"{name!r} is not a combination method. {suggest(str(name), list(METHODS))}",
            param="combination",
        )
    return method


def check_weights(num_parts: int, weights: Sequence[float]) -> None:
    """Raise InvalidRequest unless these are the weights of a combination of so many adapters."""
    if not 2 <= num_parts <= MAX_PARTS:
        raise InvalidRequest(
            f"A combination has 2 to {MAX_PARTS} adapters; {num_parts} given.", param="adapters"
        )
    if len(weights) != num_parts:
        raise InvalidRequest(
            f"{num_parts} adapters and {len(weights)} weights given. Give one weight for each "
            "adapter, in the same order.",
            param="weights",
        )
    for weight in weights:
        if not _is_number(weight) or not math.isfinite(weight):
            raise InvalidRequest(f"{weight!r} is not a finite number.", param="weights")
    if all(weight == 0 for weight in weights):
        raise InvalidRequest(
            "All weights are 0, so the combination would change nothing.", param="weights"
        )


def _make_parts(cids: Sequence[str], weights: Sequence[float]) -> tuple[Part, ...]:
    check_weights(len(cids), weights)
    for cid in cids:
        parse_cid(cid)
    _refuse_repeated(cids)
    # -0.0 + 0.0 is 0.0, so that both zeros have one form.
    parts = (Part(cid, float(weight) + 0.0) for cid, weight in zip(cids, weights, strict=True))
    return tuple(sorted(parts, key=lambda part: part.cid))


def _refuse_repeated(cids: Iterable[str]) -> None:
    seen: set[str] = set()
    for cid in cids:
        if cid in seen:
            raise InvalidRequest(
                f"The adapter {cid} is given twice. Give it once, with its whole weight.",
                param="adapters",
            )
        seen.add(cid)


def _check_density(method: Method, density: float | None) -> float | None:
    if method.pruning == "none":
        _refuse_unused(method, "density", density, "prunes nothing")
        return None
    if density is None:
        raise InvalidRequest(
            f"{method.name} needs a density: the share of elements to keep, such as 0.5.",
            param="density",
        )
    if not _is_number(density) or not 0 < density <= 1:
        raise InvalidRequest(
            f"The density must be over 0 and at most 1; {density!r} given.", param="density"
        )
    return float(density)


def _check_sign_method(method: Method, sign_method: str | None) -> str | None:
    if not method.votes:
        _refuse_unused(method, "majority_sign_method", sign_method, "elects no sign")
        return None
    if sign_method is None:
        return "total"
    if sign_method not in SIGN_METHODS:
        raise InvalidRequest(
            f"{sign_method!r} is not a majority_sign_method. Valid values: total, frequency.",
            param="majority_sign_method",
        )
    return sign_method


def _check_seed(method: Method, seed: int | None) -> int | None:
    if method.pruning != "random":
        _refuse_unused(method, "seed", seed, "is not random")
        return None
    if seed is None:
        return 0
    if type(seed) is not int or not 0 <= seed <= MAX_EXACT_INTEGER:
        raise InvalidRequest(
            f"The seed must be an integer from 0 to 2^53; {seed!r} given.", param="seed"
        )
    return seed


def _check_svd_rank(method: Method, svd_rank: int | None) -> int | None:
    if not method.on_deltas:
        _refuse_unused(method, "svd_rank", svd_rank, "does not cut the result to a rank")
        return None
    if svd_rank is None:
        return None
    if type(svd_rank) is not int or not 1 <= svd_rank <= MAX_SVD_RANK:
        raise InvalidRequest(
            f"svd_rank must be an integer from 1 to {MAX_SVD_RANK}; {svd_rank!r} given.",
            param="svd_rank",
        )
    return svd_rank


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise InvalidRequest(
            f"{dtype!r} is not a dtype of a combined adapter. Valid values: {', '.join(DTYPES)}.",
            param="dtype",
        )
    return dtype


def _refuse_unused(method: Method, name: str, value: object, why: str) -> None:
    if value is not None:
        raise InvalidRequest(
            f"{name} has no meaning for {method.name}, which {why}. Leave it out.", param=name
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
