from __future__ import annotations

import pytest

from loramux.memory.prefix_tree import (
    Node,
    PrefixIndex,
    PrefixTree,
    lock,
    path_pages,
    unlock,
)

KEY = ("base", (("a", 1.0), ("b", 0.5)), "")


def grow(index: PrefixIndex, tree: PrefixTree, *blocks: tuple[int, ...]) -> list[Node]:
    """Add a chain of nodes below the root; page 0 holds the first block."""
    nodes = [tree.root]
    for page_id, block in enumerate(blocks):
        nodes.append(Node(("prefix", page_id), tree, nodes[-1], block, page_id, page_id))
        index.insert(nodes[-1])
    return nodes[1:]


def test_a_match_ends_at_the_first_block_that_differs_or_is_not_whole() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    first, second = grow(index, tree, (1, 2), (3, 4))
    assert tree.match([1, 2, 3, 4, 5], 2) == [first, second]
    assert tree.match((1, 2, 3), 2) == [first]
    assert tree.match([1, 2, 9, 4], 2) == [first]
    assert tree.match([1], 2) == [] and tree.match([3, 4], 2) == []
    assert path_pages(second) == [0, 1] and path_pages(tree.root) == []


def test_locking_counts_only_what_was_idle_and_unlocking_what_becomes_so() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    first, second, third = grow(index, tree, (1,), (2,), (3,))
    assert lock(second) == 2
    assert lock(third) == 1 and lock(third) == 0 and lock(first) == 0
    assert (first.num_users, second.num_users, third.num_users) == (2, 2, 2)
    assert unlock(second) == [] and unlock(third) == []
    assert unlock(third) == [third, second], "first still has a lease of its own"
    assert unlock(first) == [first] and tree.root.num_users == 0
    with pytest.raises(AssertionError, match="not in use"):
        unlock(first)


def test_only_an_idle_leaf_can_be_removed() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    first, second = grow(index, tree, (1,), (2,))
    with pytest.raises(AssertionError, match="in use"):
        index.remove(first)
    lock(second)
    with pytest.raises(AssertionError, match="in use"):
        index.remove(second)
    unlock(second)
    assert index.remove(second) is first and index.remove(first) is tree.root
    assert index.num_pages("a") == 0


def test_parents_come_before_children() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    grow(index, tree, (1,), (2,), (3,))
    index.insert(Node(("prefix", 9), tree, tree.root.children[(1,)], (7,), 9, 9))
    seen: set[Node] = {tree.root}
    for node in tree.nodes():
        assert node.parent in seen
        seen.add(node)
    assert len(seen) == 5


def test_the_index_finds_trees_by_adapter_until_they_are_empty_or_removed() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    other = index.add_tree(("base", (("b", 1.0),), ""))
    [node] = grow(index, tree, (1,))
    assert index.trees_of("a") == [tree] and index.trees_of("b") == [tree, other]
    assert index.num_pages("b") == 1
    index.remove_if_empty(tree)
    assert index.get(KEY) is tree, "it still has a page"
    index.remove_if_empty(other)
    assert index.trees() == [tree]
    index.check_integrity()
    index.remove_tree(tree)
    assert index.get(KEY) is None and index.num_pages("b") == 0 and not index.trees_of("a")
    index.remove(node)
    assert tree.num_pages == 0


def test_the_integrity_check_finds_a_wrong_count_and_an_empty_tree() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    with pytest.raises(AssertionError, match="empty tree"):
        index.check_integrity()
    [node] = grow(index, tree, (1,))
    tree.candidates[node.owner] = node
    tree.check_integrity({})
    with pytest.raises(AssertionError, match="users"):
        tree.check_integrity({node: 1})
    tree.candidates.clear()
    with pytest.raises(AssertionError, match="candidate"):
        tree.check_integrity({})


def test_the_mean_of_reuse_follows_the_latest_requests() -> None:
    index = PrefixIndex()
    tree = index.add_tree(KEY)
    for _ in range(60):
        index.count_reuse(tree, 64)
    assert index.mean_reused_tokens("a") == pytest.approx(64, rel=0.01)
    for _ in range(60):
        index.count_reuse(tree, 0)
    assert index.mean_reused_tokens("b") < 0.1 and index.mean_reused_tokens("none") == 0
