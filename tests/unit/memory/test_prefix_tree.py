from __future__ import annotations

import pytest

from loramux.memory.prefix_tree import (
    Node,
    PrefixForest,
    PrefixTree,
    lock,
    path_pages,
    unlock,
)

KEY = ("base", (("a", 1.0), ("b", 0.5)), "")


def grow(forest: PrefixForest, tree: PrefixTree, *blocks: tuple[int, ...]) -> list[Node]:
    """A chain of nodes below the top; page 0 holds the first block."""
    nodes = [tree.top]
    for page_id, block in enumerate(blocks):
        nodes.append(Node(("prefix", page_id), tree, nodes[-1], block, page_id, page_id))
        forest.insert(nodes[-1])
    return nodes[1:]


def test_a_match_ends_at_the_first_block_that_differs_or_is_not_whole() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    first, second = grow(forest, tree, (1, 2), (3, 4))
    assert tree.match([1, 2, 3, 4, 5], 2) == [first, second]
    assert tree.match((1, 2, 3), 2) == [first]
    assert tree.match([1, 2, 9, 4], 2) == [first]
    assert tree.match([1], 2) == [] and tree.match([3, 4], 2) == []
    assert path_pages(second) == [0, 1] and path_pages(tree.top) == []


def test_locking_counts_only_what_was_idle_and_unlocking_what_becomes_so() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    first, second, third = grow(forest, tree, (1,), (2,), (3,))
    assert lock(second) == 2
    assert lock(third) == 1 and lock(third) == 0 and lock(first) == 0
    assert (first.num_users, second.num_users, third.num_users) == (2, 2, 2)
    assert unlock(second) == [] and unlock(third) == []
    assert unlock(third) == [third, second], "first still has a lease of its own"
    assert unlock(first) == [first] and tree.top.num_users == 0
    with pytest.raises(AssertionError, match="not in use"):
        unlock(first)


def test_only_an_idle_leaf_can_be_removed() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    first, second = grow(forest, tree, (1,), (2,))
    with pytest.raises(AssertionError, match="in use"):
        forest.remove(first)
    lock(second)
    with pytest.raises(AssertionError, match="in use"):
        forest.remove(second)
    unlock(second)
    assert forest.remove(second) is first and forest.remove(first) is tree.top
    assert forest.num_pages("a") == 0


def test_parents_come_before_children() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    grow(forest, tree, (1,), (2,), (3,))
    forest.insert(Node(("prefix", 9), tree, tree.top.children[(1,)], (7,), 9, 9))
    seen: set[Node] = {tree.top}
    for node in tree.nodes():
        assert node.parent in seen
        seen.add(node)
    assert len(seen) == 5


def test_a_forest_knows_its_trees_by_each_adapter_until_they_are_empty_or_uprooted() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    other = forest.plant(("base", (("b", 1.0),), ""))
    [node] = grow(forest, tree, (1,))
    assert forest.trees_of("a") == [tree] and forest.trees_of("b") == [tree, other]
    assert forest.num_pages("b") == 1
    forest.uproot_if_empty(tree)
    assert forest.get(KEY) is tree, "it still has a page"
    forest.uproot_if_empty(other)
    assert forest.trees() == [tree]
    forest.check_integrity()
    forest.uproot(tree)
    assert forest.get(KEY) is None and forest.num_pages("b") == 0 and not forest.trees_of("a")
    forest.remove(node)
    assert tree.num_pages == 0


def test_integrity_check_sees_a_wrong_count_and_a_tree_of_nothing() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    with pytest.raises(AssertionError, match="nothing"):
        forest.check_integrity()
    [node] = grow(forest, tree, (1,))
    tree.offered[node.owner] = node
    tree.check_integrity({})
    with pytest.raises(AssertionError, match="users"):
        tree.check_integrity({node: 1})
    tree.offered.clear()
    with pytest.raises(AssertionError, match="offer"):
        tree.check_integrity({})


def test_the_mean_of_reuse_follows_the_latest_requests() -> None:
    forest = PrefixForest()
    tree = forest.plant(KEY)
    for _ in range(60):
        forest.count_reuse(tree, 64)
    assert forest.mean_reused_tokens("a") == pytest.approx(64, rel=0.01)
    for _ in range(60):
        forest.count_reuse(tree, 0)
    assert forest.mean_reused_tokens("b") < 0.1 and forest.mean_reused_tokens("none") == 0
