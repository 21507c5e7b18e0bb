"""Metrics of adapters that inference gateways read: llm-d, the inference extension, AIBrix.

Their scorers split lists at commas and compare whole names with the `model` of a request.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice

from prometheus_client.core import GaugeMetricFamily, Metric

from loramux.backend.host import AdapterHost, EngineStats, Health
from loramux.backend.text import ModelCard

MAX_NAMES = 256
_MAX_ASKED = 4


class AskedNames:
    """The last few names by which requests asked for each adapter."""

    def __init__(self) -> None:
        # The adapter and the name that were asked for last stand last.
        self._names: dict[str, dict[str, None]] = {}

    def add(self, cid: str, name: str) -> None:
        names = self._names.pop(cid, None)
        self._names[cid] = names = {} if names is None else names
        if not is_listable(name):
            return
        names.pop(name, None)
        names[name] = None
        if len(names) > _MAX_ASKED:
            del names[next(iter(names))]

    def names_of(self, cid: str) -> Iterator[str]:
        """Yield names of one adapter, the newest first."""
        return reversed(self._names.get(cid, {}))

    def newest_first(self, cids: Collection[str]) -> list[str]:
        """Return CIDs, those that were asked for last first."""
        asked = [cid for cid in reversed(self._names) if cid in cids]
        return [*asked, *(cid for cid in cids if cid not in self._names)]

    def forget_all_but(self, known: Collection[str]) -> None:
        for cid in [cid for cid in self._names if cid not in known]:
            del self._names[cid]


def is_listable(name: str) -> bool:
    """Whether a name can stand in a list that readers split at commas."""
    return bool(name) and "," not in name


def gateway_metrics(
    backend: AdapterHost,
    labels: Mapping[str, list[str]],
    asked: AskedNames,
    *,
    max_resident: int,
) -> Iterator[Metric]:
    """`labels`: the labels of each adapter by CID."""
    stats = backend.stats
    resident = asked.newest_first(dict.fromkeys(stats.resident_adapters))
    yield _requests_info(stats, resident, _Names(labels, asked), max_lora=max_resident)
    yield _cache_config(backend)
    yield _loaded(backend, resident, labels)
    for title, text, value in (
        (
            "vllm:num_gpu_loaded_lora_adapters",
            "Adapters on the device.",
            len(stats.resident_adapters),
        ),
        (
            "vllm:max_gpu_lora_adapters",
            "Adapters of rank 16 that fit on the device.",
            max_resident,
        ),
    ):
        gauge = GaugeMetricFamily(title, text)
        gauge.add_metric([], value)
        yield gauge


class _Names:
    """The names of adapters: as they were asked for, then their labels."""

    def __init__(self, labels: Mapping[str, list[str]], asked: AskedNames) -> None:
        self._labels = labels
        self._asked = asked

    def joined(self, cids: Iterable[str], limit: int) -> str:
        each = (chain(self._asked.names_of(cid), self._labels.get(cid, ())) for cid in cids)
        names = dict.fromkeys(name for name in chain.from_iterable(each) if is_listable(name))
        return ",".join(islice(names, limit))


def _requests_info(
    stats: EngineStats, resident: list[str], names: _Names, *, max_lora: int
) -> Metric:
    """One sample whose labels are the lists; readers find the newest by its value, a time.

    Adapters that are on the device count as running, as the protocol of the inference extension
    defines it. Fewer than `max_lora` are listed: there is always room for one more, by eviction.
    """
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters on the device, those in use first, and adapters of waiting requests.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    limit = max(1, min(MAX_NAMES, max_lora - 1))
    ready = dict.fromkeys((*stats.running_adapters, *resident))
    running = names.joined(ready, limit)
    waiting = names.joined((cid for cid in stats.waiting_adapters if cid not in ready), MAX_NAMES)
    info.add_metric([str(max_lora), running, waiting], time.time())
    return info


def _cache_config(backend: AdapterHost) -> Metric:
    info = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Size of a KV page in tokens, and the number of pages.",
        labels=["block_size", "num_gpu_blocks"],
    )
    card = None if backend.health is Health.STARTING else backend.card
    if isinstance(card, ModelCard):
        info.add_metric([str(card.block_tokens), str(card.num_pages)], 1)
    return info


def _loaded(backend: AdapterHost, resident: list[str], labels: Mapping[str, list[str]]) -> Metric:
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        f"1 for each of the {MAX_NAMES} adapters that were used last and are on the device.",
        labels=["adapter_name", "level", "pinned", "rank"],
    )
    cards, pinned = backend.adapters, backend.pinned
    for cid in resident[:MAX_NAMES]:
        card, name = cards.get(cid), next(iter(labels.get(cid, ())), None)
        if card is not None and name is not None:
            is_pinned = "true" if cid in pinned else "false"
            loaded.add_metric([name, "gpu", is_pinned, str(card.rank)], 1)
    return loaded
