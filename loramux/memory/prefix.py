"""Prefix cache: keeps computed KV pages for requests with the same prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from loramux.memory.pages import Owner
from loramux.memory.prefix_tree import (
    Branch,
    Edge,
    Node,
    PrefixIndex,
    PrefixKey,
    lock,
    path_below,
    path_pages,
    tree_below,
    unlock,
)
from loramux.memory.reclaim import PageTier
from loramux.types.request import BASE_SELECTION

__all__ = ["PrefixCache", "PrefixKey", "PrefixLease", "ReuseEstimator"]

# Factor on the cost of losing a prefix while an adapter of its selection is not on the device.
ABSENT_ADAPTER_FACTOR = 0.25
# In multiples of the pool's pages: the half-life of the reuse estimate in new pages, the weight of
# its prior (that all pages are reused), and the number of evicted pages that are remembered.
HALF_LIFE_POOLS = 1.0
PRIOR_POOLS = 1 / 32
GHOST_POOLS = 4
MIN_PRIOR_PAGES = 4.0
# Reuse probability from which on a page that was used once is scored without a penalty.
FULL_SCORE_PROBABILITY = 0.5


class ReuseEstimator:
    """Estimates the probability that a new page is used a second time.

    Evicted pages are remembered by their path (ghost entries), so that a prompt that comes back
    after its eviction counts as a reuse too. Otherwise a cache that evicts early could not learn.
    """

    def __init__(self, num_pages: int) -> None:
        self._prior = max(MIN_PRIOR_PAGES, num_pages * PRIOR_POOLS)
        self._decay = 0.5 ** (1 / max(1.0, num_pages * HALF_LIFE_POOLS))
        self._max_ghosts = GHOST_POOLS * num_pages
        self._num_new = 0.0
        self._num_reused = 0.0
        # Path -> whether the page had been reused before its eviction; oldest eviction first.
        self._ghosts: dict[int, bool] = {}

    @property
    def single_use_factor(self) -> float:
        """Returns the factor on the rate of a page that was used once: 0 < factor <= 1."""
        probability = (self._num_reused + self._prior) / (self._num_new + self._prior)
        return min(1.0, probability / FULL_SCORE_PROBABILITY)

    def added(self, path: int) -> bool:
        """Record that a page was computed; return whether it had been evicted before."""
        was_reused = self._ghosts.pop(path, None)
        if was_reused is None:
            self._num_new = self._num_new * self._decay + 1
            self._num_reused *= self._decay
            return False
        if not was_reused:
            self.reused()
        return True

    def reused(self) -> None:
        """Record the second use of a page."""
        self._num_reused += 1

    def evicted(self, path: int, *, was_reused: bool) -> None:
        self._ghosts[path] = was_reused
        if len(self._ghosts) > self._max_ghosts:
            del self._ghosts[next(iter(self._ghosts))]


@dataclass(slots=True, eq=False)
class PrefixLease:
    """The pages of a prefix that a running sequence has locked."""

    key: PrefixKey
    page_ids: list[int]
    """Shared pages of whole blocks, in order. Other sequences read them: they are read-only."""
    _block_tokens: int
    _node: Node | None
    """The last node of the prefix; None after the release."""
    _branch: Branch | None = None
    """None without a start; the branch's tree is kept while the lease is held."""

    @property
    def num_tokens(self) -> int:
        return len(self.page_ids) * self._block_tokens


class PrefixCache:
    """Holds one tree for each base, selection and salt; idle leaves are eviction candidates.

    A page that a lease locks is never evicted, and a page is evicted only after its children.
    `start` is Request.adapter_start: whole blocks before it are those of the base.
    """

    def __init__(self, tier: PageTier, *, reuse: ReuseEstimator, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._placement = tier.placement
        self._costs = tier.costs
        self._pages = tier.pages
        self._reclaimer = tier.reclaimer
        self._policy = tier.policy
        self._clock = tier.clock
        self._index = PrefixIndex()
        self._reuse = reuse
        self._nodes: dict[Hashable, Node] = {}
        self._num_idle = 0
        self._ids = count()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_pages = 0
        """Number of pages that the reclaimer has evicted."""
        tier.reclaimer.add_holder(self)

    @property
    def num_idle_pages(self) -> int:
        return self._num_idle

    @property
    def num_protected_pages(self) -> int:
        return 0

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def acquire(self, key: PrefixKey, token_ids: Sequence[int], start: int = 0) -> PrefixLease:
        """Locks the longest cached prefix in whole blocks; it may be empty, or all tokens.

        Each call counts as a use and in the hit rate; peek() counts nothing.
        """
        tree = self._index.get(key) or self._index.add_tree(key)
        own_tree, branch = tree, None
        if start:
            branch = Branch(own_tree, *divmod(start, self.block_tokens))
            lock(own_tree.root)
            base_key = _base_key(key)
            tree = self._index.get(base_key) or self._index.add_tree(base_key)
        path = tree.match(token_ids, self.block_tokens, branch)
        now = self._clock()
        for node in path:
            self._policy.used(node.owner, now)
            self._mark_reused(node)
        last = path[-1] if path else tree.root
        self._remove_candidate(last)
        self._num_idle -= lock(last)
        lease = PrefixLease(key, [node.page_id for node in path], self.block_tokens, last, branch)
        self.num_query_tokens += len(token_ids)
        self.num_hit_tokens += lease.num_tokens
        num_base = 0 if branch is None else branch.index * self.block_tokens
        self._index.count_reuse(own_tree, max(0, lease.num_tokens - num_base))
        return lease

    def peek(self, key: PrefixKey, token_ids: Sequence[int], start: int = 0) -> int:
        """Return the number of tokens that acquire would find; lock and count nothing."""
        tree, branch = self._index.get(key), None
        if start:
            if tree is None:
                token_ids = token_ids[: start - start % self.block_tokens]
            else:
                branch = Branch(tree, *divmod(start, self.block_tokens))
            tree = self._index.get(_base_key(key))
        if tree is None:
            return 0
        return len(tree.match(token_ids, self.block_tokens, branch)) * self.block_tokens

    def commit(
        self, lease: PrefixLease, token_ids: Sequence[int], page_ids: Sequence[int], owner: Owner
    ) -> list[int]:
        """Shares the whole blocks computed since; returns the sequence's pages from now on.

        `token_ids` are the tokens computed so far, `page_ids` the lease's pages followed by the
        owner's own. A page whose block is in the cache already is freed, and the cached one used.
        """
        node, branch = lease._node, lease._branch
        assert node is not None, "the lease was released"
        held = list(page_ids)
        now = self._clock()
        size = self.block_tokens
        num_blocks = len(token_ids) // size
        if branch is not None and branch.tree.is_dropped:
            num_blocks = min(num_blocks, branch.index)
        elif node.tree.is_dropped:
            return held
        for index in range(len(lease.page_ids), num_blocks):
            block = tuple(token_ids[index * size : (index + 1) * size])
            edge = block if branch is None or index != branch.index else branch.edge(block)
            child = node.children.get(edge)
            if child is None:
                child = self._insert(node, edge, held[index], owner)
            else:
                self._pages.release(owner, [held[index]])
                held[index] = child.page_id
                self._remove_candidate(child)
                self._mark_reused(child)
            self._policy.used(child.owner, now)
            self._num_idle -= lock(child)
            # The child in use replaces the lease that ended at the node.
            node.num_users -= 1
            lease._node = node = child
            lease.page_ids.append(child.page_id)
        return held

    def release(self, lease: PrefixLease) -> None:
        """Unlocks the pages; those without another lease may be evicted from now on."""
        node, branch = lease._node, lease._branch
        assert node is not None, "the lease was released already"
        lease._node = None
        lease.page_ids = []
        idle = unlock(node)
        self._num_idle += len(idle)
        for idle_node in idle:
            if not idle_node.tree.is_dropped:
                break
            node = self._free(idle_node)
        self._update(node)
        if branch is not None:
            unlock(branch.tree.root)
            if branch.tree is not node.tree:
                self._index.remove_if_empty(branch.tree)

    def adapter_moved(self, cid: str) -> None:
        """Update the scores of the adapter's prefixes after it came to the device or left it."""
        for tree in self._index.trees_of(cid):
            for leaf in tree.candidates.values():
                self._add_candidate(leaf)

    def cost_of_eviction(self, cid: str) -> float:
        """Return the seconds per request that prefixes lose when the adapter leaves the device.

        That is the mean time that its requests save by reuse, less the part that the prefixes
        keep without the adapter. It is added to the cost of reloading the adapter.
        """
        num_tokens = min(self._index.mean_reused_tokens(cid), self.cached_tokens(cid))
        return (1 - ABSENT_ADAPTER_FACTOR) * self._costs.recompute_s(num_tokens)

    def cached_tokens(self, cid: str) -> int:
        return self._index.num_pages(cid) * self.block_tokens

    def drop(self, cid: str) -> None:
        """Remove the prefixes of an adapter that was unregistered.

        Idle pages are freed at once, pages in use when their last lease is released.
        """
        for tree in self._index.trees_of(cid):
            self._index.remove_tree(tree)
            idle = [node for node in tree.nodes() if not node.num_users]
            for node in reversed(idle):
                parent = self._free(node)
                if parent.tree is not tree:
                    self._update(parent)
            tree.break_cycle_if_empty()

    def evict(self, key: Hashable) -> None:
        """Frees an idle leaf; its parent may become the next candidate."""
        node = self._nodes[key]
        self._reuse.evicted(node.path, was_reused=node.is_reused)
        parent = self._free(node)
        self.num_evicted_pages += 1
        self._policy.evicted(1 / self._pages.num_pages)
        self._update(parent)
        if parent.tree is not node.tree:
            self._index.remove_if_empty(node.tree)

    def claims(self) -> dict[Owner, list[int]]:
        return {node.owner: [node.page_id] for node in self._nodes.values()}

    def check_integrity(self, leases: Iterable[PrefixLease]) -> None:
        """`leases` are all leases that are acquired and not released."""
        ends: Counter[Node] = Counter()
        self._index.check_integrity()
        trees = set(self._index.trees())
        for lease in leases:
            assert lease._node is not None, "a released lease is still held"
            assert lease.page_ids == path_pages(lease._node), "a lease's pages are not its path's"
            ends[lease._node] += 1
            trees.add(lease._node.tree)
            if lease._branch is not None:
                ends[lease._branch.tree.root] += 1
                trees.add(lease._branch.tree)
        reached = set()
        for tree in trees:
            tree.check_integrity(ends)
            reached |= {node.owner for node in tree.nodes()}
            assert all(map(self._reclaimer.is_candidate, tree.candidates)), "no candidate"
        assert reached == self._nodes.keys(), "a node is lost"
        num_idle = sum(not node.num_users for node in self._nodes.values())
        assert num_idle == self._num_idle, f"{num_idle} idle pages, not {self._num_idle}"

    def _insert(self, parent: Node, edge: Edge, page_id: int, owner: Owner) -> Node:
        """Add a node for the sequence's page; the caller locks it."""
        tree, path = tree_below(parent, edge), path_below(parent, edge)
        node = Node(("prefix", next(self._ids)), tree, parent, edge, page_id, path)
        node.is_reused = self._reuse.added(path)
        self._pages.transfer([page_id], owner, node.owner)
        self._index.insert(node)
        self._nodes[node.owner] = node
        self._num_idle += 1
        return node

    def _free(self, node: Node) -> Node:
        """Frees the page of an idle leaf; returns the leaf's parent."""
        self._remove_candidate(node)
        parent = self._index.remove(node)
        self._pages.release(node.owner, [node.page_id])
        self._policy.forget(node.owner)
        del self._nodes[node.owner]
        self._num_idle -= 1
        return parent

    def _update(self, node: Node) -> None:
        """Make a node that lost a lease or a child a candidate, or removes its empty tree."""
        if node.is_idle_leaf:
            self._add_candidate(node)
        else:
            self._index.remove_if_empty(node.tree)

    def _mark_reused(self, node: Node) -> None:
        if not node.is_reused:
            node.is_reused = True
            self._reuse.reused()

    def _add_candidate(self, leaf: Node) -> None:
        is_on_device = leaf.tree.cids <= self._placement.device.keys()
        factor = 1.0 if is_on_device else ABSENT_ADAPTER_FACTOR
        cost_s = factor * self._costs.recompute_s(self.block_tokens)
        leaf.tree.candidates[leaf.owner] = leaf
        score = self._policy.score(leaf.owner, cost_s=cost_s, size=1)
        self._reclaimer.add_candidate(
            leaf.owner, self, score=score, is_single_use=not leaf.is_reused
        )

    def _remove_candidate(self, node: Node) -> None:
        if node.tree.candidates.pop(node.owner, None) is not None:
            self._reclaimer.remove_candidate(node.owner)


def _base_key(key: PrefixKey) -> PrefixKey:
    base_digest, _, salt = key
    return base_digest, BASE_SELECTION, salt
