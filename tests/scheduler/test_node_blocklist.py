"""Which nodes the next attempt leaves out."""

from __future__ import annotations

from ckptman.scheduler.node_blocklist import AVOIDED_SECONDS, Found, nodes_to_avoid


def test_what_was_found_lately_with_what_was_last_known() -> None:
    found = [Found({"n2": "DOWN"}, 200.0), Found({"n1": "ECC", "n2": "silent"}, 100.0), Found({}, 300.0)]
    assert nodes_to_avoid(found, 400.0) == {"n1": "ECC", "n2": "DOWN"}
    assert nodes_to_avoid([], 400.0) == {}


def test_a_node_is_forgiven_after_a_day() -> None:
    found = [Found({"n1": "DOWN"}, 100.0), Found({"n2": "DOWN"}, 200.0)]
    assert nodes_to_avoid(found, 100.0 + AVOIDED_SECONDS) == {"n2": "DOWN"}
    assert nodes_to_avoid(found, 200.0 + AVOIDED_SECONDS) == {}
