"""POST /v1/run, in the shape of its inventor's example."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.adapters.peft.folder import short_base_name
from tests.unit.server.asgi_client import events_of, make_app, post
from tests.unit.server.registry_app import Make, RegistryApp
from tests.unit.server.scripted_backend import named

ARTIFACT = "alice/refund-flagger@1.4.2"


def run_it(served: RegistryApp, **fields: Any) -> Any:
    body = {"artifact": ARTIFACT, "input": "ticket text...", **fields}
    return post(served.app, "/v1/run", body)


def test_an_artifact_runs_and_its_receipt_tells_what_served_it(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push(ARTIFACT, 1)
    answer = run_it(served).json()
    assert (answer["output"], answer["artifact"]) == ("Hello you", ARTIFACT)
    serving = answer["serving"]
    kolm = {"base_model", "adapter_cid", "pool_id", "cold_miss", "queue_depth", "latency_ms"}
    assert kolm <= serving.keys()
    assert (serving["adapter_cid"], serving["base_model"]) == (cid, "tiny-base@0123456")
    assert answer["usage"]["completion_tokens"] == 9
    assert bytes(served.backend.requests[0].prompt_token_ids) == b"u:ticket text...\na:"


def test_a_raw_input_is_the_prompt_itself(registry_app: Make) -> None:
    served = registry_app()
    served.push(ARTIFACT, 1)
    run_it(served, raw=True, temperature=0, max_tokens=3)
    job = served.backend.requests[0]
    assert bytes(job.prompt_token_ids) == b"ticket text..."
    assert (job.params.temperature, job.params.max_tokens) == (0, 3)


def test_a_run_streams_and_ends_with_usage_and_receipt(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push(ARTIFACT, 1)
    *pieces, last, done = events_of(run_it(served, stream=True).text)
    assert done == "[DONE]" and "".join(piece["output"] for piece in pieces) == "Hello you"
    assert last["serving"]["adapter_cid"] == cid and last["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 9


def test_the_version_behind_an_alias_is_named(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push(ARTIFACT, 1)
    assert run_it(served, artifact="alice/refund-flagger").json()["artifact"] == ARTIFACT
    assert run_it(served, artifact=cid).json()["artifact"] == cid
    assert run_it(served, artifact="legal").json()["artifact"] == "legal"


def test_an_artifact_of_another_base_is_refused_by_name(registry_app: Make) -> None:
    served = registry_app()
    served.push(ARTIFACT, 1, base_model_name_or_path="Qwen/Qwen2.5-7B-Instruct")
    error = run_it(served).json()["error"]
    assert error["code"] == 422 and error["reason"] == "other_base"
    assert "Qwen/Qwen2.5-7B-Instruct" in error["message"] and "tiny-base" in error["message"]
    assert not served.backend.requests and not served.backend.added


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"artifact": "alice/none"}, 404, "artifact"),
        ({"model": "legal"}, 400, "model"),
        ({"adapters": ["legal"]}, 400, "adapters"),
        ({"artifact": None}, 400, "artifact"),
        ({"artifact": None, "adapters": ["legal", "none"]}, 404, "adapters"),
        ({"n": 2}, 400, "n"),
        ({"input": 3}, 400, "input"),
        ({"input": "x" * 70}, 400, "input"),
        ({"input": "", "raw": True}, 400, "input"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
def test_faults_are_named(
    registry_app: Make, fields: dict[str, Any], status: int, param: str
) -> None:
    served = registry_app()
    served.push(ARTIFACT, 1)
    response = run_it(served, **fields)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_without_a_registry_adapters_run_by_their_names() -> None:
    answer = post(make_app(), "/v1/run", {"artifact": "legal", "input": "hi"}).json()
    assert (answer["artifact"], answer["output"]) == ("legal", "Hello you")


def test_sums_run_as_an_artifact_and_as_adapters(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push(ARTIFACT, 1)
    expected = {cid: 1.0, named("legal").cid: -0.5}
    name = f"{ARTIFACT}+-0.5*legal"
    for fields in (
        {"artifact": "alice/refund-flagger+-0.5*legal"},
        {
            "artifact": None,
            "adapters": ["alice/refund-flagger", "legal"],
            "adapter_weights": [1, -0.5],
        },
    ):
        answer = run_it(served, **fields).json()
        assert answer["artifact"] == name
        assert dict(served.backend.requests[-1].selection) == expected
    served.push("alice/other@1.0.0", 2, base_model_name_or_path="Qwen/Qwen2.5-7B-Instruct")
    error = run_it(served, artifact="legal+alice/other").json()["error"]
    assert error["reason"] == "other_base"


def test_a_base_is_known_by_its_short_name() -> None:
    cached = "/root/.cache/huggingface/hub/models--owner--Name/snapshots/abc"
    assert {short_base_name(name) for name in ("owner/Name", cached, "/models/name/")} == {"name"}
