"""Readers on one node beside prunes on the other, whose client may still find a name that is gone."""

import pytest

from ckptman.errors import EXIT_OK, NotFoundError
from ckptman.storage.catalog.backends.local import LocalBackend
from tests.filesystems.training import finish, read_beside_prunes, running, step_names, use_what_goes
from tests.helpers.ranks import start_ranks

READS = 300
pytestmark = pytest.mark.campaign


def test_reads_beside_prunes_are_right_or_find_nothing(cluster, root, tmp_path):
    writer, reader = cluster.nodes
    with running([writer], root, tmp_path, async_save=True, retention=4) as (world, phase):
        world.await_message(0, "first saved 6")
        with start_ranks(
            1, read_beside_prunes, root, READS, alone=True, programs=[reader.program], limit=280
        ) as looking:
            (counts,) = looking.results()
        (_, errors), *_ = finish(world, phase)
    assert errors == []
    assert counts.pop("right")
    counts.pop("not found", None)
    assert counts == {}


@pytest.mark.parametrize("verb", ["read", "load", "verify", "copy"])
@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_what_another_node_deletes_is_not_found(cluster, root, tmp_path, verb, how):
    """Each time at once: the client of the reader may remember the name, and the files."""
    deleter, reader = cluster.nodes
    with running([deleter], root, tmp_path) as (world, phase):
        world.await_message(0, "first saved 5")
        finish(world, phase)
    place = LocalBackend(deleter.seen(root))
    for name in sorted(step_names(place.root))[:4]:
        phase.set("there")
        asked = (root, name, phase, verb, tmp_path / "copies")
        with start_ranks(1, use_what_goes, *asked, alone=True, programs=[reader.program]) as world:
            world.await_message(0, "looked")
            if how == "removed":
                place.remove(place.root / name, name, "test")
            else:
                assert place.hide(place.root / name, name, "test")
            phase.set("gone")
            (came,) = world.results()
        if how == "removed" or came not in ("right", EXIT_OK):  # what is whole may be used under its old name
            assert came == NotFoundError.exit_code or str(came).startswith("NotFoundError: "), came
