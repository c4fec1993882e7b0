"""Checkpoints that somebody made to do harm. Every way to look at one refuses it, or shows it and comes to none.

Nothing in them runs, no memory beyond what a checkpoint of that size may take, no waiting, no file outside is opened or
removed, no character of theirs reaches the terminal that it would obey.
"""

import os
import pickle
import re
import shutil
import sys
import tempfile
import unicodedata
import warnings
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp

import ckptman
from tests.faults import hostile_foreign, hostile_ours
from tests.faults.damage import unwrapped
from tests.faults.hostile_ours import OUTSIDE
from tests.faults.hostile_pickles import CANARY, COMMANDS
from tests.faults.limits import in_child
from tests.faults.reads import command
from tests.faults.subject import blank, content, open_run

SECONDS = 15.0
SLOW_DISK = 256 * 2**20
"""Bytes a second."""
MEMORY_BYTES = 768 * 1024 * 1024
"""What looking at a small checkpoint may take, whatever it says of itself."""
CODES = {0, 3, 4, 7, 9, 10}
"""Exit codes that looking at a checkpoint can end with (docs/errors.md)."""
OPENED_OUTSIDE = 99


def run(tally):
    """Every hostile checkpoint, looked at in every way."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        home = Path(folder)
        with tally.fault("the pickles would run their command, if one let them", "control"):
            canary_sings(tally, home)
        look_at(tally, home, tally.some(hostile_ours.ROOTS), tally.some(hostile_foreign.FOLDERS), WAYS)


def look_at(tally, home, roots, folders, ways):
    """Make these roots of ours and these folders of plain DCP, by name, and look at each in these ways."""
    base = home / "ours" / hostile_ours.STEP
    ckptman.save(content(7), base)
    for name in roots:
        _try(tally, home, f"ours: {name}", base, base.name, hostile_ours.ROOTS[name], ways)
    plain = home / "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content(7), checkpoint_id=plain, no_dist=True)
    for name in folders:
        _try(tally, home, f"plain DCP: {name}", plain, "plain", hostile_foreign.FOLDERS[name], ways)


def canary_sings(tally, home):
    """A test of the test: plain pickle does run what is in them."""
    for name, data in COMMANDS.items():
        canary = home / "control"
        os.environ[CANARY] = str(canary)
        in_child(partial(pickle.loads, data), SECONDS)
        tally.check(canary.exists(), "other", f"{name} ran nothing: it proves nothing")
        canary.unlink(missing_ok=True)
    tally.survive()


def _try(tally, home, title, good, name, spoil, ways):
    """Make a hostile copy of a good checkpoint: in a root, which is what is spoilt if the checkpoint is one of ours."""
    root, canary, outside = home / "case", home / "canary", home / "outside"
    target = root / name
    os.environ[CANARY], os.environ[OUTSIDE] = str(canary), str(outside)
    outside.mkdir()
    (outside / "precious").write_text("must stay")
    shutil.copytree(good, target)
    try:
        spoil(target if name == "plain" else root)
        before = _contents(outside)
        # Whatever claims eight gigabytes, and has them, is read: through the page cache, where holes count as cached.
        seconds = SECONDS + sum(path.lstat().st_size for path in root.rglob("*")) / SLOW_DISK
        for way in ways:
            with tally.fault(f"{title}, {way}", title.partition(":")[0]):
                end = in_child(partial(_watched, WAYS[way], root, target, outside), seconds, MEMORY_BYTES)
                judge(tally, end, seconds)
                tally.check(not canary.exists(), "code", "a command of the checkpoint was run")
                after = _contents(outside)
                tally.check(after == before, "other", f"outside of the root there is {after} now")
                canary.unlink(missing_ok=True)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(outside)


def _watched(work, root, target, outside):
    """What it answers, or that it opened something outside of the root. In a process of its own."""
    opened = []

    def see(event, arguments):
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        refused = isinstance(flags, int) and flags & os.O_NOFOLLOW and Path(path).is_symlink()
        if refused:
            opened[:] = [each for each in opened if each != path]  # `open` with an opener tells of it twice
        elif os.path.realpath(path).startswith(f"{outside}/"):
            opened.append(path)

    sys.addaudithook(see)
    try:
        answer = work(root, target)
    except Exception:
        if not opened:
            raise
    return (OPENED_OUTSIDE, " ".join(opened)) if opened else answer


def _contents(folder):
    return {path.name: path.read_text() if path.exists() else None for path in sorted(folder.iterdir())}


def judge(tally, end, seconds=SECONDS):
    """Refused in order, or shown in order."""
    if end.hung or end.status:
        how = f"took longer than {seconds:.0f} s" if end.hung else f"ended with status {end.status}"
        tally.fail("hang" if end.hung else "other", f"the process {how}: {end.said[-300:]!r}")
        return
    code, text = end.value if end.error is None else (0, "")
    if obeyed := unsafe(end.said + text):
        tally.fail("other", f"{obeyed} reached the terminal: {(end.said + text)[:300]!r}")
    tally.check(code in CODES, "other", f"exit code {code}: {text}")
    if end.error is not None:
        tally.refuse(end.error)
    elif code:
        tally.refused += 1
        tally.check("Traceback" not in text, "unclear", text[-500:])
        tally.hear(re.split(r"^Error: ", text.strip(), flags=re.MULTILINE)[-1])
    else:
        tally.survive()


def unsafe(text):
    """The first character that a terminal would obey, or that changes the direction of text."""
    for each in text:
        if each in "\n\t":
            continue
        if unicodedata.category(each) in ("Cc", "Zl", "Zp", "Cs") or unicodedata.bidirectional(each) in _BIDI:
            return f"U+{ord(each):04X}"
    return None


_BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def _load(root, target):
    ckptman.load(blank(), target)
    return 0, ""


def _read(root, target):
    try:
        dcp.load(blank(), storage_reader=ckptman.StorageReader(target), no_dist=True)
    except dcp.api.CheckpointException as error:
        if "Missing key in checkpoint" in str(error):  # DCP's own words for what is not there
            return 0, ""
        raise unwrapped(error) from None
    return 0, ""


def _restore(root, target):
    """By a run: in the root itself, or as a new one that starts from it."""
    where = root if target.name.startswith("step") else root.with_name("restored")
    try:
        with warnings.catch_warnings(record=True) as caught, open_run(where, blank()) as run:
            warnings.simplefilter("always")
            run.restore(path=target)
    finally:
        shutil.rmtree(root.with_name("restored"), ignore_errors=True)
    return 0, "\n".join(str(each.message) for each in caught)


def _cli(verb, where, *options):
    return lambda root, target: command(verb, root if where == "ROOT" else target, *options)


WAYS = {
    "load": _load,
    "show": _cli("show", "PATH"),
    "prune": _cli("prune", "ROOT", "--keep-last", "1"),
    "restore": _restore,
    "verify": _cli("verify", "PATH", "--threads", "1"),
    "list": _cli("list", "ROOT"),
    "StorageReader": _read,
    "diff": lambda root, target: command("diff", target, target),
    "verify --all": _cli("verify", "ROOT", "--all"),
    "show --json": _cli("show", "PATH", "--json"),
    "list --json": _cli("list", "ROOT", "--json"),
}
