"""What came from a checkpoint reaches no terminal as it is: not in an error, not in a warning, not in a traceback."""

import os
import pickle

import pytest
import torch

import ckptman
from ckptman import errors
from ckptman.cli.app import main
from ckptman.storage.format.index import Index, Unit, read_index
from ckptman.storage.format.manifest import Mesh, read_manifest
from ckptman.storage.format.paths import INDEX, step_folder
from ckptman.train.__main__ import main as train
from tests.engine.loading.test_damage import forge
from tests.helpers.checkpoints import commit, flip_byte

EVIL = "w\x1b]0;PWNED\x07\x1b[2J\u202e\nError: all is well"
SHOWN = r"w\x1b]0;PWNED\x07\x1b[2J\u202e\nError: all is well"


def of_class(kind, text):
    """An error that has `text` wherever somebody else's text can be in it."""
    made = {
        errors.UnknownKeyError: (text, [text], text),
        errors.CommitError: (1, 0, text),
        errors.MismatchError: (text, [text], [text], [text]),
        errors.FormatVersionError: (text, text, 1),
        errors.RootError: (5, text),
        errors.BusyError: (text, text, 1, text),
        errors.RankLostError: (text,),
    }
    return kind(*made.get(kind, (text,)))


def classes(kind=errors.CkptmanError):
    below = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [kind, *(deeper for each in below for deeper in classes(each))]


@pytest.mark.parametrize("kind", classes())
def test_the_text_of_an_error_is_safe_to_print(kind):
    error = of_class(kind, EVIL)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert all(character.isprintable() or character == "\n" for character in str(each))
        assert all(line.startswith("  ") for line in str(each).split("\n")[1:])
        assert SHOWN in str(each) or kind is errors.UnknownKeyError  # which has it as Python writes texts
    assert vars(error) == vars(pickle.loads(pickle.dumps(error)))


def test_lists_of_ours_stay_lists():
    error = ckptman.MismatchError("here", ["a", "b"])
    assert str(error).split("\n")[1:4] == ["  missing in the checkpoint (2):", "    a", "    b"]
    torchs = ckptman.CkptmanError("rank 0 failed: Error(s) in loading state_dict:\n\tMissing key(s): a\n\tand b")
    assert str(torchs).split("\n") == [
        "rank 0 failed: Error(s) in loading state_dict:",
        "    Missing key(s): a",
        "    and b",
    ]


def replace_unit(folder, unit):
    """Give a checkpoint this value instead of all that it has, with right digests."""
    index = read_index(folder, read_manifest(folder))
    forge(folder, INDEX, Index(**{**dict(index), "units": [unit]}).to_json())


def test_a_warning_of_restore_is_escaped_and_names_the_line_that_called_it(tmp_path):
    state = {"m": {"w": torch.ones(3)}}
    with ckptman.Checkpointer(tmp_path, state, deadline=None) as run:
        run.save(1)
        run.save(2)
    replace_unit(tmp_path / "step-0000000002", Unit(state="m", key="w", value={"~": "tensor", "v": EVIL}))
    with (
        pytest.warns(RuntimeWarning, match="skipping the checkpoint") as seen,
        ckptman.Checkpointer(tmp_path, state, deadline=None) as run,
    ):
        assert run.restore() == 1
    (told,) = seen
    assert SHOWN in str(told.message)
    assert told.filename == __file__


COMMANDS = [
    *((0, "list RUN"), (0, "list RUN STATE"), (0, "list BYTES"), (0, "show RUN"), (0, "verify RUN"), (4, "verify BAD")),
    *((0, "prune RUN BAD --keep-last 1 --dry-run"), (0, "rollback RUN --to-step 1 --dry-run"), (0, "status RUN")),
    *((0, "copy RUN COPY"), (0, "drain RUN --to COPY"), (0, "doctor LINK --size 1MiB"), (0, "pin RUN --why EVIL")),
    *((0, "export STATE OUT --format torch"), (2, "export STATE NEW --only EVIL")),
    *((0, "show STATE"), (1, "diff STATE --steps 1,2")),
]


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """Roots in which nothing has a name that is safe to print."""
    folder = tmp_path_factory.mktemp("evil") / "r\x1b[2J"
    names = {each: folder / each for each in ("RUN", "STATE", "COPY", "OUT", "NEW", "BAD", "LINK")}
    names |= {"EVIL": EVIL, "BYTES": folder / os.fsdecode(b"\xff")}
    mesh = Mesh(names=(EVIL,), shape=(2,))
    for step in (1, 2):
        entry = commit(names["RUN"], step, metrics={EVIL: 1.0}, values={EVIL: EVIL}, mesh=mesh)
        state = {"model": {EVIL: torch.full((2,), float(step))}, "values": {EVIL: f"{EVIL}{step}"}}
        ckptman.save(state, names["STATE"] / step_folder(step))
    (entry.path / EVIL).touch()
    flip_byte(commit(names["BAD"], 1).path / "__0_0.distcp")
    names["BYTES"].mkdir()
    names["LINK"].symlink_to(names["RUN"])
    (names["RUN"] / f".ckptman-doctor-{EVIL}").mkdir()
    return names


@pytest.mark.parametrize(("code", "command"), COMMANDS)
def test_no_verb_lets_a_name_or_a_text_command_a_terminal(code, command, evil, ends):
    said = "".join(ends(code, *(evil.get(each, each) for each in command.split())))
    assert all(each.isprintable() or each == "\n" for each in said)
    assert r"\x1b" in said
    assert not any(line.startswith("Error: all") for line in said.splitlines())


def test_no_name_forges_a_line_of_its_own(tmp_path, capsys):
    entry = commit(tmp_path, 1)
    replace_unit(entry.path, Unit(state=EVIL, whole=True, value={"~": "nonsense", "v": 1}))
    assert main(["show", str(entry.path)]) == 4
    assert main(["verify", str(entry.path)]) == 4
    out = capsys.readouterr()
    lines = (out.out + out.err).splitlines()
    assert len([line for line in lines if line.startswith("Error:")]) == 2
    assert f"  the value {SHOWN} cannot be read: an encoded value of kind 'nonsense' cannot be read" in out.out


def test_the_training_command_prints_no_escapes(tmp_path, capsys):
    assert train(["--config", str(tmp_path / EVIL.replace("/", "")), "--dry-run"]) == 3
    told = capsys.readouterr().err.removesuffix("\n")
    assert told.isprintable()
    assert SHOWN in told
