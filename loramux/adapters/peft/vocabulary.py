"""Changes of the embedding and the output head, and which of them a tied pair shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from loramux.adapters.packed.extras import EMBEDDING, HEAD, MODEL_LEVEL, ExtraKind, ExtraSpec
from loramux.adapters.peft.dora import column_factors, row_factors
from loramux.adapters.peft.making import PartValues, check_matrix
from loramux.adapters.peft.names import FileTensors, Role
from loramux.adapters.peft.parts import ExtraTensor
from loramux.adapters.peft.refusals import RefusalCode
from loramux.adapters.peft.safetensors import TensorEntry
from loramux.adapters.peft.targets import is_saved
from loramux.errors import AdapterRefused
from loramux.types.model import BaseModelInfo, TargetModule

EMBEDDING_PATH, HEAD_PATH = "model.embed_tokens", "lm_head"
PATHS = (EMBEDDING_PATH, HEAD_PATH)
MODULES = {EMBEDDING_PATH: EMBEDDING, HEAD_PATH: HEAD}
TokenFields = Sequence[tuple[str, tuple[int, ...]]]
"""(name of a module, token ids) of trainable_token_indices."""
RESIZED_FIX = "Save the adapter with save_embedding_layers=True."


def vocabulary_targets(base: BaseModelInfo) -> tuple[TargetModule, TargetModule]:
    """Return the embedding and the head as modules that a LoRA may target."""
    sizes = (base.vocab_size, base.hidden_size)
    return (
        TargetModule(EMBEDDING_PATH, MODEL_LEVEL, EMBEDDING, *sizes),
        TargetModule(HEAD_PATH, MODEL_LEVEL, HEAD, *reversed(sizes)),
    )


@dataclass(frozen=True, slots=True)
class LowRank:
    """The LoRA of the embedding (lora_embedding_A and B) or of the head (lora_A and B)."""

    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        return tuple(
            entry for entry in (self.a, self.b, self.magnitude, self.bias) if entry is not None
        )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Trained rows of some tokens."""

    token_ids: tuple[int, ...]
    """In the order of the rows in the file."""
    entry: TensorEntry

    def in_order(self, values: PartValues) -> torch.Tensor:
        order = sorted(range(len(self.token_ids)), key=self.token_ids.__getitem__)
        return values.of(self.entry)[order]


@dataclass(frozen=True, slots=True)
class VocabularyMaker:
    """The parts of the embedding or of the head."""

    module: str
    num_tokens: int
    hidden: int
    weight: TensorEntry | None = None
    low_rank: LowRank | None = None
    rows: TokenRows | None = None
    frozen: TensorEntry | None = None
    """A copy of the base's weight, which must be that of the base."""
    tied_copy: TensorEntry | None = None
    """Another copy of `weight` of tied modules, which must be equal."""
    tied_low_rank: LowRank | None = None
    """That of the embedding, which must be this of the head."""

    @property
    def specs(self) -> tuple[ExtraSpec, ...]:
        shapes: dict[ExtraKind, tuple[int, int]] = {}
        if self.weight is not None or self._is_scaled_embedding:
            shapes[ExtraKind.WEIGHT] = (self.num_tokens, self.hidden)
        low_rank = self.low_rank
        if low_rank is not None and not self._is_scaled_embedding:
            wide, long = (low_rank.rank, self.hidden), (self.num_tokens, low_rank.rank)
            is_head = self.module == HEAD
            shapes[ExtraKind.LOW_RANK_A] = wide if is_head else long
            shapes[ExtraKind.LOW_RANK_B] = long if is_head else wide
            if low_rank.magnitude is not None:
                shapes[ExtraKind.GAIN] = (self.num_tokens, 1)
            if low_rank.bias is not None:
                shapes[ExtraKind.BIAS] = (self.num_tokens, 1)
        specs = [
            ExtraSpec(MODEL_LEVEL, self.module, kind, *shape) for kind, shape in shapes.items()
        ]
        if self.rows is not None and self.weight is None:
            token_ids = tuple(sorted(self.rows.token_ids))
            shape = (len(token_ids), self.hidden)
            specs.append(ExtraSpec(MODEL_LEVEL, self.module, ExtraKind.ROWS, *shape, token_ids))
        return tuple(specs)

    @property
    def used(self) -> tuple[TensorEntry, ...]:
        found = (self.weight, None if self.rows is None else self.rows.entry)
        low_rank = () if self.low_rank is None else self.low_rank.used
        return (*(entry for entry in found if entry is not None), *low_rank)

    @property
    def computes(self) -> bool:
        others = (self.low_rank, self.rows, self.frozen, self.tied_copy)
        return any(other is not None for other in others)

    @property
    def _is_scaled_embedding(self) -> bool:
        """DoRA scales the columns of an embedding, which only a whole weight can express."""
        low_rank = self.low_rank
        return self.module == EMBEDDING and low_rank is not None and low_rank.magnitude is not None

    def make(self, values: PartValues) -> Iterator[ExtraTensor]:
        self._check_copies(values)
        for kind, tensor in self._tensors(values):
            yield ExtraTensor((MODEL_LEVEL, self.module, kind), tensor)

    def _tensors(self, values: PartValues) -> Iterator[tuple[ExtraKind, torch.Tensor]]:
        weight = None if self.weight is None else values.of(self.weight)
        if self._is_scaled_embedding:
            if values.base is not None:
                yield ExtraKind.WEIGHT, self._scaled_embedding(values, weight)
            return
        if weight is not None:
            if self.rows is not None:
                weight = weight.clone()
                weight[list(self.rows.token_ids)] = values.of(self.rows.entry).to(weight.dtype)
            yield ExtraKind.WEIGHT, weight
        elif self.rows is not None:
            yield ExtraKind.ROWS, self.rows.in_order(values)
        if self.low_rank is not None and self.module == HEAD:
            yield from self._head_low_rank(self.low_rank, values, weight)
        elif self.low_rank is not None:
            yield ExtraKind.LOW_RANK_A, values.of(self.low_rank.a).T
            b = values.of(self.low_rank.b).float() * self.low_rank.scale
            yield ExtraKind.LOW_RANK_B, b.T

    def _head_low_rank(
        self, low_rank: LowRank, values: PartValues, weight: torch.Tensor | None
    ) -> Iterator[tuple[ExtraKind, torch.Tensor]]:
        a, b = values.of(low_rank.a), values.of(low_rank.b)
        scaled = b.float() * low_rank.scale
        if low_rank.magnitude is not None and values.base is not None:
            original = values.base.head if weight is None else weight
            magnitude = values.of(low_rank.magnitude)
            factors = row_factors(HEAD_PATH, original, (a, b, low_rank.scale), magnitude)
            scaled = scaled * factors[:, None]
            yield ExtraKind.GAIN, (factors - 1)[:, None]
        yield ExtraKind.LOW_RANK_A, a
        yield ExtraKind.LOW_RANK_B, scaled
        if low_rank.bias is not None:
            yield ExtraKind.BIAS, (values.of(low_rank.bias).float() * low_rank.scale)[:, None]

    def _scaled_embedding(self, values: PartValues, weight: torch.Tensor | None) -> torch.Tensor:
        low_rank = self.low_rank
        assert low_rank is not None and low_rank.magnitude is not None and values.base is not None
        original = values.base.embedding if weight is None else weight
        a, b = (
            values.of(half).to(original.device, torch.float32) for half in (low_rank.a, low_rank.b)
        )
        changed = original.float() + low_rank.scale * (b @ a).T
        factors = column_factors(EMBEDDING_PATH, changed, values.of(low_rank.magnitude))
        return changed.cpu() * factors

    def _check_copies(self, values: PartValues) -> None:
        if self.tied_low_rank is not None and self.low_rank is not None:
            a, b = (values.of(half).T for half in (self.tied_low_rank.b, self.tied_low_rank.a))
            own = self.low_rank
            if not (torch.equal(a, values.of(own.a)) and torch.equal(b, values.of(own.b))):
                raise AdapterRefused(
                    RefusalCode.BAD_VALUE,
                    "ensure_weight_tying is set, and the LoRA of the head is not that of the "
                    "embedding.",
                    fix="Unset it and name both in target_modules, if both were trained.",
                )
        if (
            self.tied_copy is not None
            and self.weight is not None
            and not torch.equal(values.of(self.tied_copy), values.of(self.weight))
        ):
            raise AdapterRefused(
                RefusalCode.FULL_WEIGHTS,
                f"This base ties the embedding and the head, and {self.tied_copy.name} differs "
                f"from {self.weight.name}.",
                fix="Name the trained one in modules_to_save, or serve it on an untied base.",
            )
        if self.frozen is not None and values.base is not None:
            base = values.base.embedding if self.module == EMBEDDING else values.base.head
            base, copy = base.cpu(), values.of(self.frozen)
            if not torch.equal(copy.to(base.dtype), base) and not torch.equal(
                copy, base.to(copy.dtype)
            ):
                raise AdapterRefused(
                    RefusalCode.FULL_WEIGHTS,
                    f"{self.frozen.name} differs from the weight of this base.",
                    fix="Serve the adapter on the base that it was trained on, or save it with "
                    "save_embedding_layers=False if the base's own weight is to be used.",
                )


def plan_vocabulary(
    file: FileTensors,
    base: BaseModelInfo,
    low_ranks: Mapping[str, LowRank],
    *,
    saved: Sequence[str],
    tokens: TokenFields,
    ties_low_rank: bool = False,
) -> list[VocabularyMaker]:
    """Find what changes in the embedding and the head; raise AdapterRefused.

    `low_ranks`: by path. `saved`: modules_to_save. A tied embedding and head share what PEFT loads
    into the base and trained tokens, but a LoRA only with `ties_low_rank`, and no saved module.
    """
    weights = _own_weights(file, base, saved)
    rows = _token_rows(file, base, tokens)
    makers = []
    for path, own in weights.items():
        maker = VocabularyMaker(
            MODULES[path],
            base.vocab_size if own.weight is None else own.weight.shape[0],
            base.hidden_size,
            weight=own.weight,
            low_rank=low_ranks.get(path),
            rows=rows.get(path),
            frozen=own.frozen,
            tied_copy=own.tied_copy,
            tied_low_rank=low_ranks.get(EMBEDDING_PATH)
            if ties_low_rank and path == HEAD_PATH
            else None,
        )
        if is_saved(saved, path) and own.weight is None:
            raise AdapterRefused(
                RefusalCode.MISSING_TENSORS,
                f"modules_to_save names {path}, and the file has no weight for it.",
                fix="Make modules_to_save fit the file.",
            )
        check_combination(path, maker, is_whole=is_saved(saved, path))
        check_sizes(path, maker)
        makers.append(maker)
    check_equal_vocabularies(makers)
    return [maker for maker in makers if maker.used or maker.frozen is not None]


@dataclass(frozen=True, slots=True)
class _OwnWeight:
    weight: TensorEntry | None = None
    frozen: TensorEntry | None = None
    tied_copy: TensorEntry | None = None


def _own_weights(
    file: FileTensors, base: BaseModelInfo, saved: Sequence[str]
) -> dict[str, _OwnWeight]:
    """Return the weights of embedding and head; tied ones share what is loaded into the base."""
    weights = file.of(Role.WEIGHT)
    frozen = {path: _frozen(file, base, path) for path in PATHS}
    loaded = {}
    for path in PATHS:
        weight = None if is_saved(saved, path) else weights.get(path)
        if weight is not None and frozen[path] is not None:
            raise AdapterRefused(
                RefusalCode.DUPLICATE_TENSORS,
                f"{weight.name} is there twice, with and without .base_layer.",
                fix="Save the adapter again.",
            )
        # The vocabulary may have been resized before the training.
        loaded[path] = weight if _same_size(frozen[path], base) else frozen[path] or weight
    own = {}
    for path, other in (PATHS, PATHS[::-1]):
        shared = loaded[other] if base.tie_embeddings else None
        weight = weights.get(path) if is_saved(saved, path) else loaded[path] or shared
        tied_copy = shared if path == EMBEDDING_PATH and weight is loaded[path] else None
        # Below a saved module, the base's own weight is read by a tied module only.
        is_read = base.tie_embeddings or not is_saved(saved, path)
        own[path] = _OwnWeight(
            weight, _same_size(frozen[path], base) if is_read else None, tied_copy
        )
        if weight is not None:
            check_matrix(weight, (*weight.shape[:1], base.hidden_size), path)
    return own


def _frozen(file: FileTensors, base: BaseModelInfo, path: str) -> TensorEntry | None:
    entry = file.of(Role.FROZEN_WEIGHT).get(path)
    if entry is not None:
        check_matrix(entry, (*entry.shape[:1], base.hidden_size), path)
    return entry


def _same_size(entry: TensorEntry | None, base: BaseModelInfo) -> TensorEntry | None:
    return entry if entry is not None and entry.shape[0] == base.vocab_size else None


def _token_rows(
    file: FileTensors, base: BaseModelInfo, tokens: TokenFields
) -> dict[str, TokenRows]:
    """Return the trained rows of embedding and head.

    A tied head has those of the embedding, unless it has others of its own.
    """
    token_ids: dict[str, tuple[int, ...]] = {}
    for name, ids in tokens:
        paths = [path for path in PATHS if path.endswith(name)]
        if not paths:
            raise AdapterRefused(
                RefusalCode.UNSUPPORTED_TARGET,
                f"trainable_token_indices names {name!r}; only embed_tokens and lm_head have rows "
                "of tokens.",
                fix="Name one of them.",
            )
        token_ids[paths[0]] = ids
    found = file.of(Role.TOKENS)
    is_tied = base.tie_embeddings and token_ids.get(HEAD_PATH) in (
        None,
        token_ids.get(EMBEDDING_PATH),
    )
    if is_tied and EMBEDDING_PATH in token_ids:
        token_ids[HEAD_PATH] = token_ids[EMBEDDING_PATH]
        if EMBEDDING_PATH in found:
            found = {**found, HEAD_PATH: found[EMBEDDING_PATH]}
    if untold := sorted(found.keys() - token_ids.keys()):
        raise AdapterRefused(
            RefusalCode.UNTARGETED_TENSORS,
            f"The file holds rows of tokens for {', '.join(untold)}, and the config does not say "
            "of which tokens.",
            fix="Set trainable_token_indices.",
        )
    rows = {}
    for path, ids in token_ids.items():
        if path not in found:
            raise AdapterRefused(
                RefusalCode.MISSING_TENSORS,
                f"trainable_token_indices names tokens of {path}, and the file has no rows for "
                "them.",
                fix="Save the adapter again.",
            )
        check_matrix(found[path], (len(ids), base.hidden_size), f"{path} of these tokens")
        rows[path] = TokenRows(ids, found[path])
    return rows


def check_combination(path: str, maker: VocabularyMaker, *, is_whole: bool) -> None:
    """Refuses two kinds of training of one module, which PEFT cannot run either."""
    kinds = {
        "modules_to_save": is_whole,
        "target_modules": maker.low_rank is not None,
        "trainable_token_indices": maker.rows is not None,
    }
    chosen = [name for name, is_set in kinds.items() if is_set]
    if len(chosen) > 1:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"{' and '.join(chosen)} name {path} (a tied head takes the tokens of the embedding).",
            fix="Train it in one way only.",
        )


def check_sizes(path: str, maker: VocabularyMaker) -> None:
    """Refuses a LoRA and trained tokens for another vocabulary than the weight has."""
    if maker.rows is not None and max(maker.rows.token_ids) >= maker.num_tokens:
        raise AdapterRefused(
            RefusalCode.BAD_VALUE,
            f"trainable_token_indices has the token {max(maker.rows.token_ids)}, and {path} has "
            f"{maker.num_tokens} rows.",
            fix=RESIZED_FIX,
        )
    low_rank = maker.low_rank
    if low_rank is None:
        return
    is_head = maker.module == HEAD
    taken, given = maker.num_tokens, maker.hidden
    if is_head:
        taken, given = given, taken
    shapes = {
        low_rank.a: (low_rank.a.shape[0], taken),
        low_rank.b: (given, low_rank.b.shape[1]),
        low_rank.magnitude: (given,),
        low_rank.bias: (given,),
    }
    for entry, shape in shapes.items():
        if entry is not None and entry.shape != shape:
            raise AdapterRefused(
                RefusalCode.WRONG_SHAPE,
                f"{entry.name} has shape {list(entry.shape)}, and {path} has "
                f"{maker.num_tokens} tokens and hidden size {maker.hidden}.",
                fix=f"Serve it on its own base. If its vocabulary was resized: {RESIZED_FIX}",
            )


def check_equal_vocabularies(makers: Sequence[VocabularyMaker]) -> None:
    """Refuses an embedding that was resized without its head, or a head without its embedding."""
    sizes = {maker.module: maker.num_tokens for maker in makers}
    if len(set(sizes.values())) > 1:
        said = " and ".join(f"{module} {count}" for module, count in sizes.items())
        raise AdapterRefused(
            RefusalCode.WRONG_SHAPE,
            f"The vocabulary was resized, and only one of the two weights is in the file: {said} "
            "rows.",
            fix=RESIZED_FIX,
        )
