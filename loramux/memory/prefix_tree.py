"""The shape of cached prefixes: a tree of whole blocks for each key, and which of it is in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loramux.memory.pages import Owner
from loramux.types.request import Selection

# (base digest, selection, salt): prefixes of different keys have nothing in common.
PrefixKey = tuple[str, Selection, str]
Block = tuple[int, ...]
# Weight of the newest request in the mean of tokens that an adapter's requests reuse.
REUSE_SMOOTHING = 0.125


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One page: the keys and values of a block of tokens that follows its parent's."""

    owner: Owner
    tree: PrefixTree
    parent: Node | None
    """None: the tree's top, which stands for the empty prefix and has no page."""
    block: Block
    page_id: int
    path: int
    """A hash of all tokens up to its end, and of the tree's key."""
    is_reused: bool = False
    """More than one request has asked for it."""
    children: dict[Block, Node] = field(default_factory=dict)
    num_users: int = 0
    """Leases that end here, and children that are in use."""

    @property
    def is_idle_leaf(self) -> bool:
        return not self.num_users and not self.children and self.parent is not None


class PrefixTree:
    """A node is in use as long as a lease ends at it or below it."""

    def __init__(self, key: PrefixKey) -> None:
        self.key = key
        self.top = Node(("prefix", -1), self, None, (), -1, hash(key))
        self.cids = frozenset(cid for cid, _ in key[1])
        self.num_pages = 0
        self.is_dropped = False
        """Nothing here may be matched any more; pages leave as their last user does."""
        self.offered: dict[Owner, Node] = {}

    def end_if_empty(self) -> None:
        """Out of reach: tree and top hold each other, and only a full collection would free them.

        Nothing here is asked for any more once the last lease is gone.
        """
        if not self.top.children and not self.top.num_users:
            del self.top

    def match(self, token_ids: Sequence[int], block_tokens: int) -> list[Node]:
        """The nodes of the longest cached prefix, in order."""
        path = []
        node = self.top
        for stop in range(block_tokens, len(token_ids) + 1, block_tokens):
            child = node.children.get(tuple(token_ids[stop - block_tokens : stop]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def nodes(self) -> Iterator[Node]:
        """All but the top, parents before children."""
        stack = list(self.top.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self, leases: Mapping[Node, int]) -> None:
        """`leases`: how many end at each node."""
        num_pages = 0
        for node in [self.top, *self.nodes()]:
            num_pages += node.parent is not None
            num_used = sum(child.num_users > 0 for child in node.children.values())
            expected = num_used + leases.get(node, 0)
            assert node.num_users == expected, f"{node.owner} has {expected} users"
            assert node.is_idle_leaf == (node.owner in self.offered), f"{node.owner}: wrong offer"
            assert node.num_users or not self.is_dropped, f"{node.owner} was dropped"
            for block, child in node.children.items():
                assert (child.parent, child.tree, child.block) == (node, self, block)
        assert num_pages == self.num_pages, f"{num_pages} pages, not {self.num_pages}"


@dataclass(slots=True)
class _AdapterPrefixes:
    trees: dict[PrefixKey, PrefixTree] = field(default_factory=dict)
    num_pages: int = 0
    mean_reused_tokens: float = 0.0


class PrefixForest:
    """The trees that may be matched, by key and by the adapters of their selection."""

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
        """Of the adapter's latest requests."""
        adapter = self._adapters.get(cid)
        return 0.0 if adapter is None else adapter.mean_reused_tokens

    def count_reuse(self, tree: PrefixTree, num_tokens: int) -> None:
        for cid in tree.cids:
            adapter = self._adapters[cid]
            change = num_tokens - adapter.mean_reused_tokens
            adapter.mean_reused_tokens += REUSE_SMOOTHING * change

    def plant(self, key: PrefixKey) -> PrefixTree:
        tree = self._trees[key] = PrefixTree(key)
        for cid in tree.cids:
            self._adapters.setdefault(cid, _AdapterPrefixes()).trees[key] = tree
        return tree

    def uproot(self, tree: PrefixTree) -> None:
        """Out of reach for good; leases that end in it stay valid."""
        tree.is_dropped = True
        del self._trees[tree.key]
        for cid in tree.cids:
            adapter = self._adapters[cid]
            adapter.num_pages -= tree.num_pages
            del adapter.trees[tree.key]
            if not adapter.trees:
                del self._adapters[cid]

    def uproot_if_empty(self, tree: PrefixTree) -> None:
        if not tree.top.children and not tree.top.num_users:
            self.uproot(tree)
            tree.end_if_empty()

    def insert(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.block] = node
        self._count_pages(node.tree, 1)

    def remove(self, leaf: Node) -> Node:
        """Takes an idle leaf out of its tree; returns its parent."""
        assert leaf.is_idle_leaf and leaf.parent is not None, f"{leaf.owner} is in use"
        del leaf.parent.children[leaf.block]
        self._count_pages(leaf.tree, -1)
        return leaf.parent

    def check_integrity(self) -> None:
        expected: dict[str, dict[PrefixKey, PrefixTree]] = {}
        for key, tree in self._trees.items():
            assert tree.key == key and not tree.is_dropped, "a dropped tree is in reach"
            assert tree.top.children or tree.top.num_users, "a tree of nothing is kept"
            for cid in tree.cids:
                expected.setdefault(cid, {})[key] = tree
        found = {cid: adapter.trees for cid, adapter in self._adapters.items()}
        assert found == expected, "an adapter's prefixes are lost"
        for cid, adapter in self._adapters.items():
            num_pages = sum(tree.num_pages for tree in adapter.trees.values())
            assert num_pages == adapter.num_pages, f"{cid} has {num_pages} pages"

    def _count_pages(self, tree: PrefixTree, change: int) -> None:
        tree.num_pages += change
        if not tree.is_dropped:
            for cid in tree.cids:
                self._adapters[cid].num_pages += change


def path_pages(node: Node) -> list[int]:
    """The pages from the tree's top to this node, in order."""
    page_ids = []
    while node.parent is not None:
        page_ids.append(node.page_id)
        node = node.parent
    return page_ids[::-1]


def lock(node: Node) -> int:
    """One more lease ends here; returns how many pages were idle and are in use now."""
    num_locked = 0
    while True:
        node.num_users += 1
        if node.num_users > 1 or node.parent is None:
            return num_locked
        num_locked += 1
        node = node.parent


def unlock(node: Node) -> list[Node]:
    """One lease less ends here; returns the nodes that are idle now, deepest first."""
    idle: list[Node] = []
    while True:
        assert node.num_users > 0, f"{node.owner} is not in use"
        node.num_users -= 1
        if node.num_users or node.parent is None:
            return idle
        idle.append(node)
        node = node.parent
