"""Versions that are recipes: what they resolve to, how they nest, and what keeps their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loramux.adapters.recipe import CombinationOptions
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest, RegistryConflict
from loramux.registry.records import RecipePart
from loramux.registry.registry import Registry
from tests.registry_factory import make_cid, make_content

SUM = CombinationOptions()
TIES = CombinationOptions(method="ties", density=0.5)


@pytest.fixture
def parts(registry: Registry) -> Registry:
    for name in ("a", "b", "c"):
        registry.push(f"alice/{name}@1.0.0", make_content(name))
    return registry


def weights_of(registry: Registry, reference: str) -> dict[str, float]:
    recipe = registry.resolve(reference).recipe
    assert recipe is not None
    return {str(part): part.weight for part in recipe.parts}


def test_a_recipe_is_a_version_like_any_other(
    parts: Registry, open_registry: Callable[[], Registry]
) -> None:
    sum_, is_new = parts.push_recipe("alice/ab@1.0.0", [("alice/a", 1), ("alice/b", -0.5)], SUM)
    assert is_new and sum_.size_bytes == 0 and sum_.base_model == "tiny"
    ties, _ = parts.push_recipe("alice/ab", [("alice/a@1.0.0", 1), (make_cid("b"), 1)], TIES)
    assert ties.version == "1.0.1"
    assert not parts.push_recipe("alice/ab", [("alice/b", 1), ("alice/a", 1)], TIES)[1]
    other = open_registry()
    assert [version.recipe for version in other.show("alice/ab").versions] == [
        ties.recipe,
        sum_.recipe,
    ]
    assert weights_of(other, "alice/ab@1.0.0") == {"alice/a@1.0.0": 1, "alice/b@1.0.0": -0.5}
    assert other.resolve("alice/a").recipe is None
    parts.promote("alice/ab", "1.0.0", alias="prod")
    assert other.resolve("alice/ab").recipe == sum_.recipe
    parts.promote("alice/ab", "1.0.1", alias="prod")
    assert other.resolve("alice/ab").recipe == ties.recipe
    parts.rollback("alice/ab", alias="prod")
    assert other.resolve("alice/ab").recipe == sum_.recipe
    parts.split("alice/ab", {"1.0.0": 1, "1.0.1": 1}, alias="prod")
    sides = {str(other.resolve("alice/ab", sticky_key=str(key)).version) for key in range(40)}
    assert sides == {"1.0.0", "1.0.1"}
    assert other.recipe_cids() == {sum_.cid, ties.cid}
    assert other.verify() == ()


def test_a_recipe_has_a_content_id_and_its_parts_then_no_names(parts: Registry) -> None:
    version, _ = parts.push_recipe("alice/ab", [("alice/a", 1), ("alice/b", 2)], SUM)
    found = parts.resolve(version.cid)
    assert (found.cid, found.name) == (version.cid, None)
    assert found.recipe is not None
    expected = {RecipePart(make_cid("a"), 1.0), RecipePart(make_cid("b"), 2.0)}
    assert set(found.recipe.parts) == expected


def test_the_parts_stay_while_the_recipe_exists(parts: Registry) -> None:
    parts.push_recipe("bob/ab@1.0.0", [("alice/a", 1), ("alice/b", 1)], TIES)
    for reference in ("alice/a@1.0.0", "alice/b"):
        with pytest.raises(RegistryConflict, match=r"part of the recipe bob/ab@1\.0\.0"):
            parts.remove(reference)
    parts.remove("alice/c")
    assert {make_cid("a"), make_cid("b")} <= parts.cids()
    parts.remove("bob/ab")
    parts.remove("alice/a@1.0.0")
    assert parts.cids() == {make_cid("b")}
    # Content never changes, but the removed version may be pushed again, as soon as it can be.
    with pytest.raises(AdapterNotFound, match="alice/a"):
        parts.push_recipe("bob/ab@1.0.0", [("alice/a", 1), ("alice/b", 1)], TIES)
    parts.push("alice/a@1.0.0", make_content("a"))
    assert parts.push_recipe("bob/ab@1.0.0", [("alice/a", 1), ("alice/b", 1)], TIES)[1]
    with pytest.raises(RegistryConflict, match="bob/ab"):
        parts.remove("alice/a")
    assert parts.verify() == ()


def test_an_adapter_goes_with_a_recipe_of_its_own_versions(parts: Registry) -> None:
    parts.push("alice/a@1.1.0", make_content("a2"))
    parts.push_recipe("alice/a@2.0.0", [("alice/a@1.0.0", 1), ("alice/a@1.1.0", 1)], SUM)
    with pytest.raises(RegistryConflict, match=r"alice/a@2\.0\.0"):
        parts.remove("alice/a@1.0.0")
    parts.remove("alice/a")
    assert parts.cids() == {make_cid("b"), make_cid("c")}


def test_a_sum_of_sums_is_one_sum(parts: Registry) -> None:
    parts.push_recipe("alice/ab@1.0.0", [("alice/a", 1), ("alice/b", 2)], SUM)
    parts.push_recipe("alice/all@1.0.0", [("alice/ab", 0.5), ("alice/b", 3), ("alice/c", 1)], SUM)
    assert weights_of(parts, "alice/all") == {
        "alice/a@1.0.0": 0.5,
        "alice/b@1.0.0": 4,
        "alice/c@1.0.0": 1,
    }
    parts.remove("alice/ab")
    assert len(weights_of(parts, "alice/all")) == 3


def test_other_nested_recipes_are_refused_by_name(parts: Registry) -> None:
    parts.push_recipe("alice/sum@1.0.0", [("alice/a", 1), ("alice/b", 2)], SUM)
    parts.push_recipe("alice/ties@1.0.0", [("alice/a", 1), ("alice/b", 2)], TIES)
    nested = [("alice/sum", TIES), ("alice/ties", SUM), ("alice/ties", TIES)]
    for name, options in nested:
        with pytest.raises(InvalidRequest, match=rf"{name}@1\.0\.0 is itself a recipe"):
            parts.push_recipe("alice/x", [(name, 1), ("alice/c", 1)], options)


def test_what_no_request_could_name_is_refused(parts: Registry) -> None:
    parts.push("alice/far@1.0.0", make_content("far", base_model="owner/other"))
    parts.push("alice/a@1.1.0", make_content("a2"))
    parts.split("alice/a", {"1.0.0": 1, "1.1.0": 1}, alias="half")
    many = []
    for number in range(9):
        parts.push(f"alice/many-{number}@1.0.0", make_content(number))
        many.append((f"alice/many-{number}", 1.0))
    pair = [("alice/a@1.0.0", 1.0), ("alice/b", 1.0)]
    cases = [
        (many, SUM, "up to 8"),
        ([pair[0], ("alice/b", 101.0)], SUM, r"\[-100, 100\]"),
        (pair, CombinationOptions(dtype="bfloat16"), "dtype has no meaning"),
        ([*pair, ("alice/a@half", 1.0)], SUM, "is split among"),
        ([pair[0], pair[0]], SUM, "given twice"),
        (pair[:1], SUM, "2 to 16 adapters"),
    ]
    for terms, options, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            parts.push_recipe("alice/x", terms, options)
    far = [pair[0], ("alice/far", 1.0)]
    with pytest.raises(AdapterRefused, match=r"alice/a@1\.0\.0 on 'tiny'"):
        parts.push_recipe("alice/x", far, SUM)
    assert parts.push_recipe("alice/x", far, SUM, any_base=True)[1]
    # A version with files never becomes a recipe, nor the other way round.
    with pytest.raises(RegistryConflict, match="other content"):
        parts.push_recipe("alice/a@1.0.0", pair, TIES)
    with pytest.raises(RegistryConflict, match="other content"):
        parts.push("alice/x@1.0.0", make_content("a"))
