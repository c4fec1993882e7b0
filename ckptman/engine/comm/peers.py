"""Which nodes keep copies of one another's parts: a ring of nodes in which neighbours seldom fail together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank runs. `node`: ranks that share its memory; `domain`: what fails together besides, such as a switch
    ("" where nobody knows)."""

    node: str
    domain: str = ""


def ring(places: Sequence[Place]) -> list[str]:
    """Return all nodes, in an order in which as few neighbours as can be are of the same domain.

    `places`: of each rank. The same on every rank, whatever the order in which nodes joined.
    """
    # A node is there once, even if some of its ranks do not know its domain.
    domain_of = {place.node: place.domain for place in sorted(set(places))}
    domains: dict[str, list[str]] = {}
    for node, domain in domain_of.items():
        domains.setdefault(domain, []).append(node)
    # The largest domain is dealt out first, so that what is left over at the end is of the smallest.
    dealt = [node for nodes in sorted(domains.values(), key=len, reverse=True) for node in nodes]
    order: list[str] = [""] * len(dealt)
    slots = [*range(0, len(dealt), 2), *range(1, len(dealt), 2)]
    for slot, node in zip(slots, dealt):
        order[slot] = node
    return order


def receivers(places: Sequence[Place], copies: int) -> list[list[int]]:
    """Return for each rank the ranks that keep a copy of its part: one on each of the `copies - 1` nodes that follow
    its own. A node is never its own peer; with fewer nodes than copies each part goes to all others.

    Parts of a node are shared out among the ranks of a peer.
    """
    order = ring(places)
    members: dict[str, list[int]] = {node: [] for node in order}
    for rank, place in enumerate(places):
        members[place.node].append(rank)
    at = {node: number for number, node in enumerate(order)}
    found = []
    for rank, place in enumerate(places):
        index = members[place.node].index(rank)
        peers = [order[(at[place.node] + away) % len(order)] for away in range(1, min(copies, len(order)))]
        found.append([members[peer][index % len(members[peer])] for peer in peers])
    return found


def losable_nodes(holders: Mapping[str, Sequence[str]]) -> int:
    """Return how many nodes may be lost, whichever they are, before a part is gone; -1 where one is gone already.

    `holders`: of each part the nodes that have it; of no parts, none may.
    """
    return min((len(set(nodes)) for nodes in holders.values()), default=1) - 1
