"""Every broken adapter is refused before its first token, with the refusal of the full check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loramux.adapters.catalog import AdapterCatalog
from loramux.adapters.loading import AdapterRules
from loramux.adapters.packed.packing import DensePacking
from loramux.adapters.peft.reader import read_adapter
from loramux.errors import AdapterRefused
from loramux.types.adapter import AdapterCard, InspectedCard
from tests.adapter_factory import (
    lora_config_dict,
    lora_tensors,
    tiny_base_info,
    tiny_llama_config,
    write_adapter,
)
from tests.broken_adapters import BROKEN, Broken

CONFIG = tiny_llama_config()
BASE = tiny_base_info(CONFIG)
CID = "cidv1:sha256:" + 64 * "0"


def make_catalog(broken: Broken, dtype: torch.dtype = torch.float32) -> AdapterCatalog:
    return AdapterCatalog(
        AdapterRules(
            base=BASE,
            packing=DensePacking(BASE.linears, dtype, 2**14),
            max_rank=broken.max_rank,
            strict_base=broken.strict_base,
        )
    )


def refusal_of(check: Callable[[], object]) -> tuple[str, str, str]:
    with pytest.raises(AdapterRefused) as caught:
        check()
    return caught.value.code, caught.value.reason, caught.value.fix


def register_by_header(catalog: AdapterCatalog, folder: Path) -> None:
    """Do what a server does until the first request: inspects, then identifies."""
    assert isinstance(catalog.inspect(folder), InspectedCard), "its values were not checked yet"
    assert not catalog.known()
    catalog.identify(folder)


def load_adopted(catalog: AdapterCatalog, folder: Path) -> None:
    """Do what a new engine does with an adapter that the server knows."""
    catalog.adopt(AdapterCard(cid=CID, path=str(folder), rank=1, num_bytes=1))
    catalog.read(CID)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_adapter_is_refused_on_every_way_to_its_first_token(
    broken: Broken, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    broken.build(folder, CONFIG)
    expected = refusal_of(
        lambda: read_adapter(folder, BASE, max_rank=broken.max_rank, strict_base=broken.strict_base)
    )
    assert expected[0] == broken.code and all(expected)
    by_header, by_card = make_catalog(broken), make_catalog(broken)
    assert refusal_of(lambda: register_by_header(by_header, folder)) == expected
    assert not by_header.known()
    assert refusal_of(lambda: load_adopted(by_card, folder)) == expected


def test_weights_out_of_the_serving_dtypes_range_are_refused_on_every_way(tmp_path: Path) -> None:
    tensors = {name: tensor * 3e5 for name, tensor in lora_tensors(CONFIG).items()}
    folder = write_adapter(tmp_path / "adapter", lora_config_dict(), tensors)
    sound = Broken("none", "", lambda folder, config: None)
    register_by_header(make_catalog(sound), folder)
    for way in (register_by_header, load_adopted):
        code, reason, fix = refusal_of(lambda: way(make_catalog(sound, torch.float16), folder))  # noqa: B023
        assert code == "overflow" and "float16" in reason and "float32" in fix
