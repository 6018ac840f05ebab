"""An exact match of a prompt in a radix tree: block by block, by tokens and counts, without keys and reach."""

from __future__ import annotations

from prefixroute import Residency, TokenChain
from prefixroute.residency.edge import Edge
from prefixroute.residency.tree import RadixTree


def matched(tree: RadixTree, chain: TokenChain) -> int:
    """How many leading blocks of a prompt are matchable: each has the same tokens and items, and a credited copy."""
    edge: Edge | None = tree._roots.get(chain.root)
    at = depth = 0
    while edge is not None and depth < chain.depth:
        block = chain.block(depth)
        if at == len(edge.keys):
            edge, at = edge.children.get(block), 0
        elif edge.block(at, tree._size) == block and edge.held(at, tree._credited):
            at, depth = at + 1, depth + 1
        else:
            break
    return depth


def trees_of(residency: Residency) -> list[RadixTree]:
    """The tree of each full-attention group."""
    return [group.reblocker.tree for group in residency._groups.values() if group.reblocker is not None]
