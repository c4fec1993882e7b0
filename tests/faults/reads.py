"""Ways to read a checkpoint of a root, and what has to come of them when the disk fails."""

import contextlib
import io
import warnings

import ckptman
from ckptman.cli.app import main
from ckptman.storage.format.paths import step_folder
from tests.faults.subject import blank, open_run, untouched, version_of


def _load(root):
    state = blank()
    try:
        ckptman.load(state, root / step_folder(2))
    except Exception as error:
        assert untouched(state) or "is not usable" in str(error), (
            f"values were changed, and the error hides it: {error}"
        )
        raise
    return version_of(state)


def _restore(root):
    state = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_run(root, state) as run:
            start = run.restore()
    assert start in (1, 2), f"a run over checkpoints began at step {start}"
    assert version_of(state) == start, f"step {start} was restored as something else"
    return start


def command(*arguments):
    """Run `ckptman` in this process: its exit code, and all that it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([str(each) for each in arguments])
    return code, said.getvalue()


def cli(verb, *options):
    return lambda root: " ".join(map(str, command(verb, root, *options)))


READS = {
    "load": _load,
    "restore": _restore,
    "list": cli("list"),
    "show": cli("show"),
    "verify": cli("verify", "--threads", "1"),
}


def judge_read(tally, end):
    """A read that met a failing disk: right, or refused with a clear error."""
    if end.hung:
        tally.fail("hang", "it did not end in time")
    elif isinstance(end.error, AssertionError):
        tally.fail("wrong", str(end.error))
    elif end.error is not None:
        tally.refuse(end.error)
    elif isinstance(end.value, str):
        code, _, text = end.value.partition(" ")
        nothing = code == str(ckptman.NotFoundError.exit_code) or text.endswith(": no complete checkpoint.\n")
        tally.check(not nothing, "wrong", f"what cannot be read is not there: {text}")
        if code == "0":
            tally.survive()
        else:
            tally.refused += 1
            tally.check("Traceback" not in text, "unclear", text)
            tally.hear(text.strip().rpartition("Error: ")[2])
    else:
        tally.check(end.value in (1, 2), "wrong", f"gave version {end.value}: {end.said[-300:]}")
        tally.survive()
