"""Disks that fail for real: full, over quota, read-only, forbidden.

A save that fails says so as CommitError, leaves nothing of itself and harms no earlier checkpoint, and the next one
works as soon as the disk does.
"""

import contextlib
import os
import resource
import tempfile
import warnings
from functools import partial
from itertools import count, product
from pathlib import Path
from shutil import rmtree

import ckptman
from ckptman.storage.format.paths import step_folder
from tests.faults import mounts
from tests.faults.limits import in_child
from tests.faults.mounts import NoMount, ext4, read_only, tmpfs
from tests.faults.reads import READS, command, judge_read
from tests.faults.subject import blank, content, open_run, save_versions, version_of
from tests.helpers.faulty_disk import holds

CASE_SECONDS = 60.0
NOBODY = 54321
"""A user who owns nothing else: root is bound by no permission and no quota."""
_BALLAST_BYTES = 16 * 1024
WAYS = {"sync": {"async_save": False}, "async": {}}


def run(tally):
    """Real mounts where this user may mount, limits of the kernel, permissions."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        save_versions(home / "rehearsal", {1: 1})  # another user may be allowed to import nothing more
        for part in (full_disk, quota, mounted_read_only, broken_ext4) if tally.share == 1 else ():
            try:
                part(tally, home)
            except NoMount as error:
                tally.skip(f"{part.__name__}: {error}")
        file_limit(tally, home, steps=tally.count(20))
        permissions(tally, home)


def fail_and_go_on(root, way, break_it, mend_it):
    """Save step 1, break the disk, try step 2, mend it, save step 3. What came of it; what went wrong is raised."""
    state = content(1)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_run(root, state, **WAYS[way]) as run:
            run.restore()
            run.save(1)
            run.wait()
            state.update(content(2))
            break_it()
            try:
                run.save(2)
                run.wait()
            except ckptman.CommitError as failed:
                error = failed
            left = sorted(path.name for path in root.iterdir() if path.name.startswith("step"))
            mend_it()
            state.update(content(3))
            run.save(3)
    return {"error": error, "left": left, "held": sorted(holds(root)), "warned": [str(each.message) for each in caught]}


def judge_save(tally, root, end, must_say=None):
    """What `fail_and_go_on` gave, and what is on disk afterwards."""
    if end.hung:
        tally.fail("hang", f"longer than {CASE_SECONDS} s")
        return
    if end.error is not None or end.value is None:
        tally.fail("other", f"{type(end.error).__name__}: {end.error} {end.said[-500:]}")
        return
    error, held = end.value["error"], end.value["held"]
    if error is None:
        tally.survive()
        tally.check(held == [1, 2, 3], "lost", f"{held} are there after three saves that went well")
    else:
        tally.refuse(error)
        tally.check(must_say is None or must_say in str(error), "unclear", f"no word of {must_say!r}: {error}")
        tally.check(held in ([1, 3], [1, 2, 3]), "lost", f"{held} are there")
        tally.check(
            end.value["left"] in ([step_folder(1)], [step_folder(1), step_folder(2)]),
            "other",
            f"left: {end.value['left']}",
        )
    for text in end.value["warned"]:
        tally.hear(text)
    for step in held:
        state = blank()
        ckptman.load(state, root / step_folder(step))
        tally.check(version_of(state) == step, "wrong", f"step {step} holds something else")


def one_save(tally, title, part, root, way, break_it, mend_it, must_say=None, user=None):
    """A run whose disk is broken for one of its saves, in a process of its own."""
    with tally.fault(f"{title}, {way}", part):
        work = partial(fail_and_go_on, root, way, break_it, mend_it)
        judge_save(tally, root, in_child(work, CASE_SECONDS, user=user), must_say)


def full_disk(tally, home):
    """A file system of 2 MiB with less and less room."""
    for way, room in product(WAYS, (0, 4, 8, 16, 24, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 256)):
        with tmpfs(home / "mount", "size=2m") as mount:
            ballast = mount / "ballast"
            fill = partial(_fill, ballast, room * 1024)
            title = f"{room} KiB of room"
            one_save(tally, title, "full disk", mount / "root", way, fill, ballast.unlink, "No space left")


def _fill(ballast, room):
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - room))


def quota(tally, home):
    """A user whose quota is used up by something else."""
    for way, room in product(WAYS, (0, 16, 32, 64, 96, 128, 160, 192, 256, 320)):
        with mounts.quota(home / "mount", home / "image", 2 * 1024 * 1024) as mount:
            fill, free = partial(_use_up, mount / "ballast", room * 1024), partial(_free, mount / "ballast")
            title, words = f"{room} KiB of quota", "Disk quota exceeded"
            one_save(tally, title, "quota", mount / "root", way, fill, free, words, user=NOBODY)


def _use_up(ballast, room):
    """With files, because btrfs lets nobody who has used up his quota cut one short."""
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in count():
            (ballast / str(number)).write_bytes(bytes(_BALLAST_BYTES))
    os.sync()
    for number in range(room // _BALLAST_BYTES):
        (ballast / str(number)).unlink()
    os.sync()  # until then btrfs counts what was removed


def _free(ballast):
    rmtree(ballast)
    os.sync()


def file_limit(tally, home, steps):
    """No file may grow over a size: the kernel refuses, as it does with some quotas."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for number, way in product(range(steps), WAYS):
        size, root = number * 120 * 1024 // steps, home / f"limit-{number}-{way}"
        break_it, mend_it = (partial(resource.setrlimit, resource.RLIMIT_FSIZE, (each, hard)) for each in (size, hard))
        one_save(tally, f"files of {size} bytes at most", "file size limit", root, way, break_it, mend_it)
        rmtree(root)


def mounted_read_only(tally, home):
    """Remounted read-only between two saves without a run around them, and while there is none."""
    with tmpfs(home / "mount", "size=8m") as mount:
        ckptman.save(content(1), mount / "root" / step_folder(1))
        with tally.fault("ckptman.save on a read-only mount", "read-only"), read_only(mount):
            _refused(tally, lambda: ckptman.save(content(2), mount / "root" / step_folder(2)), "Read-only")
        with tally.fault("a run on a read-only mount", "read-only"), read_only(mount):
            _refused(tally, lambda: open_run(mount / "root", content(2)).close(), "Read-only")
        with tally.fault("prune on a read-only mount", "read-only"):
            ckptman.save(content(2), mount / "root" / step_folder(2))
            with read_only(mount):
                _verb(tally, ["prune", str(mount / "root"), "--keep-last", "1"], (10,))
        with tally.fault("load from a read-only mount", "read-only"), read_only(mount):
            state = blank()
            ckptman.load(state, mount / "root" / step_folder(2))
            tally.check(version_of(state) == 2, "wrong", "it holds something else")
            tally.survive()


def broken_ext4(tally, home):
    """An ext4 that finds an error in itself, in the middle of a run, and goes read-only, as it does on a bad disk."""
    for way in WAYS:
        with (
            ext4(home / "mount", home / "image", "errors=remount-ro") as (mount, device),
            tally.fault(f"ext4 finds an error in itself, {way}", "read-only"),
        ):
            trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
            if not trigger.exists():
                raise NoMount("this kernel lets nobody trigger an ext4 error")

            def one_save(mount=mount, way=way, trigger=trigger):
                state = content(1)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        with open_run(mount / "root", state, **WAYS[way]) as run:
                            run.restore()
                            run.save(1)
                            run.wait()
                            trigger.write_text("1")
                            state.update(content(2))
                            run.save(2)
                            run.wait()
                    except ckptman.CkptmanError as error:
                        return str(error)
                return ""

            end = in_child(one_save, CASE_SECONDS)
            tally.check(end.in_order and end.value, "other", f"no error came: {end.error} {end.said[-500:]}")
            if end.value:
                tally.refused += 1
                tally.hear(end.value)
            state = blank()
            ckptman.load(state, mount / "root" / step_folder(1))
            tally.check(version_of(state) == 1, "lost", "step 1 is not what it was")


def permissions(tally, home):
    """Permissions that are lost, for a user who is bound by them."""
    if os.getuid():
        tally.skip("permissions: needs root, to become another user")
        return
    for way in WAYS:
        root, title = _own(home / f"forbidden-{way}") / "root", "the root loses its write permission"
        break_it, mend_it = (partial(root.chmod, mode) for mode in (0o555, 0o755))
        one_save(tally, title, "permission lost", root, way, break_it, mend_it, "Permission denied", user=NOBODY)
    root = _own(home / "unreadable") / "root"
    made = in_child(lambda: save_versions(root, {1: 1, 2: 2}), CASE_SECONDS, user=NOBODY)
    assert made.in_order, f"another user cannot save: {made.error} {made.said}"
    newest = root / step_folder(2)
    for path in tally.some((root, newest, *sorted(newest.iterdir()))):
        mode = path.stat().st_mode & 0o777
        path.chmod(0)
        for what, work in READS.items():
            with tally.fault(f"{path.name} cannot be read, {what}", "permission lost"):
                judge_read(tally, in_child(partial(work, root), CASE_SECONDS, user=NOBODY))
        path.chmod(mode)


def _own(path):
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    return path


def _refused(tally, work, must_say):
    try:
        work()
    except ckptman.CkptmanError as error:
        tally.refuse(error)
        tally.check(must_say in str(error), "unclear", f"no word of {must_say!r}: {error}")
    else:
        tally.fail("wrong", "it did not fail")


def _verb(tally, arguments, codes):
    code, text = command(*arguments)
    tally.check(code in codes, "other", f"exit code {code}: {text}")
    tally.refused += 1
    tally.hear(text.strip().rpartition("Error: ")[2])
