"""What retention deletes is removed behind the run, and out of the way of its saves."""

import threading

from ckptman.io.durable_files import DISK, Disk
from ckptman.saving import retention_runner
from ckptman.saving.retention_runner import Remover
from tests.io.test_throttled_delete import tree


def test_what_is_to_go_is_removed_behind_the_run(tmp_path):
    remover = Remover(DISK, lambda path, error: None)
    for number in range(5):
        remover.add(tree(tmp_path / str(number)))
    remover.close(60)
    assert list(tmp_path.iterdir()) == []
    assert remover.pending == []
    remover.close(1)
    remover.close(1)


def test_while_the_run_saves_it_waits_between_two_files_unless_somebody_needs_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(retention_runner, "_GENTLY_SECONDS", 600.0)
    remover = Remover(DISK, lambda path, error: None)
    remover.slow_down(True)
    remover.add(tree(tmp_path / "folder"))
    assert not remover.drain(0) or not (tmp_path / "folder").exists()
    assert remover.drain(60)
    remover.slow_down(False)
    remover.add(tree(tmp_path / "other"))
    remover.close(60)
    assert list(tmp_path.iterdir()) == []


def test_at_the_end_what_takes_too_long_is_left(tmp_path):
    stuck, seen = threading.Event(), threading.Event()

    class Slow(Disk):
        def remove_file(self, path):
            seen.set()
            stuck.wait()
            super().remove_file(path)

    remover = Remover(Slow(), lambda path, error: None)
    remover.add(tree(tmp_path / "folder"))
    assert seen.wait(60)
    threading.Timer(0.2, stuck.set).start()
    remover.close(0.05)
    assert (tmp_path / "folder").exists()


def test_what_cannot_be_removed_is_told_and_the_rest_goes_on(tmp_path):
    class Refusing(Disk):
        def remove_tree(self, path):
            if path.name == "bad":
                raise PermissionError(13, "Permission denied")
            super().remove_tree(path)

    told = []
    remover = Remover(Refusing(), lambda path, error: told.append(path))
    for name in ("bad", "good"):
        remover.add(tree(tmp_path / name))
    assert remover.drain(60)
    assert told == [tmp_path / "bad"]
    assert not (tmp_path / "good").exists()
    remover.close(1)
