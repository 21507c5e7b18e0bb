"""Radix trees of cached prefixes: one tree of whole blocks per key, with use counts.

An aLoRA computes what precedes its start as the base does. These blocks are in the tree of the
base, and the blocks from the start on are a branch: nodes of the adapter's tree below a node of the
base's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loramux.memory.pages import Owner
from loramux.types.request import Selection

# (base digest, selection, salt): prefixes of different keys are never shared.
PrefixKey = tuple[str, Selection, str]
Block = tuple[int, ...]
# What leads from a node to a child. At the top of a branch also its tree, and the offset of the
# start inside the block: the block before the start is the base's, and the rest is not.
Edge = Block | tuple["PrefixTree", int, Block]
# Weight of the newest request in the mean number of tokens that an adapter's requests reuse.
REUSE_SMOOTHING = 0.125


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One page: the KV of a block of tokens that follows its parent's block."""

    owner: Owner
    tree: PrefixTree
    parent: Node | None
    """None for the root, which stands for the empty prefix and has no page."""
    edge: Edge
    page_id: int
    path: int
    """Hash of the tree's key and of all tokens up to the end of the block."""
    is_reused: bool = False
    """Whether more than one request has used it."""
    children: dict[Edge, Node] = field(default_factory=dict)
    num_users: int = 0
    """Number of leases that end at this node plus number of children in use."""

    @property
    def is_idle_leaf(self) -> bool:
        return not self.num_users and not self.children and self.parent is not None

    @property
    def is_branch_top(self) -> bool:
        """Returns whether the node is the first of a branch, and its parent of another tree."""
        return self.parent is not None and self.parent.tree is not self.tree


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
        self.branch_tops: dict[Owner, Node] = {}

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no node, no branch of another tree, and no lease."""
        return not (self.num_pages or self.root.children or self.root.num_users)

    def break_cycle_if_empty(self) -> None:
        """Delete the root of an empty tree, which is not used any more.

        Tree and root refer to each other; otherwise only a full garbage collection would free them.
        """
        if self.is_empty:
            del self.root

    def match(
        self, token_ids: Sequence[int], block_tokens: int, branch: Branch | None = None
    ) -> list[Node]:
        """Return the nodes of the longest cached prefix, in order."""
        path = []
        node = self.root
        top_stop = 0 if branch is None else (branch.index + 1) * block_tokens
        for stop in range(block_tokens, len(token_ids) + 1, block_tokens):
            block = tuple(token_ids[stop - block_tokens : stop])
            edge = branch.edge(block) if branch is not None and stop == top_stop else block
            child = node.children.get(edge)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes but the root, parents before children."""
        stack = [*self.root.children.values(), *self.branch_tops.values()]
        while stack:
            node = stack.pop()
            # Another tree's branch is none of this tree's nodes.
            if node.tree is self:
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
            for edge, child in node.children.items():
                assert child.parent is node and child.edge == edge
                tree = tree_below(node, edge)
                assert child.tree is tree, f"{child.owner} is in another tree than its edge"
                assert child.is_branch_top == (child.owner in tree.branch_tops), "branch"
        assert num_pages == self.num_pages, f"{num_pages} pages, not {self.num_pages}"
        for top in self.branch_tops.values():
            assert top.parent is not None and top.parent.children[top.edge] is top


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Where the prefix of an aLoRA leaves the base's tree: in the block with its start."""

    tree: PrefixTree
    """The adapter's tree, to which the blocks from there on belong."""
    index: int
    """Index of the first block that is not the base's."""
    offset: int
    """Position of the start in this block."""

    def edge(self, block: Block) -> Edge:
        """Return the edge to the branch's first node; that of a dropped tree is never found."""
        return self.tree, self.offset, block


def tree_below(parent: Node, edge: Edge) -> PrefixTree:
    """Return the tree to which the child at this edge belongs."""
    return edge[0] if isinstance(edge[0], PrefixTree) else parent.tree


def path_below(parent: Node, edge: Edge) -> int:
    """Return the path of the child at this edge."""
    tree = tree_below(parent, edge)
    # A tree is named by its key: after it was dropped, another one may take its place.
    is_top = tree is not parent.tree
    return hash((parent.path, tree.root.path, edge[1:]) if is_top else (parent.path, edge))


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
        """Return the mean number of reused tokens of the adapter's latest requests."""
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
        """Remove a tree, which is never matched again; lease that end in it stay valid."""
        tree.is_dropped = True
        del self._trees[tree.key]
        for cid in tree.cids:
            adapter = self._adapters[cid]
            adapter.num_pages -= tree.num_pages
            del adapter.trees[tree.key]
            if not adapter.trees:
                del self._adapters[cid]

    def remove_if_empty(self, tree: PrefixTree) -> None:
        if tree.is_empty:
            if not tree.is_dropped:
                self.remove_tree(tree)
            tree.break_cycle_if_empty()

    def insert(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.edge] = node
        if node.is_branch_top:
            node.tree.branch_tops[node.owner] = node
        self._count_pages(node.tree, 1)

    def remove(self, leaf: Node) -> Node:
        """Remove an idle leaf from its tree; return its parent."""
        assert leaf.is_idle_leaf and leaf.parent is not None, f"{leaf.owner} is in use"
        del leaf.parent.children[leaf.edge]
        leaf.tree.branch_tops.pop(leaf.owner, None)
        self._count_pages(leaf.tree, -1)
        return leaf.parent

    def check_integrity(self) -> None:
        expected: dict[str, dict[PrefixKey, PrefixTree]] = {}
        for key, tree in self._trees.items():
            assert tree.key == key and not tree.is_dropped, "a dropped tree is in the index"
            assert not tree.is_empty, "an empty tree is in the index"
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
    """Return the pages from the root to this node, in order."""
    page_ids = []
    while node.parent is not None:
        page_ids.append(node.page_id)
        node = node.parent
    return page_ids[::-1]


def lock(node: Node) -> int:
    """Add a lease that ends here; return how many pages were idle and are in use now."""
    num_locked = 0
    while True:
        node.num_users += 1
        if node.num_users > 1 or node.parent is None:
            return num_locked
        num_locked += 1
        node = node.parent


def unlock(node: Node) -> list[Node]:
    """Remove a lease that ends here; return the nodes that became idle, deepest first."""
    idle: list[Node] = []
    while True:
        assert node.num_users > 0, f"{node.owner} is not in use"
        node.num_users -= 1
        if node.num_users or node.parent is None:
            return idle
        idle.append(node)
        node = node.parent
