from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.identity import FileDigest, compute_cid, make_manifest
from loramux.adapters.peft.config import parse_config
from tests.adapter_factory import lora_config_dict

WEIGHTS = "adapter_model.safetensors"
DIGEST = FileDigest(hashlib.sha256(b"weights").hexdigest(), 7)
HARMLESS = {
    "auto_mapping": {"base_model_class": "X"},
    "base_model_name_or_path": "other/base",
    "inference_mode": True,
    "lora_dropout": 0.25,
    "peft_version": "0.99",
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "layers_to_transform": None,
}
# The canonical JSON of the manifest of lora_config_dict() and DIGEST.
CANONICAL = (
    '{"config":{"alpha_pattern":[],"exclude_modules":[],"layers_pattern":[],'
    '"layers_to_transform":[],"lora_alpha":8,"peft_type":"LORA","r":4,"rank_pattern":[],'
    '"target_modules":["q_proj","v_proj"],"use_rslora":false},'
    '"files":{"adapter_model.safetensors":{"sha256":"' + DIGEST.sha256 + '","size":7}},'
    '"format":"loramux-adapter/1"}'
)
KNOWN_CID = "cidv1:sha256:" + hashlib.sha256(CANONICAL.encode()).hexdigest()
CHANGES = [
    {"r": 5},
    {"lora_alpha": 9},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 5}},
    {"alpha_pattern": {"q_proj": 5}},
    {"target_modules": ["q_proj"]},
    {"target_modules": "q_proj"},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"layers_to_transform": [1]},
]


def cid_of(config: dict[str, Any], digest: FileDigest = DIGEST) -> str:
    return compute_cid(make_manifest(parse_config(config).canonical(), {WEIGHTS: digest}))


def test_the_manifest_holds_format_config_and_files() -> None:
    manifest = make_manifest(parse_config(lora_config_dict()).canonical(), {WEIGHTS: DIGEST})
    assert manifest["format"] == "loramux-adapter/1"
    assert manifest["files"] == {WEIGHTS: {"sha256": DIGEST.sha256, "size": 7}}
    assert json.loads(json.dumps(manifest)) == manifest


def test_a_known_adapter_keeps_its_cid() -> None:
    """A change of this value would change the CID of every stored adapter."""
    assert cid_of(lora_config_dict()) == KNOWN_CID


@settings(max_examples=50)
@given(
    st.permutations(list({**lora_config_dict(), **HARMLESS})),
    st.sets(st.sampled_from(sorted(HARMLESS.keys() - lora_config_dict().keys()))),
)
def test_neither_order_nor_harmless_fields_change_the_cid(names: list[str], left: set[str]) -> None:
    fields = {**lora_config_dict(), **HARMLESS}
    config = {name: fields[name] for name in names if name not in left}
    assert cid_of(config) == KNOWN_CID


def test_whatever_changes_the_result_changes_the_cid() -> None:
    cids = {cid_of(lora_config_dict(**change)) for change in CHANGES}
    assert len(cids | {KNOWN_CID}) == len(CHANGES) + 1


def test_an_alpha_of_8_is_an_alpha_of_8_point_0() -> None:
    assert cid_of(lora_config_dict(lora_alpha=8.0)) == KNOWN_CID


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_other_weights_have_another_cid(one: bytes, other: bytes) -> None:
    digests = [FileDigest(hashlib.sha256(data).hexdigest(), len(data)) for data in (one, other)]
    cids = [cid_of(lora_config_dict(), digest) for digest in digests]
    assert (cids[0] == cids[1]) == (one == other)
