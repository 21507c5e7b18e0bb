from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loramux import LLM, SamplingParams
from loramux.cli.main import app
from loramux.errors import UnsupportedModel
from loramux.models.default_model import default_model_path
from loramux.models.locate import locate_model
from tests.engine_factory import save_model_with_tokenizer
from tests.hub_server import HubRepository, HubServer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    save_model_with_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def repository(hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories["acme/tiny"] = HubRepository({"main": files})


def test_an_existing_path_is_used_before_the_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert locate_model("acme/tiny") == Path("acme/tiny")
    assert locate_model(Path("acme/other")) == Path("acme/other")
    assert locate_model(None) == default_model_path()
    assert hub.seen == []
    assert locate_model("hf:acme/tiny", with_weights=False).parent.name == "snapshots"


def test_a_path_that_does_not_exist_and_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"nowhere does not exist: .*org/name\[@revision\]"):
        locate_model(str(tmp_path / "nowhere"))
    with pytest.raises(UnsupportedModel, match="hf:tiny does not name a model of the hub"):
        locate_model("hf:tiny")


def test_the_offline_engine_takes_a_model_of_the_hub(hub: HubServer) -> None:
    llm = LLM("acme/tiny", dtype="float32", device="cpu", device_memory_bytes=2**24)
    assert llm.model_name == "acme/tiny"
    output = llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 2


def test_a_plan_fetches_the_config_alone(hub: HubServer) -> None:
    flags = ["plan", "--model", "acme/tiny", "--adapters", "3", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert '"name": "acme/tiny"' in result.output
    assert hub.storage.seen == []
    missing = CliRunner().invoke(app, ["plan", "--model", "acme/none", "--adapters", "3"])
    assert missing.exit_code == 1
    assert "no such repository" in " ".join(missing.output.split())
