"""Recipes of combinations: canonical form, derived id and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.adapters.identity import CID_PREFIX
from loramux.adapters.recipe import (
    MAX_PARTS,
    RECIPE_KEY,
    CombinationOptions,
    decode_recipe,
    find_recipe,
    make_recipe,
)
from loramux.errors import InvalidRequest

A, B, C = (CID_PREFIX + digit * 64 for digit in "abc")


def recipe_id(cids: list[str], weights: list[float], **options: Any) -> str:
    return make_recipe(cids, weights, CombinationOptions(**options)).cid


def test_the_id_depends_on_all_that_changes_the_result_and_on_nothing_else() -> None:
    ties = {"method": "ties", "density": 0.5}
    one = recipe_id([A, B], [1, -0.0], **ties)
    assert one == recipe_id([B, A], [0, 1.0], **ties, majority_sign_method="total")
    others = {
        recipe_id([A, B], [0, 1], **ties),
        recipe_id([A, C], [1, 0], **ties),
        recipe_id([A, B, C], [1, 0, 1], **ties),
        recipe_id([A, B], [1, 0], **ties | {"density": 0.4}),
        recipe_id([A, B], [1, 0], **ties, majority_sign_method="frequency"),
        recipe_id([A, B], [1, 0], **ties, dtype="bfloat16"),
        recipe_id([A, B], [1, 0], method="dare_ties", density=0.5),
        recipe_id([A, B], [1, 0], method="dare_ties", density=0.5, seed=1),
        recipe_id([A, B], [1, 0], method="ties_svd", density=0.5),
        recipe_id([A, B], [1, 0], method="ties_svd", density=0.5, svd_rank=8),
    }
    assert len(others) == 10
    assert one not in others


def test_the_id_of_a_recipe_never_changes() -> None:
    found = recipe_id([B, A], [0.3, 1], method="dare_linear", density=0.5, seed=7)
    assert found == CID_PREFIX + "e1c24bcc9391fdf7d51f464f609b1a5ec765aacd88a5a386102740b0126c6643"


def test_a_recipe_can_be_read_back() -> None:
    recipe = make_recipe([A, B], [0.1, 2], CombinationOptions(method="dare_ties_svd", density=0.9))
    assert decode_recipe(recipe.encode()) == recipe
    assert find_recipe({RECIPE_KEY: recipe.encode().decode()}) == recipe


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"format": "other"}',
        '{"format": "loramux-merge/1", "parts": [], "method": "cat"}',
        '{"format": "loramux-merge/1", "parts": [{"cid": 3, "weight": 1}], "method": "cat"}',
        '{"format": "loramux-merge/1", "parts": [], "method": [], "dtype": "float32"}',
        '{"format": "loramux-merge/1", "parts": [], "more": 1}',
        "[" * 100_000,
    ],
)
def test_other_text_is_no_recipe(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_recipe(text)
    assert find_recipe({RECIPE_KEY: text}) is None


@pytest.mark.parametrize(
    ("cids", "weights", "options", "param"),
    [
        ([A], [1], {}, "adapters"),
        ([CID_PREFIX + f"{i:064x}" for i in range(MAX_PARTS + 1)], None, {}, "adapters"),
        ([A, A], [1, 2], {}, "adapters"),
        ([A, B], [1], {}, "weights"),
        ([A, B], [0, -0.0], {}, "weights"),
        ([A, B], [1, float("nan")], {}, "weights"),
        ([A, B], [1, True], {}, "weights"),
        ([A, B], None, {"method": "tied"}, "combination"),
        ([A, B], None, {"method": "ties"}, "density"),
        ([A, B], None, {"method": "ties", "density": 0}, "density"),
        ([A, B], None, {"method": "ties", "density": 1.1}, "density"),
        ([A, B], None, {"density": 0.5}, "density"),
        (
            [A, B],
            None,
            {"method": "ties", "density": 0.5, "majority_sign_method": "most"},
            "majority_sign_method",
        ),
        ([A, B], None, {"majority_sign_method": "total"}, "majority_sign_method"),
        ([A, B], None, {"method": "dare_ties", "density": 0.5, "seed": -1}, "seed"),
        ([A, B], None, {"seed": 1}, "seed"),
        ([A, B], None, {"method": "svd", "svd_rank": 0}, "svd_rank"),
        ([A, B], None, {"svd_rank": 8}, "svd_rank"),
        ([A, B], None, {"dtype": "int8"}, "dtype"),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    cids: list[str], weights: list[float] | None, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_recipe(cids, weights, CombinationOptions(**options))
    assert caught.value.param == param
