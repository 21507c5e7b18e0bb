"""Radix trees of cached prefixes: one tree of whole blocks per key, with use counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loramux.memory.pages import Owner
from loramux.types.request import Selection

# (base digest, selection, salt): prefixes of different keys are never shared.
PrefixKey = tuple[str, Selection, str]
Block = tuple[int, ...]
# Weight of the newest request in the mean number of tokens that an adapter's requests reuse.
REUSE_SMOOTHING = 0.125


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One page: the KV of a block of tokens that follows its parent's block."""

    owner: Owner
    tree: PrefixTree
    parent: Node | None
    """None for the root, which stands for the empty prefix and has no page."""
    block: Block
    page_id: int
    path: int
    """Hash of the tree's key and of all tokens up to the end of the block."""
    is_reused: bool = False
    """Whether more than one request has used it."""
    children: dict[Block, Node] = field(default_factory=dict)
    num_users: int = 0
    """Number of leases that end at this node plus number of children in use."""

    @property
    def is_idle_leaf(self) -> bool:
        return not self.num_users and not self.children and self.parent is not None


class PrefixTree:
    """A tree of nodes; a node is in use as long as a lease ends at it or below it."""

    def __init__(self, key: PrefixKey) -> None:
        self.key = key
        self.root = Node(("prefix", -1), self, None, (), -1, hash(key))
        self.cids = frozenset(cid for cid, _ in key[1])
        self.num_pages = 0
        self.is_dropped = False
        """Whether the tree may no longer be matched; its pages are freed with their last lease."""
        self.candidates: dict[Owner, Node] = {}
        """Idle leaves, which the reclaimer may evict."""

    def break_cycle_if_empty(self) -> None:
        """Deletes the root of an empty tree, which is not used any more.

        Tree and root refer to each other; otherwise only a full garbage collection would free them.
        """
        if not self.root.children and not self.root.num_users:
            del self.root

    def match(self, token_ids: Sequence[int], block_tokens: int) -> list[Node]:
        """Returns the nodes of the longest cached prefix, in order."""
        path = []
        node = self.root
        for stop in range(block_tokens, len(token_ids) + 1, block_tokens):
            child = node.children.get(tuple(token_ids[stop - block_tokens : stop]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self, leases: Mapping[Node, int]) -> None:
        """`leases` is the number of leases that end at each node."""
        num_pages = 0
        for node in [self.root, *self.nodes()]:
            num_pages += node.parent is not None
            num_used = sum(child.num_users > 0 for child in node.children.values())
            expected = num_used + leases.get(node, 0)
            assert node.num_users == expected, f"{node.owner} has {expected} users"
            assert node.is_idle_leaf == (node.owner in self.candidates), f"{node.owner}: candidate"
            assert node.num_users or not self.is_dropped, f"{node.owner} was dropped"
            for block, child in node.children.items():
                assert (child.parent, child.tree, child.block) == (node, self, block)
        assert num_pages == self.num_pages, f"{num_pages} pages, not {self.num_pages}"


@dataclass(slots=True)
class _AdapterPrefixes:
    """The prefixes whose selection contains one adapter."""

    trees: dict[PrefixKey, PrefixTree] = field(default_factory=dict)
    num_pages: int = 0
    mean_reused_tokens: float = 0.0


class PrefixIndex:
    """Finds the trees that may be matched, by key and by the adapters of their selection."""

    def __init__(self) -> None:
        self._trees: dict[PrefixKey, PrefixTree] = {}
        self._adapters: dict[str, _AdapterPrefixes] = {}

    def get(self, key: PrefixKey) -> PrefixTree | None:
        return self._trees.get(key)

    def trees(self) -> list[PrefixTree]:
        return list(self._trees.values())

    def trees_of(self, cid: str) -> list[PrefixTree]:
        adapter = self._adapters.get(cid)
        return [] if adapter is None else list(adapter.trees.values())

    def num_pages(self, cid: str) -> int:
        adapter = self._adapters.get(cid)
        return 0 if adapter is None else adapter.num_pages

    def mean_reused_tokens(self, cid: str) -> float:
        """Returns the mean number of reused tokens of the adapter's latest requests."""
        adapter = self._adapters.get(cid)
        return 0.0 if adapter is None else adapter.mean_reused_tokens

    def count_reuse(self, tree: PrefixTree, num_tokens: int) -> None:
        for cid in tree.cids:
            adapter = self._adapters[cid]
            change = num_tokens - adapter.mean_reused_tokens
            adapter.mean_reused_tokens += REUSE_SMOOTHING * change

    def add_tree(self, key: PrefixKey) -> PrefixTree:
        tree = self._trees[key] = PrefixTree(key)
        for cid in tree.cids:
            self._adapters.setdefault(cid, _AdapterPrefixes()).trees[key] = tree
        return tree

    def remove_tree(self, tree: PrefixTree) -> None:
        """Removes a tree, which is never matched again; leases that end in it stay valid."""
        tree.is_dropped = True
        del self._trees[tree.key]
        for cid in tree.cids:
            adapter = self._adapters[cid]
            adapter.num_pages -= tree.num_pages
            del adapter.trees[tree.key]
            if not adapter.trees:
                del self._adapters[cid]

    def remove_if_empty(self, tree: PrefixTree) -> None:
        if not tree.root.children and not tree.root.num_users:
            self.remove_tree(tree)
            tree.break_cycle_if_empty()

    def insert(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.block] = node
        self._count_pages(node.tree, 1)

    def remove(self, leaf: Node) -> Node:
        """Removes an idle leaf from its tree; returns its parent."""
        assert leaf.is_idle_leaf and leaf.parent is not None, f"{leaf.owner} is in use"
        del leaf.parent.children[leaf.block]
        self._count_pages(leaf.tree, -1)
        return leaf.parent

    def check_integrity(self) -> None:
        expected: dict[str, dict[PrefixKey, PrefixTree]] = {}
        for key, tree in self._trees.items():
            assert tree.key == key and not tree.is_dropped, "a dropped tree is in the index"
            assert tree.root.children or tree.root.num_users, "an empty tree is in the index"
            for cid in tree.cids:
                expected.setdefault(cid, {})[key] = tree
        found = {cid: adapter.trees for cid, adapter in self._adapters.items()}
        assert found == expected, "the index by adapter is wrong"
        for cid, adapter in self._adapters.items():
            num_pages = sum(tree.num_pages for tree in adapter.trees.values())
            assert num_pages == adapter.num_pages, f"{cid} has {num_pages} pages"

    def _count_pages(self, tree: PrefixTree, change: int) -> None:
        tree.num_pages += change
        if not tree.is_dropped:
            for cid in tree.cids:
                self._adapters[cid].num_pages += change


def path_pages(node: Node) -> list[int]:
    """Returns the pages from the tree's root to this node, in order."""
    page_ids = []
    while node.parent is not None:
        page_ids.append(node.page_id)
        node = node.parent
    return page_ids[::-1]


def lock(node: Node) -> int:
    """Adds a lease that ends here; returns how many pages were idle and are in use now."""
    num_locked = 0
    while True:
        node.num_users += 1
        if node.num_users > 1 or node.parent is None:
            return num_locked
        num_locked += 1
        node = node.parent


def unlock(node: Node) -> list[Node]:
    """Removes a lease that ends here; returns the nodes that became idle, deepest first."""
    idle: list[Node] = []
    while True:
        assert node.num_users > 0, f"{node.owner} is not in use"
        node.num_users -= 1
        if node.num_users or node.parent is None:
            return idle
        idle.append(node)
        node = node.parent
