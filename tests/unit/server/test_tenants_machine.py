"""Random requests of two tenants to all routes: neither sees or changes anything of the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loramux.types.routes import OPEN, ROUTE_ACCESS
from tests.unit.server.tenants_world import (
    BODIES,
    FOREIGN,
    KEYS,
    NAMES,
    TENANTS,
    WITHOUT_BODY,
    Step,
    Template,
    World,
    normal,
)

ROUTES = sorted(ROUTE_ACCESS)
FOR_OPERATORS = sorted(route for route, one in ROUTE_ACCESS.items() if one.is_for_operators)
# They need a classification head, a receipt, or a key for receipts, or name a file of the page.
NOT_ANSWERED = {
    "POST /classify",
    # The tokenizer here has no FIM tokens.
    "POST /infill",
    "POST /v1/fim/completions",
    "GET /v1/receipts/{receipt_id}",
    "GET /v1/receipts/key",
    "GET /ui/{path:path}",
    # They name a key of the other tenant.
    "DELETE /v1/keys/{key_id}",
    "POST /v1/keys/{key_id}/rotate",
    # The alias has no earlier state.
    "POST /v1/adapters/{name:path}/rollback",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("template") / "data")


@pytest.fixture
def world(template: Template, tmp_path: Path) -> Iterator[World]:
    made = World(template, tmp_path / "world")
    yield made
    made.close()


def steps_of(tenant: int | None = None) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        tenant=st.integers(0, 1) if tenant is None else st.just(tenant),
        # The key with all rights in every other request.
        key=st.one_of(st.just(0), st.integers(0, len(KEYS) - 1)),
        route=st.sampled_from(ROUTES),
        name=st.sampled_from(NAMES),
        variant=st.integers(0, 7),
    )


def test_every_route_with_a_body_has_one_here() -> None:
    with_body = {route for route in ROUTE_ACCESS if route.startswith("POST ")}
    unknown = with_body - set(BODIES) - WITHOUT_BODY
    assert not unknown, f"give {unknown} a body in tenants_world.py"
    assert set(BODIES) | WITHOUT_BODY <= set(ROUTE_ACCESS)


def test_the_requests_here_are_answered_with_the_right_key(world: World) -> None:
    """Otherwise the property would hold because nothing is ever answered."""
    wanted = [route for route in ROUTES if route not in FOR_OPERATORS and route not in NOT_ANSWERED]
    names = {"DELETE /v1/adapters/{name:path}": "sql@1.1.0"}
    wanted.sort(key=lambda route: route in names)
    drawing = ("/v1/images/generations", "/v1/images/edits", "/{name}/predict", "/{name}/stream")
    drawing += ("/sdapi/v1/txt2img", "/sdapi/v1/img2img")
    names |= dict.fromkeys((f"POST {path}" for path in drawing), "ink")
    names["POST /sdapi/v1/options"] = "tiny-flux"
    # Versions are of given names; those of the registry have them in the name.
    names["GET /v1/adapters/{name:path}/version"] = "team/polite"
    steps = [Step(0, 0, route, names.get(route, "private")) for route in wanted]
    steps = [
        Step(0, 0, step.route, "sql") if step.route.endswith(("promote", "split")) else step
        for step in steps
    ]
    failed = [
        (step.route, response.status_code, response.text)
        for step, response in world.run(steps)
        if response.status_code not in (200, 307)
    ]
    # The alias that the split has moved holds the version.
    assert [route for route, *_ in failed] == ["DELETE /v1/adapters/{name:path}"], failed


def check(world: World, template: Template, steps: list[Step]) -> list[httpx2.Response]:
    """Send the requests one by one, and compare what each may not touch."""
    responses = []
    # Receipts repeat what earlier requests have named.
    named: dict[int, set[str]] = {0: set(), 1: set()}
    for step in steps:
        other = TENANTS[1 - step.tenant]
        before, umbrella = world.state(other), world.state("umbrella")
        if "{key_id}" in step.route:
            named[step.tenant].add(world.key_id(step))
        ((_, response),) = world.run([step])
        assert (world.state(other), world.state("umbrella")) == (before, umbrella), step
        assert response.status_code != 500, (step, response.text)
        sent = template.fill(step.name, step.tenant)
        named[step.tenant] |= {sent, sent.partition("@")[0], sent.rpartition("*")[2]}
        # A message about a sum may repeat what stands before its first slash.
        named[step.tenant] |= {sent.partition("/")[0]} - set(TENANTS)
        shown = f"{response.headers} {response.text}"
        for echo in sorted(named[step.tenant], key=len, reverse=True):
            shown = shown.replace(echo, "")
        if step.access is not OPEN and step.variant not in (2, 3):
            # Of these the query names the other tenant too.
            for secret in template.secrets(1 - step.tenant):
                assert secret not in shown, (step, secret, shown)
        responses.append(response)
    return responses


def play(template: Template, steps: list[Step]) -> list[httpx2.Response]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(template, Path(folder))
        try:
            return check(world, template, steps)
        finally:
            world.close()


def run_alone(template: Template, steps: list[Step]) -> list[httpx2.Response]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(template, Path(folder))
        try:
            return [response for _, response in world.run(steps)]
        finally:
            world.close()


def interference(template: Template, steps: list[Step]) -> None:
    """Check that the answers to a tenant are the same whether the other tenant sends requests or
    not.
    """
    together = play(template, steps)
    for tenant in range(len(TENANTS)):
        own = [step for step in steps if step.tenant == tenant]
        alone = run_alone(template, own)
        seen = [one for step, one in zip(steps, together, strict=True) if step.tenant == tenant]
        for step, first, second in zip(own, seen, alone, strict=True):
            assert normal(first) == normal(second), step


# Not shrunk: that takes minutes, as each example makes three registries.
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(steps=st.lists(steps_of(), min_size=8, max_size=16))
def test_tenants_see_and_change_nothing_of_each_other(
    template: Template, steps: list[Step]
) -> None:
    interference(template, steps)


@pytest.mark.slow
@settings(max_examples=60)
@given(steps=st.lists(steps_of(), min_size=10, max_size=60))
def test_tenants_see_and_change_nothing_of_each_other_in_long_sequences(
    template: Template, steps: list[Step]
) -> None:
    interference(template, steps)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_adapters_answer_as_missing_ones_on_every_route(
    world: World, template: Template, name: str
) -> None:
    # The other tenant has used them, so that the server has them open.
    used = template.fill(name, 0).rpartition("*")[2]
    body = Step(1, 0, "POST /v1/completions", used.replace("{", ""))
    assert world.run([body])[0][1].status_code == 200
    absent = name.replace("/sql", "/sqk").replace("/private", "/privatf")
    routes = [route for route in ROUTES if route not in FOR_OPERATORS]
    for route in routes:
        pairs = world.run([Step(0, 0, route, name), Step(0, 0, route, absent)])
        found, missing = (str(normal(response)) for _, response in pairs)
        assert found == missing.replace("sqk", "sql").replace("privatf", "private"), route
