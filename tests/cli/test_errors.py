"""Every refusal is one clear message on stderr, its own exit code, no traceback, and nothing changed on disk."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from ckptman.cli.app import main
from ckptman.cli.help import REMOVED
from ckptman.runtime.journal import Journal
from ckptman.storage.catalog.verified import VERIFIED
from tests.helpers.checkpoints import commit, flip_byte

STEP, TEN = "step-0000000009", "step-0000000010"
HUGE = f"1{320 * '0'}"
PLAN = "plan --params 7B"
PROBE = "probe loader program.py:make_loader"
DOCTOR = "doctor empty"
SIMULATE = "simulate --mtbf 8h --runs 1"
RULES = ("--keep-last 1", "--leftovers")
NO_ROOTS = [
    ("''", 2, "is a variable not set?"),
    (f"good/{STEP}", 2, "is one checkpoint, not a root"),
    ("nowhere", 3, "there is no checkpoint root"),
    ("fil*", 3, "no folder matches"),
    ("file", 10, "is a file"),
    ("foreign", 2, "is not a root of checkpoints"),
]

REFUSALS = [
    # ---- any verb
    ("list", 2, "Missing argument"),
    ("list . --wat", 2, "No such option: --wat"),
    ("lst .", 2, "Did you mean 'list'?"),
    ("prune . --keep-lst 3", 2, "--keep-last"),
    ("prune . --keep-last", 2, "--keep-last"),
    ("show . --step many", 2, "--step"),
    ("chain wat", 2, "wat"),
    *((f"{verb} {option}", 2, f"{option} was removed: {instead}") for (verb, option), instead in REMOVED.items()),
    # ---- no root, no checkpoint, no step
    ("list nowhere", 3, "there is no checkpoint root"),
    ("show nowhere", 3, "there is no checkpoint root"),
    (f"show nowhere/{STEP}", 3, "there is no checkpoint"),
    ("list file", 10, "is a file"),
    ("show file", 10, "is a file"),
    ("show empty", 3, "holds no checkpoint"),
    ("path empty", 3, "there is no checkpoint that counts"),
    ("verify empty --all", 3, "holds no checkpoint"),
    ("show good --step 8", 3, "no checkpoint of step 8; the latest there are: 9"),
    ("verify good --step 8", 3, "no checkpoint of step 8"),
    ("path good --step 8", 3, "there is no checkpoint of step 8 that counts"),
    ("path good --best los", 3, "has the metric 'los': they have dead, loss"),
    ("doctor --against empty", 3, "empty holds no checkpoint"),
    # ---- one checkpoint is no root
    (f"list good/{STEP}", 2, f"good/{STEP} is one checkpoint, not a root"),
    (f"drain good/{STEP} --to tier", 2, f"good/{STEP} is one checkpoint, not a root"),
    (f"rollback good/{STEP} --to-step 9", 2, f"good/{STEP} is one checkpoint, not a root"),
    (f"verify good/{STEP} --all", 2, "is one checkpoint"),
    (f"show good/{STEP} --step 9", 2, "is one checkpoint"),
    # ---- a path that was nearly right
    ("list runs/frist/checkpoints", 3, "Did you mean runs/first/checkpoints?"),
    (f"show run/first/checkpoints/{TEN}", 3, f"Did you mean runs/first/checkpoints/{TEN}?"),
    ("verify runs/first/checkpoints/step-10", 3, f"Did you mean runs/first/checkpoints/{TEN}?"),
    ("verify runs/first", 3, "Did you mean runs/first/checkpoints?"),
    ("prune runs/first --keep-last 1", 2, "Did you mean runs/first/checkpoints?"),
    ("pin runs/first --why x", 3, "Did you mean runs/first/checkpoints?"),
    (f"list runs/first/checkpoints/{TEN}", 2, "Did you mean runs/first/checkpoints?"),
    (f"rollback runs/first/checkpoints/{TEN} --to-step 10 --why x", 2, "Did you mean runs/first/checkpoints?"),
    ("simulate --trace=runs/frist", 3, "Did you mean runs/first?"),
    ("doctor rusn", 3, "Did you mean runs?"),
    ("export rusn out", 3, "Did you mean runs?"),
    # ---- a format of the future, damage
    ("show future", 9, "format version 99"),
    ("verify future", 9, "upgrade ckptman"),
    (f"show future/{STEP}", 9, "upgrade ckptman"),
    ("verify mixed --all", 9, "format version 99"),
    (f"verify damaged/{STEP}", 4, "step 9"),
    ("verify incomplete", 4, "step 9"),
    ("show incomplete", 4, f"{STEP} is not a complete checkpoint: __0_0.distcp is missing"),
    ("show garbled", 4, "manifest.json"),
    # ---- options that are wrong
    ("path good --best loss --step 9", 2, "exclude each other"),
    ("path good --max", 2, "--best accuracy --max"),
    ("verify good --step 9 --all", 2, "exclude each other"),
    ("verify good --world-size 1,two", 2, "1,2,4"),
    ("verify good --world-size 0", 2, "1,2,4"),
    ("verify good --world-size 2000000", 2, "--world-size"),
    ("verify good --world-size 2,8193", 2, "more than 8,192 ranks are not loaded, which would take hours"),
    ("verify good --mesh 2x4097", 2, "more than 8,192 ranks are not loaded"),
    ("verify good --mesh 2000x2000", 2, "--mesh"),
    ("verify good --mesh 2", 2, "--mesh: replicas x shards, such as 2x4"),
    ("verify good --threads 0", 2, "'--threads'"),
    ("verify good --threads 5000", 2, "--threads"),
    ("verify good --plan-only", 2, "onto how many ranks"),
    ("verify good --bandwidth 5GB/s", 2, "are for --plan-only"),
    ("verify good --plan-only --world-size 8 --bandwidth 5", 2, "--bandwidth: a rate above 0 with its unit"),
    ("verify good --plan-only --world-size 8 --rank-bandwidth x", 2, "--rank-bandwidth: a rate"),
    ("drain good --threads 0", 2, "'--threads'"),
    ("prune good --keep-last 0", 2, "0 never means all"),
    ("prune good --keep-every 0", 2, "at least 1"),
    ("prune good --keep-best loss:0", 2, "at least 1"),
    ("prune good --keep-best :2", 2, "name of a metric"),
    ("prune good --keep-best lost", 2, "good: no checkpoint has the metric 'lost'; they have loss"),
    ("prune good --keep-best loss:2:mxa", 2, "has the metric 'loss:2:mxa'; they have loss"),
    ("prune good --keep-best dead", 2, "the metric 'dead' is a finite number in no checkpoint"),
    ("prune good --keep-best loss --keep-best loss:2:max", 2, "both the lowest and the highest"),
    ("prune good --keep-within soon", 2, "--keep-within: a time"),
    ("prune good --keep-within 7", 2, "7 has no unit: say it in min, h, d or w"),
    ("prune good --keep-within 6M", 2, "6M may be minutes or months"),
    ("prune good --keep-within '1d 12m'", 2, "1d 12m may be minutes or months"),
    ("prune good --keep-steps 1,x", 2, "--keep-steps: steps with commas"),
    ("prune good --keep-steps ''", 2, "--keep-steps: steps with commas"),
    ("prune three --keep-steps 15,99999", 2, "keep none of 3 checkpoints (KeepSteps(15, 99999)). Nothing is deleted"),
    ("prune three --keep-every 1000000", 2, "(KeepEvery(steps=1000000))"),
    ("prune three --keep-every 1000 --keep-steps 7", 2, "(KeepEvery(steps=1000) | KeepSteps(7))"),
    ("prune good --max-bytes 70", 2, "has no unit"),
    ("prune good --max-percent 101", 2, "percent must be at most 100"),
    ("prune good --leftovers --keep-last 3", 2, "rules for them contradict it"),
    ("prune good --keep-last 1 --jobs 0", 2, "'--jobs'"),
    ("prune good --keep-last 1 --jobs 10000", 2, "'--jobs'"),
    ("prune good --keep-last 1 --files-per-second 0", 2, "--files-per-second must be"),
    ("prune good", 2, "so there are no rules: say what to keep, with options such as --keep-last 3"),
    *((f"prune {root} {rule}", code, words) for root, code, words in NO_ROOTS for rule in RULES),
    ("pin good --step 8 --why x", 3, "no checkpoint of step 8"),
    ("pin good --why '  '", 2, "a pin needs a reason"),
    (f"pin good --why {1001 * 'x'}", 2, "has at most 1000 characters, not 1001"),
    ("pin nowhere --why x", 3, "nowhere"),
    ("memory flush good --timeout 0", 2, "--timeout"),
    ("memory flush good --nodes 0", 2, "--nodes"),
    ("memory clear", 2, "--all-dead"),
    ("memory clear good --all-dead", 2, "--all-dead"),
    ("submit", 2, "Missing argument"),
    ("submit --scheduler slurm -- true", 3, "--scheduler local"),
    ("submit --scheduler pbs -- true", 2, "known: slurm, local"),
    ("submit --scheduler local --notify ' ' -- true", 2, "--notify is empty: give a command"),
    ("submit --notify ' ' train.sbatch", 2, "--notify is empty: give a command"),
    ("submit --on exit=later x", 2, "'later' is not a reaction"),
    ("submit --on quit=hold x", 2, "no cause 'quit'"),
    ("submit --on @gone x", 2, "--on @gone: the file cannot be read"),
    ("submit --scheduler local --crash-limit 0 -- true", 2, "--crash-limit"),
    ("submit --scheduler local --max-attempts -1 -- true", 2, "--max-attempts"),
    ("export good out --max-shard-size 5", 2, "has no unit"),
    ("export good out --rename weight", 2, "two names with = between them"),
    ("export good out --format gguf", 2, "one of safetensors, torch, dcp"),
    ("export good out --dtype float7", 2, "cast to one of"),
    ("export good out --only epoch", 2, "there is no tensor"),
    # ---- diff
    ("diff good", 3, "holds 1 complete checkpoint"),
    (f"diff good/{STEP}", 2, "name the one it is to be compared with"),
    ("diff dcp", 2, "name the one it is to be compared with"),
    ("diff good --steps 9,20", 3, "20"),
    ("diff good --steps 9", 2, "--steps"),
    (f"diff good good/{STEP} --steps 9,9", 2, "--steps"),
    (f"diff good/{STEP} --steps 9,9", 2, "--step"),
    (f"diff good/{STEP} nowhere", 3, "nowhere"),
    (f"diff good/{STEP} good/{STEP} --only nothing*", 2, "matches nothing"),
    (f"diff good/{STEP} good/{STEP} --top 0", 2, "--top"),
    (f"diff good/{STEP} file", 10, "file"),
    ("diff file", 10, "file"),
    # ---- copy
    ("copy nowhere backup", 3, "there is no checkpoint root nowhere"),
    ("copy empty backup", 3, "holds no checkpoint"),
    ("copy good backup --step 7", 3, "has no checkpoint of step 7; the latest there are: 9"),
    ("copy good good", 2, "is in good already"),
    ("copy good good/backup", 2, "name a root outside of it"),
    (f"copy good good/{STEP}", 2, "name the root to copy to"),
    (f"copy good/{STEP} good", 2, "is in good already"),
    ("copy good file", 10, "is a file, not a folder"),
    ("copy good file/backup", 10, "cannot be made"),
    ("copy good backup --limit fast", 2, "--limit: a rate above 0 with its unit, such as 5GB/s"),
    ("copy good backup --threads 0", 2, "'--threads'"),
    ("copy good backup --threads 5000", 2, "'--threads'"),
    ("copy good backup --step 9 --all", 2, "--step and --all exclude each other"),
    ("copy good nosuch://bucket/x", 2, "nosuch://bucket/x"),
    ("copy dcp s3://bucket/x", 2, "dcp"),
    ("copy titan backup", 3, "but titan/step-1000 is a checkpoint of torchtitan: name that folder"),
    # ---- doctor
    ("doctor nowhere", 3, "there is no folder"),
    ("doctor link", 3, "there is no folder"),
    ("doctor file", 10, "is a file, not a folder: name a folder"),
    ("doctor --size 1GiB", 2, "name one, as in ckptman doctor DIR --size 1GiB"),
    (f"{DOCTOR} --size 0", 2, "--size: a size above 0"),
    (f"{DOCTOR} --size 4KiB", 2, "--size: at least 1MiB"),
    (f"{DOCTOR} --against 0GB", 2, "--against: a size above 0"),
    (f"{DOCTOR} --against 70", 2, "--against: 70 has no unit: say 70GB, if that is what is meant"),
    (f"{DOCTOR} --against ' 1.5 '", 2, "--against: 1.5 has no unit: say 1.5GB"),
    (f"{DOCTOR} --against there", 2, "'there' is not a size such as 70GB or 1.5TiB, and there is no such path"),
    (f"{DOCTOR} --against ''", 2, "--against: '' is not a size"),
    (f"{DOCTOR} --timeout 0", 2, "--timeout must be a finite number above 0"),
    (f"{DOCTOR} --timeout 1e10", 2, "--timeout: a day at most (86400 s), not 1e+10"),
    (f"{DOCTOR} --second-client ' '", 2, "--second-client: name a command that starts a process on another node"),
    (f'{DOCTOR} --second-client "ssh \'n2"', 2, "is not a command (No closing quotation)"),
    (f"{DOCTOR} --second-client false", 2, "--second-client: false ended with exit code 1: name a command"),
    (f"{DOCTOR} --second-client 'ssh n2' --timeout 29", 2, "--timeout: at least 30 s with --second-client"),
    ("doctor --second-client 'ssh n2'", 2, "--second-client looks at a DIR: name one"),
    # ---- plan
    ("plan", 2, "name one of --params"),
    (f"{PLAN} --model a:b", 2, "--params and --model are given"),
    ("plan --params 0", 2, "a number of at least 1 such as 9e9, 7B or 350M, not '0'"),
    (f"{PLAN} --nodes 0", 2, "'--nodes'"),
    (f"{PLAN} --gpus -8", 2, "'--gpus'"),
    (f"{PLAN} --nodes {HUGE}", 2, "more than any machine has"),
    (f"{PLAN} --nodes 99999 --gpus 9", 2, "899,991 GPUs are more than any machine has: at most 200,000"),
    (f"{PLAN} --gpu-memory 80GB", 2, "--gpu-memory was removed: ckptman plan no longer estimates GPU memory"),
    (f"{PLAN} --gpu-memory=80GB", 2, "--gpu-memory was removed"),
    (f"{PLAN} --dtype int3", 2, "one of float64, float32"),
    (f"{PLAN} --moments -1", 2, "'--moments'"),
    (f"{PLAN} --moments 101", 2, "'--moments'"),
    (f"{PLAN} --tier scratch", 2, "NAME=RATE or NAME=DIR"),
    (f"{PLAN} --tier scratch=2", 2, "with its unit"),
    (f"{PLAN} --tier scratch=0GB/s", 2, "a rate above 0"),
    (f"{PLAN} --tier a=1GB/s --tier a=2GB/s", 2, "given twice"),
    (f"{PLAN} --tier here=nowhere/at/all", 3, "there is no folder"),
    (f"{PLAN} --rate mars", 2, "llama3, rsc1"),
    (f"{PLAN} --mtbf 0", 2, "a time above 0"),
    (f"{PLAN} --init soon", 2, "such as 90s, 20min, 1h30min or 4d, not 'soon'"),
    (f"{PLAN} --staging fast", 2, "--staging"),
    (f"{PLAN} --factor 0", 2, "--factor must be a finite number above 0"),
    (f"{PLAN} --factor 1e308 --init 1e12", 2, "--factor: at most 1,000,000"),
    (f"{PLAN} --keep-last 0", 2, "0 never means all"),
    (f"{PLAN} --keep-every 10", 2, "goes by steps: say what a step takes, as in --step 2s"),
    ("plan --model nonsense", 2, "package.module:function"),
    ("plan --model json:loads --dtype float32", 2, "goes with --params"),
    (f"{PLAN} --copies 0", 2, "'--copies'"),
    (f"{PLAN} --memory-interval 20steps", 2, "say what a step takes, as in --step 2s"),
    (f"{PLAN} --memory-interval 0steps --step 2s", 2, "--memory-interval must be a whole number of at least 1"),
    (f"{PLAN} --survived 90", 2, "--survived: a share from 0 to 1, such as 0.9, not 90"),
    (f"{PLAN} --host-memory 512", 2, "512GB"),
    (f"{PLAN} --exchange fast", 2, "--exchange"),
    (f"{PLAN} --queue -1h", 2, "--queue: a time above 0"),
    (f"{PLAN} --restart-in-place 0", 2, "--restart-in-place: a time above 0"),
    (f"{PLAN} --memory --blocking", 2, "--blocking leaves no private copy"),
    # ---- simulate
    ("simulate", 2, "one of --mtbf 8h, --gpus 1024, --trace FILE"),
    (f"{SIMULATE} --gpus 3", 2, "one of --mtbf"),
    ("simulate --mtbf 0", 2, "a time above 0"),
    ("simulate --mtbf 1s", 2, "take too long to play: give fewer --runs"),
    ("simulate --mtbf 9999999d --runs 999999999", 2, "give fewer --runs"),
    ("simulate --gpus 0", 2, "'--gpus'"),
    (f"simulate --gpus {HUGE}", 2, "at most 200,000"),
    ("simulate --gpus 8 --rate moon", 2, "there are llama3, rsc1"),
    ("simulate --trace none.txt", 3, "there is no trace none.txt"),
    ("simulate --trace trace.txt --runs 2", 2, "is one run"),
    ("simulate --trace trace.txt --length 4h", 2, "the trace ends after 3 h"),
    (f"{SIMULATE} --stall -1s", 2, "a time above 0"),
    (f"{SIMULATE} --stall 60s --save 5s", 2, "not durable before it lets go"),
    (f"{SIMULATE} --runs 0", 2, "'--runs'"),
    (f"{SIMULATE} --runs {HUGE}", 2, "give fewer --runs"),
    (f"{SIMULATE} --survived 1.5", 2, "--survived: a share from 0 to 1"),
    (f"{SIMULATE} --memory-interval 0", 2, "--memory-interval: a time above 0"),
    (f"{SIMULATE} --restart-in-place no", 2, "--restart-in-place: a time above 0"),
    # ---- status, report, ask, probe
    ("ask nowhere save", 3, "there is no checkpoint root"),
    ("ask good rest", 2, "save, stop or hold, not 'rest'"),
    ("ask good save --timeout soon", 2, "--timeout"),
    ("ask s3://bucket/run save", 2, "object store"),
    ("status nowhere", 3, "nowhere"),
    ("report nowhere", 3, "nowhere"),
    ("probe loader", 2, "Missing argument 'MODULE:FUNCTION'"),
    ("probe loader program", 2, "MODULE:FUNCTION, such as train:make_loader or train.py:make_loader, not 'program'"),
    ("probe loader nowhere.py:f", 3, "there is no file nowhere.py"),
    ("probe loader program.py:make_laoder", 2, "program.py has no make_laoder: did you mean make_loader?"),
    (f"{PROBE} --workers 0,x", 2, "--workers: numbers from 0 to 1024"),
    (f"{PROBE} --workers 2000", 2, "--workers: numbers from 0 to 1024"),
    (f"{PROBE} --seconds 0", 2, "--seconds"),
    (f"{PROBE} --timeout 1e9", 2, "--timeout: an hour at most"),
    (f"{PROBE} --ranks-per-node 0", 2, "--ranks-per-node"),
    (f"{PROBE} --batches-per-step 0", 2, "--batches-per-step"),
    (f"{PROBE} --steps-per-second -1", 2, "--steps-per-second"),
    (f"{PROBE} --steps-per-second 1 --root good", 2, "give one of them"),
    (f"{PROBE} --root nowhere", 3, "there is no journal"),
    (f"{PROBE} --root young", 3, "does not say how fast its steps are"),
    (f"{PROBE} --data nowhere", 3, "--data: there is no nowhere"),
]
"""A command, its exit code, and words of its message."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A folder with a root of each kind, and what other verbs take."""
    folder = tmp_path_factory.mktemp("scene")
    commit(folder / "good", 9, metrics={"loss": 1.0, "dead": float("nan")}, values={"epoch": 3})
    commit(folder / "runs/first/checkpoints", 10)
    commit(folder / "mixed", 8)
    for step in (1, 2, 3):
        commit(folder / "three", step)
    for name in ("future", "mixed"):
        manifest = commit(folder / name, 9).path / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99, "colour": "red"}))
    flip_byte(commit(folder / "damaged", 9).path / "__0_0.distcp")
    (commit(folder / "incomplete", 9).path / "__0_0.distcp").unlink()
    (commit(folder / "garbled", 9).path / "manifest.json").write_text("{")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("away")
    for name in ("dcp", "titan/step-500", "titan/step-1000"):
        (folder / name).mkdir(parents=True)
        (folder / name / ".metadata").touch()
    for name in ("step-7", "step-00000001000", "STEP-0000000100", "step-0000000100.bak", "epoch-3"):
        (folder / "foreign" / name).mkdir(parents=True)
        (folder / "foreign" / name / "model.pt").touch()
    (folder / "young").mkdir()
    journal = Journal(folder / "young" / ".ckptman" / "journal.jsonl")
    journal.record("first_step", attempt=1, step=1)
    journal.close()
    for name, text in (
        ("file", "no folder"),
        ("trace.txt", "3h\n"),
        ("thesis.txt", "three years of work"),
        ("program.py", "def make_loader():\n    return []\n"),
    ):
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("command", "code", "words"), REFUSALS, ids=[each[0][:60] for each in REFUSALS])
def test_a_refusal_has_its_code_and_one_message(command, code, words, scene, monkeypatch, capsys):
    monkeypatch.chdir(scene)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the program that `probe` imports
    before = _tree(scene)
    assert main(shlex.split(command)) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.startswith(("Error: ", "Usage: "))
    assert sum(line.startswith("Error: ") for line in told.err.splitlines()) == 1
    assert "[Errno" not in told.err
    assert "Traceback" not in told.err
    assert told.out == "" or code in (4, 9)  # verify prints what it found
    assert _tree(scene) == before


def _tree(folder):
    """What is there, but for what `verify --all` notes about those that are good."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name != VERIFIED]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("command", ["list away", "show away/at/all", "verify runs/first/checkpoints --step 11"])
def test_where_nothing_is_alike_nothing_is_suggested(command, scene, monkeypatch, capsys):
    monkeypatch.chdir(scene)
    assert main(command.split()) == 3
    told = capsys.readouterr().err
    assert "Did you mean" not in told
    assert told.count("\n") == 1


def test_a_listing_of_the_folder_above_names_the_root(scene, monkeypatch, capsys):
    monkeypatch.chdir(scene)
    assert main(["list", "runs/first"]) == 0
    assert capsys.readouterr().out.endswith("Did you mean runs/first/checkpoints?\n")


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code"), [(PermissionError(13, "Permission denied"), 10), (KeyboardInterrupt(), 130)]
)
def test_a_root_that_cannot_be_read_is_no_empty_root_and_an_interrupt_is_130(error, code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda path: _raise(error))
    assert main(["list", str(tmp_path)]) == code


def test_the_traceback_is_there_for_those_who_ask(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CKPTMAN_TRACEBACK", "1")
    assert main(["list", str(tmp_path / "none")]) == 3
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.splitlines()[-1].startswith("Error: there is no checkpoint root")


def test_a_bug_is_no_verdict(tmp_path, monkeypatch, capsys):
    """Python would end with 1, by which `ckptman diff` says that two checkpoints differ."""
    monkeypatch.setattr("ckptman.cli.list._summary", lambda *_: _raise(ZeroDivisionError("of all things")))
    commit(tmp_path, 9)
    assert main(["list", str(tmp_path)]) == 70
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "a bug of ckptman (ZeroDivisionError)" in told


@pytest.mark.parametrize("checkpoints", [1, 200])
def test_a_reader_that_leaves_is_no_error(checkpoints, tmp_path):
    for step in range(1, checkpoints + 1):
        commit(tmp_path, step, ranks=1, sequence=step)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "import ckptman.cli; ckptman.cli.main()", "list", str(tmp_path)]
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=240)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_without_standard_output_there_is_an_exit_code(closed, tmp_path):
    command = f"{sys.executable} -m ckptman list {tmp_path} {closed}"
    assert subprocess.run(["bash", "-c", command], timeout=240, capture_output=True).returncode == 0
