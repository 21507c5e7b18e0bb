"""Bodies and replies of the routes for embeddings and scores."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.receipts.receipt import Receipt

EmbeddingInput = str | list[str | int | list[int]]
"""A text, a list of token ids, or a list of either."""
EncodingFormat = Literal["float", "base64"]


class PoolingBody(Struct, kw_only=True):
    """Fields of all routes that return vectors. Absent or null: the default."""

    model: str | None = None
    """Name of the base model or of an adapter, or a sum such as `a+0.3*b`; absent: the base."""
    adapters: list[str] | None = None
    adapter_weights: list[float] | None = None
    combination: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None
    combination_seed: int | None = None
    svd_rank: int | None = None
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of each input; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    timeout: float | None = None
    """Limit in seconds from arrival to the vectors; a later request ends with an error."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    user: str | None = None


class EmbeddingRequest(PoolingBody, kw_only=True):
    input: EmbeddingInput
    encoding_format: EncodingFormat | None = None
    """base64: little-endian float32."""
    dimensions: int | None = None
    """Shortens the embeddings of a model that was trained for it (Matryoshka)."""


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """vLLM's /pooling: embeddings, or the scores of a sequence classifier."""


class ClassifyRequest(PoolingBody, kw_only=True):
    input: EmbeddingInput
    use_activation: bool | None = None
    """false: the outputs of the head themselves, without softmax or sigmoid."""


class ScoreRequest(PoolingBody, kw_only=True):
    text_1: str | list[str] | None = None
    """One text for all of `text_2`, or one for each."""
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Another name of text_1."""
    documents: str | list[str] | None = None
    """Another name of text_2."""
    use_activation: bool | None = None
    """false: the output of the head itself, without sigmoid."""


class DocumentText(Struct, kw_only=True):
    text: str


class RerankRequest(PoolingBody, kw_only=True):
    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None
    """The number of documents to return; absent or 0: all."""
    return_documents: bool | None = None
    """false: leave out the texts."""


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(Struct, kw_only=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PoolingData(Struct, kw_only=True):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PoolingReply(Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: EmbeddingUsage
    object: str = "list"
    serving: Receipt | UnsetType = UNSET


class EmbeddingList(PoolingReply, kw_only=True):
    data: list[EmbeddingData]


class PoolingList(PoolingReply, kw_only=True):
    data: list[PoolingData]


class Classification(Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(PoolingReply, kw_only=True):
    data: list[Classification]


class ScoreData(Struct, kw_only=True):
    index: int
    score: float
    object: str = "score"


class ScoreList(PoolingReply, kw_only=True):
    data: list[ScoreData]


class RankedText(Struct, kw_only=True):
    text: str


class RankedDocument(Struct, kw_only=True):
    index: int
    """The place in the documents of the request."""
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class RerankAnswer(Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]
    """Best first."""
    serving: Receipt | UnsetType = UNSET
