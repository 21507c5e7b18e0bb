"""Runs the engine in this process: `LLM(model).generate(prompts, lora_request=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from tqdm.std import tqdm

from loramux.backend.text import failure_of
from loramux.config.engine import EngineConfig
from loramux.engine.adapter_tokenizers import AdapterTokenizers
from loramux.engine.build import build_engine, load_base
from loramux.engine.codec import EngineCodec
from loramux.engine.gc_control import FullCollections
from loramux.engine.grammar.constraints import OWN_VOCABULARY
from loramux.engine.outputs import OutputCollector
from loramux.engine.tokenizer import Tokenizer
from loramux.errors import InvalidRequest
from loramux.models.locate import locate_model
from loramux.runner.device_choice import resolve_config
from loramux.types.composition import check_sum
from loramux.types.pooling import Pooling, as_pooling, check_dimensions
from loramux.types.request import (
    EmbeddingOutput,
    FinishReason,
    LoRARequest,
    Request,
    RequestOutput,
    pooled_request,
)
from loramux.types.sampling import SamplingParams
from loramux.types.vectors import embedding_of

# Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
# An adapter, several with their weights, or None for the base.
Loras = LoRARequest | Mapping[LoRARequest, float] | None
T = TypeVar("T")


class LLM:
    """A base model in this process.

    `model` is a Hugging Face folder, a GGUF file, or a model of the hub as org/name[@revision] or
    org/name:file.gguf; the default is SmolLM2.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise InvalidRequest("Give either config or single settings, not both.")
        self.config, self.device_choice = resolve_config(config or EngineConfig(**settings))
        with _DownloadBar() as bar:
            path = locate_model(model, sink=bar)
        loaded = load_base(path, self.config)
        self.model_name = loaded.name
        self.model_digest = loaded.digest
        self.eos_token_ids = loaded.eos_token_ids
        self.model_folder = loaded.tokenizer_folder
        self.tokenizer = Tokenizer(loaded.tokenizer_folder)
        """The tokenizer of the base; adapters may have their own, as tokenizer_for() tells."""
        self.engine = build_engine(loaded, self.config)
        self._tokenizers = AdapterTokenizers(
            self.tokenizer, loaded.tokenizer_folder, vocab_size=self.engine.vocab_size
        )
        self.engine.constraints.use_tokenizer(loaded.tokenizer_folder, loaded.eos_token_ids)
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Loras | Sequence[Loras] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run the prompts in one batch, and return their outputs in order.

        One sampling_params or lora_request applies to all prompts; a list has one entry for each
        prompt, where None means the base. A mapping of adapters to weights adds their weighted
        deltas. If any prompt is refused, none of them runs.
        """
        batch = [prompts] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        params = _for_each(sampling_params or SamplingParams(), len(batch), "sampling_params")
        adapters = _for_each(lora_request, len(batch), "lora_request")
        collectors = []
        for prompt, p, adapter in zip(batch, params, adapters, strict=True):
            parts = self._register(adapter)
            collectors.append(self._collector(cast(Prompt, prompt), p, parts))
            collectors[-1].output.lora_request = adapter
        self._run(collectors, show_progress=use_tqdm)
        return [collector.output for collector in collectors]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: Loras | Sequence[Loras] = None,
        pooling: Pooling | str | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Compute the embeddings of the prompts in one batch, and return them in order.

        `pooling`: last or mean; None: that of the model. `dimensions` shortens the embeddings of a
        Matryoshka model.
        """
        model = self.engine.pooling
        check_dimensions(dimensions, model, self.engine.catalog.base.hidden_size)
        if pooling is None and model.pooling is None:
            raise InvalidRequest(f"{model.refusal} Or give pooling.", param="pooling")
        vectors = self._pool(prompts, lora_request, pooling or model.pooling, use_tqdm)
        return [
            EmbeddingOutput(
                output.request_id,
                output.prompt_token_ids,
                embedding_of(output.pooled or b"", model, dimensions).tolist(),
            )
            for output in vectors
        ]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        lora_request: Loras | Sequence[Loras],
        pooling: Pooling | str | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        batch = [prompts] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        adapters = _for_each(lora_request, len(batch), "lora_request")
        collectors = []
        for prompt, adapter in zip(batch, adapters, strict=True):
            selection = check_sum(self._register(adapter))
            tokenizer = self.tokenizer_for(selection)
            text, token_ids = _tokenize(cast(Prompt, prompt), tokenizer)
            request = pooled_request(
                str(next(self._ids)), token_ids, as_pooling(pooling), selection=selection
            )
            collectors.append(OutputCollector(request, tokenizer, prompt=text))
        self._run(collectors, show_progress=use_tqdm)
        return [collector.output for collector in collectors]

    def register_adapter(self, folder: str | Path) -> str:
        """Check a PEFT folder and return its CID; raise AdapterRefused."""
        return self.engine.register_adapter(Path(folder)).cid

    def tokenizer_for(self, adapters: Sequence[tuple[str, float]]) -> EngineCodec:
        """Return the tokenizer of registered adapters, (CID, weight) each.

        It is the adapter's own if it has tokenizer files, and the base's otherwise.
        """
        cards = [self.engine.catalog.get(cid) for cid, _ in check_sum(adapters)]
        return self._tokenizers.find(cards) or self._tokenizers.read(cards)

    def answer(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        adapters: Sequence[tuple[str, float]] = (),
    ) -> RequestOutput:
        """Run one prompt on the sum of registered adapters, (CID, weight) each, or on the base."""
        collector = self._collector(prompt, sampling_params, adapters)
        self._run([collector], show_progress=False)
        return collector.output

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Loras | Sequence[Loras] = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run generate on one conversation or a list of conversations."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(list[list[Message]], [messages] if is_one else messages)
        adapters = _for_each(lora_request, len(conversations), "lora_request")
        prompts = [
            {
                "prompt_token_ids": self.tokenizer_for(self._register(adapter)).apply_chat_template(
                    [dict(m) for m in conversation]
                )
            }
            for conversation, adapter in zip(conversations, adapters, strict=True)
        ]
        return self.generate(prompts, sampling_params, lora_request=lora_request, use_tqdm=use_tqdm)

    def _collector(
        self, prompt: Prompt, params: SamplingParams, adapters: Sequence[tuple[str, float]]
    ) -> OutputCollector:
        selection = check_sum(adapters)
        tokenizer = self.tokenizer_for(adapters)
        if params.grammar is not None and not tokenizer.shares_vocabulary(self.tokenizer):
            raise InvalidRequest(OWN_VOCABULARY, param="grammar")
        text, token_ids = _tokenize(prompt, tokenizer)
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=tuple(token_ids),
            params=params,
            selection=selection,
        ).for_engine(tokenizer.eos_ids_with(self.eos_token_ids))
        collector = OutputCollector(request, tokenizer, prompt=text)
        collector.output.selection = selection
        return collector

    def _register(self, loras: Loras) -> list[tuple[str, float]]:
        """Register the adapters of a request, and return (CID, weight) of each."""
        weights = {loras: 1.0} if isinstance(loras, LoRARequest) else loras or {}
        return [(self.register_adapter(lora.lora_path), weight) for lora, weight in weights.items()]

    def _run(self, collectors: Iterable[OutputCollector], *, show_progress: bool) -> None:
        open_requests = {collector.request.request_id: collector for collector in collectors}
        try:
            for collector in open_requests.values():
                self.engine.add(collector.request)
            with (
                tqdm(
                    total=len(open_requests), disable=not show_progress, unit="request"
                ) as progress,
                FullCollections() as collections,
            ):
                while self.engine.has_work:
                    if num_done := self._step(open_requests):
                        progress.update(num_done)
                    collections.after_step()
        finally:
            # After an error or Ctrl-C, no request may go on in the next call.
            for request_id in open_requests:
                self.engine.abort(request_id)

    def _step(self, open_requests: dict[str, OutputCollector]) -> int:
        """Run one engine step, and return the number of requests that it completed."""
        num_done = 0
        for event in self.engine.step():
            collector = open_requests[event.request_id]
            delta = collector.apply(event)
            if delta is not None and delta.finish_reason is FinishReason.ERROR:
                raise failure_of(delta)
            if delta is not None and delta.stop_hit:
                self.engine.finish(event.request_id, event.index)
            num_done += collector.is_finished
        return num_done


class _DownloadBar:
    """Shows the download of a model; HF_HUB_DISABLE_PROGRESS_BARS=1 hides it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, what: str, total_bytes: int | None) -> None:
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled

        self._bar = tqdm(
            desc=what,
            total=total_bytes,
            unit="B",
            unit_scale=True,
            disable=are_progress_bars_disabled(),
        )

    def add(self, num_bytes: int) -> None:
        self._bar.update(num_bytes)


def _tokenize(prompt: Prompt, tokenizer: EngineCodec) -> tuple[str | None, Sequence[int]]:
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        prompt = cast(Prompt, prompt.get("prompt", ""))
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    return None, cast(Sequence[int], prompt)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return bool(prompts) and isinstance(prompts[0], int)


def _for_each(value: T | Sequence[T], length: int, name: str) -> list[T]:
    if isinstance(value, list | tuple):
        if len(value) != length:
            raise InvalidRequest(
                f"{name} has {len(value)} entries for {length} prompts.", param=name
            )
        return list(value)
    return [cast(T, value)] * length
