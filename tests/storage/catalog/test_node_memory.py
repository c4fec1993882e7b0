"""What a node holds in memory: what of it is read, whose it is, what is left behind, and what is never touched."""

import os

import psutil
import pytest

from ckptman.errors import ConfigError, CorruptError
from ckptman.storage.catalog.backends.node_memory import NodeMemory, Owner, found_in, found_on, job_ids, left_behind
from ckptman.storage.format.paths import user_folder
from tests.helpers.checkpoints import commit
from tests.helpers.node_memory import hold, live_rank, memory_of, nodes_with


@pytest.fixture
def base(tmp_path):
    return tmp_path / "shm"


@pytest.fixture
def memory(base, tmp_path):
    """What node a holds of a run that is over: nothing yet."""
    return memory_of(base, tmp_path / "root", "a")


def names(memories):
    return [each.node for each in memories]


def test_parts_are_what_is_there_with_sizes_and_a_manifest_where_it_can_be_read(tmp_path):
    memory = nodes_with(tmp_path, 120, {"a": [0, 1]})["a"]
    hold(memory, commit(tmp_path / "made", 130, ranks=4).path, [2], manifest=False)
    (memory.folder / "step-140").mkdir()
    (memory.folder / "step-0000000150").write_text("no folder")
    first, second = memory.parts()
    assert (first.step, second.step) == (120, 130)
    assert first.manifest is not None
    assert second.manifest is None
    assert first.data_files == (2, 4)
    assert second.data_files == (1, None)
    (memory.path_of(120) / "__1_0.distcp").write_bytes(b"cut short")
    (memory.path_of(120) / "manifest.json").write_text("{}")
    assert [part.manifest for part in memory.parts()] == [None, None]


def test_what_counts_between_nodes_is_newest_first_by_attempt_and_step(tmp_path):
    memories = nodes_with(tmp_path, 120, {"a": [0, 1], "b": [1, 2, 3]})
    hold(memories["b"], commit(tmp_path / "made", 90, ranks=4).path, range(3), attempt=2)
    found = found_in({node: memory.parts() for node, memory in memories.items()})
    assert [each.order for each in found] == [(2, 90), (1, 120)]
    assert found[0].missing == ["__3_0.distcp", "blocks-00003.bin"]
    assert not found[1].missing
    assert found[1].holders["__1_0.distcp"] == ("a", "b")


def test_a_run_that_is_alive_its_launcher_and_its_job_keep_what_is_there(tmp_path):
    base, root, me = tmp_path / "shm", tmp_path / "root", psutil.Process()
    alive = memory_of(base, root, "alive")
    memory_of(base, root, "supervised", pid=me.pid, started=me.create_time())
    memory_of(base, root, "other pid", pid=me.pid, started=me.create_time() - 3600)
    memory_of(base, root, "job over", job_id="41")
    memory_of(base, root, "job runs", job_id="42")
    memory_of(base, root, "job unknown", job_id="43")
    over = {"41": True, "42": False}
    with live_rank(alive):
        assert alive.is_alive()
        assert names(list(left_behind(base, over))) == ["job over", "other pid"]
        assert job_ids(base) == {"41", "42", "43"}
    assert not alive.is_alive()
    assert names(list(left_behind(base, over))) == ["alive", "job over", "other pid"]
    for each in found_on(base):
        each.clear()
    assert not user_folder(base).exists()


def test_garbage_is_nobodys_unless_a_rank_holds_it(base, memory):
    with live_rank(memory):
        for garbage in (b"", b"\x00" * 100, b"[]", b'{"format_version": 1, "root_id": "../.."}', b"x" * 100_000):
            (memory.folder / "owner.json").write_bytes(garbage)
            with pytest.raises(CorruptError):
                memory.owner()
            assert not list(left_behind(base, {}))
            assert not job_ids(base)
    assert names(list(left_behind(base, {}))) == ["a"]
    (memory.folder / "owner.json").unlink()
    (memory.folder / "owner.json").symlink_to("/etc/hostname")
    with pytest.raises(CorruptError, match="not a regular file"):
        memory.owner()
    (memory.folder / "owner.json").unlink()
    assert not list(left_behind(base, {}))  # it is being made


def test_links_are_neither_read_nor_followed_nor_removed_through(tmp_path):
    base, root = tmp_path / "shm", tmp_path / "root"
    outside = memory_of(tmp_path / "other", root, "a")
    hold(outside, commit(tmp_path / "made", 120, ranks=4).path, range(4))
    memory = memory_of(base, root, "b")
    (memory.folder.parent / outside.folder.name).symlink_to(outside.folder)
    memory.path_of(120).symlink_to(outside.path_of(120))
    (memory.slots / "link").symlink_to(outside.path_of(120) / "manifest.json")
    assert names(found_on(base)) == ["b"]
    assert not memory.parts()
    with pytest.raises(ConfigError, match="it is no folder"):
        NodeMemory(base, outside.root_id, "a").is_there()
    memory.clear()
    assert not memory.folder.exists()
    assert outside.parts()[0].data_files == (4, 4)


def test_the_mark_of_the_living_is_not_followed(base, memory, tmp_path):
    (memory.folder / "alive").unlink()
    (memory.folder / "alive").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        memory.is_alive()
    assert names(list(left_behind(base, {}))) == ["a"]


def test_what_another_user_has_made_is_never_read(base, memory, monkeypatch):
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not found_on(base)  # it has another name
    theirs = user_folder(base)
    memory.folder.parent.rename(theirs)
    for look in (lambda: found_on(base), lambda: NodeMemory(base, memory.root_id, "a").is_there()):
        with pytest.raises(ConfigError, match="has made it"):
            look()
    owner = Owner(root_id=memory.root_id, root="/", node="a")
    with pytest.raises(ConfigError, match="has made it"):
        NodeMemory(base, memory.root_id, "a").open(owner)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_where_others_may_write_nothing_is_read(base, memory, mode):
    memory.folder.chmod(mode)
    with pytest.raises(ConfigError, match="others may write to it"):
        memory.is_there()
    assert not found_on(base)
    memory.folder.chmod(0o700)
    memory.folder.parent.chmod(mode)
    with pytest.raises(ConfigError, match="others may write to it"):
        found_on(base)


def test_where_others_may_look_they_may_no_more(memory):
    memory.folder.parent.chmod(0o755)
    memory.folder.chmod(0o750)
    assert memory.is_there()
    assert [path.stat().st_mode & 0o777 for path in (memory.folder, memory.folder.parent)] == [0o700, 0o700]


def test_files_that_have_several_names_count_once(memory):
    before = memory.size_bytes
    (memory.slots / "slot").write_bytes(bytes(2**20))
    (memory.slots / "name").hardlink_to(memory.slots / "slot")
    assert memory.size_bytes - before == 2**20
