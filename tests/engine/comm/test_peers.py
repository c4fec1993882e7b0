"""Who keeps whose parts: on every cluster that can be, each part is where it should be, and nodes share the load."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.engine.comm.peers import Place, losable_nodes, receivers, ring

quick = settings(max_examples=200, deadline=None, print_blob=True)


@st.composite
def clusters(draw):
    """Places of ranks in any order: 1 to 9 nodes of up to 4 ranks each, in up to 4 domains or none that are known."""
    nodes = draw(
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["", "s1", "s2", "s3"])), min_size=1, max_size=9)
    )
    places = [Place(f"node{n}", domain) for n, (ranks, domain) in enumerate(nodes) for _ in range(ranks)]
    return draw(st.permutations(places))


def nodes_of(places, rank, copies):
    """Return the nodes that have the part of a rank, its own first."""
    return [places[rank].node, *(places[peer].node for peer in receivers(places, copies)[rank])]


@quick
@given(clusters(), st.integers(1, 4))
def test_every_part_is_on_so_many_different_nodes(places, copies):
    nodes = len({place.node for place in places})
    for rank in range(len(places)):
        holders = nodes_of(places, rank, copies)
        assert len(holders) == len(set(holders)) == min(copies, nodes)


@quick
@given(clusters(), st.integers(1, 4))
def test_nodes_keep_parts_of_as_many_nodes_and_ranks_of_a_node_share_them(places, copies):
    found = receivers(places, copies)
    ranks_of = Counter(place.node for place in places)
    kept_from = {node: set() for node in ranks_of}
    load = Counter(peer for peers in found for peer in peers)
    for rank, peers in enumerate(found):
        for peer in peers:
            kept_from[places[peer].node].add(places[rank].node)
    assert {len(sources) for sources in kept_from.values()} == {min(copies, len(ranks_of)) - 1}
    for node, sources in kept_from.items():
        loads = [load[rank] for rank, place in enumerate(places) if place.node == node]
        # Of each source the parts are dealt out in turn: ranks differ by one for each.
        assert max(loads) - min(loads) <= len(sources)


@quick
@given(clusters(), st.randoms(use_true_random=False))
def test_the_ring_is_the_same_whatever_the_order_of_ranks(places, random):
    shuffled = list(places)
    random.shuffle(shuffled)
    assert ring(shuffled) == ring(places)
    assert sorted(ring(places)) == sorted({place.node for place in places})


@quick
@given(clusters())
def test_as_few_neighbours_as_can_be_are_of_one_domain(places):
    domain_of = dict(places)
    order = ring(places)
    largest = max(Counter(domain_of.values()).values())
    same = sum(domain_of[node] == domain_of[other] for node, other in zip(order, [*order[1:], order[0]]))
    # Each node of another domain parts two of the largest; beyond that, some of it have to be neighbours.
    assert same == max(0, 2 * largest - len(order))


def test_a_node_is_one_though_its_ranks_know_its_domain_or_not():
    places = [Place("a", "s1"), Place("a"), Place("b", "s1"), Place("c", "s2"), Place("c")]
    assert sorted(ring(places)) == ["a", "b", "c"]
    for rank in range(len(places)):
        assert len(set(nodes_of(places, rank, 2))) == 2


def test_one_node_has_no_peers():
    assert receivers([Place("a")] * 3, 2) == [[], [], []]
    assert ring([]) == []
    assert receivers([], 2) == []


def test_neighbours_in_name_are_not_peers_where_no_domain_is_known():
    places = [Place(f"nid{number:03d}") for number in range(6)]
    assert ring(places) == ["nid000", "nid003", "nid001", "nid004", "nid002", "nid005"]
    assert receivers(places, 2) == [[3], [4], [5], [1], [2], [0]]


@pytest.mark.parametrize(
    ("holders", "lost"),
    [
        ({}, 0),
        ({"0": ["a"]}, 0),
        ({"0": ["a", "b"], "1": ["b", "c"]}, 1),
        ({"0": ["a", "a"], "1": ["b", "c"]}, 0),
        ({"0": ["a", "b", "c"], "1": ["b", "c", "d"]}, 2),
        ({"0": ["a", "b"], "1": []}, -1),
    ],
)
def test_how_many_nodes_may_be_lost(holders, lost):
    assert losable_nodes(holders) == lost


@quick
@given(clusters(), st.integers(1, 4))
def test_so_many_nodes_may_be_lost_whichever_they_are(places, copies):
    holders = {str(rank): nodes_of(places, rank, copies) for rank in range(len(places))}
    assert losable_nodes(holders) == min(copies, len({place.node for place in places})) - 1
