"""Keys and values that were computed once, kept in pages for whoever asks for the same prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.policies import EvictionPolicy
from loramux.memory.prefix_tree import (
    Block,
    Node,
    PrefixForest,
    PrefixKey,
    lock,
    path_pages,
    unlock,
)
from loramux.memory.reclaim import Reclaimer
from loramux.memory.reuse import ReuseMeter

__all__ = ["PrefixCache", "PrefixKey", "PrefixLease"]

# What a prefix is worth, of its full worth, while an adapter of its selection must be loaded first.
ABSENT_ADAPTER_FACTOR = 0.25


@dataclass(slots=True, eq=False)
class PrefixLease:
    """What a running sequence holds: the pages from the start of its prefix, locked."""

    key: PrefixKey
    page_ids: list[int]
    """Shared pages, in order; whole blocks. Others read them too: never write into them."""
    _block_tokens: int
    _node: Node | None
    """Where the prefix ends; None: released."""

    @property
    def num_tokens(self) -> int:
        return len(self.page_ids) * self._block_tokens


class PrefixCache:
    """One tree for each base, selection and salt. Idle leaves are offered to the reclaimer.

    A page that a lease locks is never evicted, and it leaves only after all that follow it.
    """

    def __init__(
        self,
        *,
        pages: PageAllocator,
        reclaimer: Reclaimer,
        policy: EvictionPolicy,
        block_tokens: int,
        clock: Callable[[], float],
        token_s: float = 1e-3,
    ) -> None:
        self.block_tokens = block_tokens
        self.token_s = token_s
        """Seconds to compute a token again; read when a page is offered."""
        self._pages = pages
        self._reclaimer = reclaimer
        self._policy = policy
        self._clock = clock
        self._forest = PrefixForest()
        self._reuse = ReuseMeter(pages.num_pages)
        self._nodes: dict[Hashable, Node] = {}
        self._on_device: set[str] = set()
        self._num_idle = 0
        self._ids = count()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_pages = 0
        """Those that left to make room."""
        reclaimer.add_holder(self)
        reclaimer.doubt = lambda: policy.doubt(self._reuse.trust)

    @property
    def num_idle_pages(self) -> int:
        return self._num_idle

    @property
    def num_protected_pages(self) -> int:
        return 0

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def acquire(self, key: PrefixKey, token_ids: Sequence[int]) -> PrefixLease:
        """Locks the longest cached prefix in whole blocks, which may be empty, or all of it.

        Each call counts as a use and in the figures of reuse: look with peek, acquire to run.
        """
        tree = self._forest.get(key) or self._forest.plant(key)
        path = tree.match(token_ids, self.block_tokens)
        now = self._clock()
        for node in path:
            self._policy.used(node.owner, now)
            self._mark_reused(node)
        last = path[-1] if path else tree.top
        self._withdraw(last)
        self._num_idle -= lock(last)
        lease = PrefixLease(key, [node.page_id for node in path], self.block_tokens, last)
        self.num_query_tokens += len(token_ids)
        self.num_hit_tokens += lease.num_tokens
        self._forest.count_reuse(tree, lease.num_tokens)
        return lease

    def peek(self, key: PrefixKey, token_ids: Sequence[int]) -> int:
        """Tokens that acquire would find; nothing is locked or counted."""
        tree = self._forest.get(key)
        if tree is None:
            return 0
        return len(tree.match(token_ids, self.block_tokens)) * self.block_tokens

    def commit(
        self, lease: PrefixLease, token_ids: Sequence[int], page_ids: Sequence[int], owner: Owner
    ) -> list[int]:
        """Shares the whole blocks computed since; returns the sequence's pages from now on.

        token_ids are those computed so far, page_ids the lease's pages and then the owner's own.
        Where another sequence was first with an equal block, its page takes the place of ours.
        """
        node = lease._node
        assert node is not None, "the lease was released"
        held = list(page_ids)
        if node.tree.is_dropped:
            return held
        now = self._clock()
        size = self.block_tokens
        for index in range(len(lease.page_ids), len(token_ids) // size):
            block = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(block)
            if child is None:
                child = self._insert(node, block, held[index], owner)
            else:
                self._pages.release(owner, [held[index]])
                held[index] = child.page_id
                self._withdraw(child)
                self._mark_reused(child)
            self._policy.used(child.owner, now)
            self._num_idle -= lock(child)
            # Its child is in use now, so that the node stays so.
            node.num_users -= 1
            lease._node = node = child
            lease.page_ids.append(child.page_id)
        return held

    def release(self, lease: PrefixLease) -> None:
        """Unlocks; what nobody else locks may be evicted from now on."""
        node = lease._node
        assert node is not None, "the lease was released already"
        lease._node = None
        lease.page_ids = []
        idle = unlock(node)
        self._num_idle += len(idle)
        if node.tree.is_dropped:
            for idle_node in idle:
                self._free(idle_node)
            node.tree.end_if_empty()
        elif node.is_idle_leaf:
            self._offer(node)
        else:
            self._forest.uproot_if_empty(node.tree)

    def adapter_moved(self, cid: str, *, on_device: bool) -> None:
        """A prefix whose adapter must be loaded first is worth less: its offers are renewed."""
        if on_device:
            self._on_device.add(cid)
        else:
            self._on_device.discard(cid)
        for tree in self._forest.trees_of(cid):
            for leaf in tree.offered.values():
                self._offer(leaf)

    def worth_of(self, cid: str) -> float:
        """Seconds a request of the adapter that its prefixes lose when it leaves the device.

        That is the mean time that its requests save by reuse, less what prefixes keep of their
        worth without the adapter; to be added to the seconds that a reload costs.
        """
        num_tokens = min(self._forest.mean_reused_tokens(cid), self.cached_tokens(cid))
        return (1 - ABSENT_ADAPTER_FACTOR) * num_tokens * self.token_s

    def cached_tokens(self, cid: str) -> int:
        return self._forest.num_pages(cid) * self.block_tokens

    def drop(self, cid: str) -> None:
        """The adapter is gone for good: its prefixes are never matched again.

        Idle pages are free at once, those in use as soon as they are released.
        """
        for tree in self._forest.trees_of(cid):
            self._forest.uproot(tree)
            idle = [node for node in tree.nodes() if not node.num_users]
            for node in reversed(idle):
                self._free(node)
            tree.end_if_empty()

    def evict(self, key: Hashable) -> None:
        """For the reclaimer: frees an idle leaf; its parent may be the next."""
        node = self._nodes[key]
        self._reuse.evicted(node.path, was_reused=node.is_reused)
        parent = self._free(node)
        self.num_evicted_pages += 1
        self._policy.evicted(1 / self._pages.num_pages)
        if parent.is_idle_leaf:
            self._offer(parent)
        else:
            self._forest.uproot_if_empty(parent.tree)

    def claims(self) -> dict[Owner, list[int]]:
        return {node.owner: [node.page_id] for node in self._nodes.values()}

    def check_integrity(self, leases: Iterable[PrefixLease]) -> None:
        """`leases`: all that are acquired and not released."""
        ends: Counter[Node] = Counter()
        self._forest.check_integrity()
        trees = set(self._forest.trees())
        for lease in leases:
            assert lease._node is not None, "a released lease is still held"
            assert lease.page_ids == path_pages(lease._node), "a lease's pages are not its path's"
            ends[lease._node] += 1
            trees.add(lease._node.tree)
        reached = set()
        for tree in trees:
            tree.check_integrity(ends)
            reached |= {node.owner for node in tree.nodes()}
            assert all(self._reclaimer.is_offered(owner) for owner in tree.offered), "not offered"
        assert reached == self._nodes.keys(), "a node is lost"
        num_idle = sum(not node.num_users for node in self._nodes.values())
        assert num_idle == self._num_idle, f"{num_idle} idle pages, not {self._num_idle}"

    def _insert(self, parent: Node, block: Block, page_id: int, owner: Owner) -> Node:
        """A node of the sequence's page; the caller locks it."""
        tree = parent.tree
        path = hash((parent.path, block))
        node = Node(("prefix", next(self._ids)), tree, parent, block, page_id, path)
        node.is_reused = self._reuse.added(path)
        self._pages.transfer([page_id], owner, node.owner)
        self._forest.insert(node)
        self._nodes[node.owner] = node
        self._num_idle += 1
        return node

    def _free(self, node: Node) -> Node:
        """Gives the page of an idle leaf back; returns the leaf's parent."""
        self._withdraw(node)
        parent = self._forest.remove(node)
        self._pages.release(node.owner, [node.page_id])
        self._policy.forget(node.owner)
        del self._nodes[node.owner]
        self._num_idle -= 1
        return parent

    def _mark_reused(self, node: Node) -> None:
        if not node.is_reused:
            node.is_reused = True
            self._reuse.reused()

    def _offer(self, leaf: Node) -> None:
        factor = 1.0 if leaf.tree.cids <= self._on_device else ABSENT_ADAPTER_FACTOR
        cost_s = factor * self.block_tokens * self.token_s
        leaf.tree.offered[leaf.owner] = leaf
        worth = self._policy.worth(leaf.owner, cost_s=cost_s, size=1)
        self._reclaimer.offer(leaf.owner, self, worth=worth, is_doubted=not leaf.is_reused)

    def _withdraw(self, node: Node) -> None:
        if node.tree.offered.pop(node.owner, None) is not None:
            self._reclaimer.withdraw(node.owner)
