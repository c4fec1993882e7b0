"""Checkpoints that somebody made to do harm. Every way to look at one refuses it, or shows it and comes to none.

Nothing in them runs, no memory beyond what a checkpoint of that size may take, no waiting, no file outside is opened or
removed, no character of theirs reaches the terminal that it would obey.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import unicodedata
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp

import ckptman
from ckptman.cli.app import main
from tests.faults import hostile_foreign, hostile_ours
from tests.faults.damage import unwrapped
from tests.faults.hostile_pickles import CANARY
from tests.faults.limits import in_child
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
        base = home / "ours" / "step-0000000007"
        ckptman.save(content(7), base)
        for name, make in tally.some(hostile_ours.ROOTS.items()):
            _try(tally, home, f"ours: {name}", lambda root: _copied(base, root) and make(root))  # noqa: B023
        plain = home / "plain"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(content(7), checkpoint_id=plain, no_dist=True)
        for name, make in tally.some(hostile_foreign.FOLDERS.items()):
            _try(tally, home, f"plain DCP: {name}", lambda root: _put(plain, root) and make(root / "plain"))  # noqa: B023


def canary_sings(tally, home):
    """A test of the test: plain pickle does run what is in them."""
    from tests.faults.hostile_pickles import COMMANDS

    for name, data in COMMANDS.items():
        canary = home / "control"
        os.environ[CANARY] = str(canary)
        in_child(lambda: __import__("pickle").loads(data), SECONDS)  # noqa: B023
        tally.check(canary.exists(), "other", f"{name} ran nothing: it proves nothing")
        canary.unlink(missing_ok=True)
    tally.survive()


def _copied(base, root):
    """Two good checkpoints around a folder that is made hostile: steps 6, 7, 8."""
    root.mkdir()
    shutil.copytree(base, root / base.name)
    return True


def _put(plain, root):
    root.mkdir()
    shutil.copytree(plain, root / "plain")
    return True


def _try(tally, home, name, make):
    root, canary, outside = home / "case", home / "canary", home / "outside"
    os.environ[CANARY] = str(canary)
    outside.mkdir()
    (outside / "precious").write_text("must stay")
    os.environ["CKPTMAN_FAULTS_OUTSIDE"] = str(outside)
    try:
        make(root)
        before = _contents(outside)
        target = root / "plain" if (root / "plain").exists() else root / "step-0000000007"
        # Whatever claims eight gigabytes, and has them, is read: through the page cache, where holes count as cached.
        sizes = (path.lstat().st_size for path in root.rglob("*")) if root.is_dir() else ()
        seconds = SECONDS + sum(sizes) / SLOW_DISK
        for way, work in WAYS.items():
            with tally.fault(f"{name}, {way}", name.partition(":")[0]):
                end = in_child(lambda: _watched(work, root, target, outside), seconds, MEMORY_BYTES)  # noqa: B023
                judge(tally, end, seconds)
                tally.check(not canary.exists(), "code", "a command of the checkpoint was run")
                after = _contents(outside)
                tally.check(after == before, "other", f"outside of the root there is {after} now")
                canary.unlink(missing_ok=True)
    finally:
        for path in (root, outside):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _watched(work, root, target, outside):
    """What it answers, or that it opened something outside of the root. In a process of its own."""
    opened = []

    def see(event, arguments):
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        refused = isinstance(flags, int) and flags & os.O_NOFOLLOW and Path(path).is_symlink()
        if not refused and os.path.realpath(path).startswith(f"{outside}/"):
            opened.append(path)

    sys.addaudithook(see)
    try:
        answer = work(root, target)
    except Exception:
        if not opened:
            raise
    return (OPENED_OUTSIDE, " ".join(opened)) if opened else answer


def _contents(folder):
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def judge(tally, end, seconds=SECONDS):
    """Refused in order, or shown in order."""
    if end.hung:
        tally.fail("hang", f"longer than {seconds:.0f} s; it said {end.said[-300:]!r}")
        return
    if os.WIFSIGNALED(end.status) or end.status:
        tally.fail("other", f"the process ended with status {end.status}: {end.said[-300:]!r}")
        return
    if obeyed := unsafe(end.said):
        tally.fail("other", f"{obeyed} reached the terminal: {end.said[:300]!r}")
    if end.error is not None:
        tally.refuse(end.error)
        return
    code, text = end.value
    tally.check(code in CODES, "other", f"exit code {code}: {text}")
    if obeyed := unsafe(text):
        tally.fail("other", f"{obeyed} reached the terminal: {text[:300]!r}")
    if code:
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


# ---- ways to look at a checkpoint --------------------------------------------------------------------------------


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
    return 0, "\n".join(re.sub("[\n\x1b]", "?", str(each.message)) for each in caught)


def _cli(*arguments):
    def work(root, target):
        said = io.StringIO()
        names = {"ROOT": str(root), "PATH": str(target)}
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([names.get(each, each) for each in arguments])
        return code, said.getvalue()

    return work


WAYS = {
    "load": _load,
    "show": _cli("show", "PATH"),
    "prune": _cli("prune", "ROOT", "--keep-last", "1"),
    "restore": _restore,
    "verify": _cli("verify", "PATH", "--threads", "1"),
    "list": _cli("list", "ROOT"),
    "StorageReader": _read,
    "diff": _cli("diff", "PATH", "PATH"),
    "verify --all": _cli("verify", "ROOT", "--all"),
    "show --json": _cli("show", "PATH", "--json"),
    "list --json": _cli("list", "ROOT", "--json"),
}
