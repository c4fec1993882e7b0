"""Checkpoints whose bytes are not what was saved: flipped bits of every kind, files cut, grown, missing, swapped, old.

Each is refused before a value reaches what is being filled, or the error says that it is not usable; or it does not
matter, and then what was loaded is bit for bit what was saved. `ckptman verify` finds every one of them.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from itertools import combinations, permutations
from pathlib import Path

import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.errors import CorruptError
from tests.faults.kills import fill, sharded
from tests.faults.limits import limit
from tests.faults.reads import command
from tests.faults.regions import draw, flip, regions_of
from tests.faults.subject import blank, content, open_run, save_versions, untouched, version_of
from tests.helpers.ranks import run_ranks

CASE_SECONDS = 20.0
SCALE = 32
"""The largest tensor has 2 MiB: two ranks that share it have a large payload each."""
OLD, NEW = "step-0000000001", "step-0000000002"


def run_flips(tally):
    """2,500 bits, evenly over all kinds of bytes of what one rank and what two ranks saved."""
    with subjects() as roots:
        for name, root in roots.items():
            regions = regions_of(root / NEW)
            for number in range(tally.count(1250)):
                kind = list(regions)[number % len(regions)]
                file, at = draw(regions[kind], tally.dice)
                bit, reader = tally.dice.randrange(8), tally.dice.choice(READERS)
                path = root / NEW / file
                with tally.fault(f"{name}: bit {bit} of byte {at} of {file} ({kind})", kind), limit(CASE_SECONDS):
                    flip(path, at, bit)
                    try:
                        judge(tally, root, reader)
                    finally:
                        flip(path, at, bit)
            with tally.fault(f"{name}: nothing", "untouched"):
                judge(tally, root, "ckptman.load", damaged=False)


def run_files(tally):
    """Whole files: cut, grown, missing, replaced, swapped, from an older checkpoint."""
    with subjects() as roots:
        for name, root in roots.items():
            for what, part, damage in tally.some(file_cases(root, tally)):
                case = root.with_name("case")
                shutil.copytree(root, case, symlinks=True)
                damage(case)
                if _bytes_of(case) == _bytes_of(root):  # a chunk table is the same from save to save
                    shutil.rmtree(case)
                    continue
                for reader in tally.some(READERS):
                    with tally.fault(f"{name}: {what}, {reader}", part), limit(CASE_SECONDS):
                        judge(tally, case, reader)
                shutil.rmtree(case)


@contextlib.contextmanager
def subjects():
    """Roots with step 1 (version 1) and step 2 (version 2), saved by one rank and by two."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)  # it tells each error twice
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        one, two = Path(folder, "one", "root"), Path(folder, "two", "root")
        save_versions(one, {1: 1, 2: 2}, SCALE)
        run_ranks(2, save_on_ranks, str(two), fresh=True)
        yield {"one rank": one, "two ranks": two}


def save_on_ranks(root):
    """Both versions, the large tensor cut over the ranks."""
    state = sharded(blank(SCALE))
    with open_run(Path(root), state, async_save=False) as run:
        for version in (1, 2):
            fill(state, version, SCALE)
            run.save(version)


def _bytes_of(root):
    paths = sorted((root / NEW).glob("*"))
    return {path.name: path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in paths}


def file_cases(root, tally):
    """What is done, its kind, and a function that does it to a copy of the root."""
    names = sorted(path.name for path in (root / NEW).iterdir())
    for name in names:
        size = (root / NEW / name).stat().st_size
        for length in sorted({0, 1, size // 2, max(0, size - 4096), size - 1} - {size}):
            yield f"{name} cut to {length} bytes", "cut", _to(name, _resize, length)
        for length in (size + 1, size + 4096):
            yield f"{name} grown to {length} bytes", "grown", _to(name, _resize, length)
        yield f"{name} missing", "missing", _to(name, os.unlink)
        for what, put in REPLACEMENTS.items():
            yield f"{name} is {what}", "no file", _to(name, put)
        yield f"{name} of the older checkpoint", "old file", _old([name])
        yield f"{name} all zeros", "zeros", _to(name, _zero)
    for one, other in combinations(names, 2):
        yield f"{one} and {other} swapped", "swapped", _swap([(one, other)])
    if "__1_0.distcp" in names:
        pairs = [("__0_0.distcp", "__1_0.distcp"), ("blocks-00000.bin", "blocks-00001.bin")]
        yield "the files of two ranks swapped, digests too", "swapped", _swap(pairs)
    for _ in range(40):
        some = tally.dice.sample(names, tally.dice.randint(2, len(names) - 1))
        yield f"{', '.join(sorted(some))} of the older checkpoint", "old file", _old(some)
    yield "the older checkpoint under its name", "old file", _old(names)
    yield "the folder missing", "missing", lambda root: shutil.rmtree(root / NEW)
    for one, other in permutations(names, 2):
        if tally.dice.random() < 0.2:
            yield f"the older {one} as {other}", "old file", _copy(f"../{OLD}/{one}", other)


def _to(name, work, *arguments):
    return lambda root: work(root / NEW / name, *arguments)


def _old(names):
    def damage(root):
        for name in names:
            shutil.copyfile(root / OLD / name, root / NEW / name)

    return damage


def _copy(source, target):
    return lambda root: shutil.copyfile(root / NEW / source, root / NEW / target) and None


def _swap(pairs):
    def damage(root):
        for one, other in pairs:
            paths = root / NEW / one, root / NEW / other
            first, second = paths[0].read_bytes(), paths[1].read_bytes()
            paths[0].write_bytes(second)
            paths[1].write_bytes(first)

    return damage


_resize = os.truncate


def _zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def _link(path):
    """To the very same bytes, outside of the root."""
    elsewhere = path.parents[2] / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def _instead(make):
    def put(path):
        path.unlink()
        make(path)

    return put


_folder = _instead(Path.mkdir)
REPLACEMENTS = {
    "a folder": _folder,
    "a link to the same bytes": _link,
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "a pipe": _instead(os.mkfifo),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
}


READERS = ("ckptman.load", "StorageReader", "restore")


def judge(tally, root, reader, damaged=True):
    """Load and verify what was damaged in step 2 of a root."""
    state = blank(SCALE)
    loads = {"ckptman.load": _by_load, "StorageReader": _by_reader, "restore": _by_restore}
    allowed = 2
    try:
        allowed = loads[reader](state, root) or 2
    except Exception as error:
        tally.refuse(error)
        if not untouched(state, SCALE):
            tally.check("is not usable" in str(error), "wrong", f"values were changed, and the error hides it: {error}")
    else:
        found = version_of(state, SCALE)
        tally.check(found == allowed, "wrong", f"{reader} gave version {found} instead of {allowed}")
        tally.survive()
    code, text = command("verify", root / NEW)
    if damaged:
        tally.check(code in (3, 4), "wrong", f"ckptman verify ends with {code}: {text}")
        tally.hear(text.strip().rpartition("Error: ")[2])
    else:
        tally.check(code == 0, "other", f"ckptman verify ends with {code}: {text}")


def _by_load(state, root):
    ckptman.load(state, root / NEW)


def _by_reader(state, root):
    """Tensors alone: what DCP is given has to have all names at once."""
    values = {name: state.pop(name) for name in ("plain", "text")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=ckptman.StorageReader(root / NEW), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise unwrapped(error) from error
    finally:
        state.update(values)
    state.update({name: content(2, SCALE)[name] for name in values})


def _by_restore(state, root):
    """A run goes back to step 1 with a warning; the version that it has to have now."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_run(root, state) as run:
            start = run.restore()
    told = any("skipping the checkpoint of step 2" in str(each.message) for each in caught)
    if start == 1 and not told and (root / NEW).exists():
        raise RuntimeError(f"step 2 was passed over without a word: {[str(each.message) for each in caught]}")
    return start


def unwrapped(error):
    """What DCP may have wrapped: on each rank it raises the errors of all, and keeps of some no more than the text."""
    first = next(iter(error.failures.values()))[0] if isinstance(error, dcp.api.CheckpointException) else error
    if isinstance(first, AssertionError) and "metadata read failed: " in str(first):
        return CorruptError(str(first))
    return first if isinstance(first, Exception) else RuntimeError(str(first))
