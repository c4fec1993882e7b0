"""Slurm templates: what they become, what is refused, and that an installed ckptman has them. On a real Slurm they are
run by `tests/slurm/test_templates.py`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.errors import CkptmanError, ConfigError, NotFoundError, UnknownKeyError
from ckptman.jobs.slurm import templates
from ckptman.jobs.slurm.batch_script import parse
from ckptman.jobs.slurm.template_keys import TEMPLATES, TrainingKeys
from ckptman.jobs.slurm.templates import read_settings, render_template

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "slurm_templates"
TRAINING = [name for name, each in TEMPLATES.items() if issubclass(each.keys, TrainingKeys)]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

STRANGE = "a 'b' \"c\" $(touch made) `touch made` #d;&|<>*?!é \\"
EVIL = {
    "job_name": STRANGE.removesuffix(" \\"),
    "account": STRANGE,
    "partition": STRANGE,
    "qos": STRANGE,
    "log_folder": "logs/" + STRANGE.removesuffix(" \\"),
    "modules": STRANGE,
    "venv": STRANGE,
    "env.STRANGE": STRANGE + "\n'\n",
    "sbatch": "--comment=" + STRANGE,
    "command": shlex.join(["echo", STRANGE, "two\nlines\n#SBATCH --nodes=99"]),
}


def settings(values):
    return [f"{key}={value}" for key, value in values.items()]


def script(name, *given):
    return render_template(name, read_settings([*["account=me"] * (name in ("jsc", "jupiter")), *given]))


def options(text):
    """The options of a script, as `ckptman submit` reads them."""
    return dict(parse(text, "x").options)


def bash(text, folder, *arguments, others=None, **environ):
    """Run a script as the batch step of job 4711 on two nodes does, with `srun`, `scontrol` and `squeue` that only
    tell. `others`: the bodies of further programs, or of these."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in {
        # Two that run at once tell one after the other.
        "srun": 'exec 9< "$0"; flock 9; printf "<%s>" "$@"; echo; env | sort; printf "strange<%s>\\n" "${STRANGE-}"; '
        'exit "${CODE:-0}"',
        "scontrol": "printf 'n7\\nn8\\n'",
        "squeue": 'echo "${END-2037-01-02T03:04:05}"; echo "squeue $*" >&2',
        "sinfo": "printf 'n7 mix\\nn7 mix\\nn8 down*\\nn9 idle*\\n'",
        "module": 'printf "module<%s>\\n" "$@"',
        **(others or {}),
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (folder / "script").write_text(text)
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TZ": "UTC",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "3",
        **environ,
    }
    return subprocess.run(
        ["bash", *arguments, "script"], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_value_is_expanded_or_ends_its_line(name, tmp_path):
    (tmp_path / STRANGE / "bin").mkdir(parents=True)
    (tmp_path / STRANGE / "bin/activate").touch()
    for text in (script(name), evil := script(name, *settings(EVIL))):
        assert bash(text, tmp_path, "-n").returncode == 0
        assert not re.findall(r"@\w+@|@include", text.replace(STRANGE, ""))
        assert options(text)["--open-mode"] == "append"
        assert ("--signal" in options(text)) == (name in TRAINING)
    seen = options(evil)
    assert seen["--job-name"] == EVIL["job_name"]
    assert seen["--account"] == seen["--partition"] == seen["--qos"] == seen["--comment"] == STRANGE
    assert seen["--output"].startswith(f"{EVIL['log_folder']}/%x-%")
    assert "99" not in seen.get("--nodes", "")
    ran = bash(evil, tmp_path, SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="4711")
    assert not list(tmp_path.rglob("made")), ran.stderr
    if name in TRAINING:
        assert f"<echo><{STRANGE}><two\nlines\n#SBATCH --nodes=99>" in ran.stdout
        assert f"strange<{STRANGE}\n'\n>" in ran.stdout
    else:
        assert f"{STRANGE} two\nlines\n#SBATCH --nodes=99\n" in ran.stdout
    assert "module<load>\nmodule<a>\nmodule<'b'>\n" in ran.stdout
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (Debian: apt-get install shellcheck)")
@pytest.mark.parametrize("name", TEMPLATES)
def test_shellcheck_has_nothing_to_say(name, tmp_path):
    full = {"modules": "cuda/12 python", "venv": "my env", "env.A": "b", "mem": "1G", "account": "me"}
    if name in TRAINING:
        full |= {"container": "a b.sif", "container_binds": "/x"}
    if name == "torchrun":
        full |= {"restarts": "3", "spare_nodes": "1"}
    for number, given in enumerate(([], settings(full))):
        path = tmp_path / f"{number}.sbatch"
        path.write_text(script(name, *given))
        # What `activate` holds is not ours to follow.
        done = subprocess.run([str(SHELLCHECK), "-e", "SC1091", path], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", TRAINING)
def test_what_ranks_are_told(name, tmp_path):
    given = {"command": "train 'a b'", "env.MY": "own"}
    if name == "scaling-matrix":
        given["matrix"] = "1x1 2x3"
    array = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "4700"} if name == "scaling-matrix" else {}
    ran = bash(script(name, *settings(given)), tmp_path, CODE="75", **array)
    assert ran.returncode == 75, ran.stderr
    [call] = [line for line in ran.stdout.splitlines() if line.startswith("<--kill-on-bad-exit=1>")]
    assert call.endswith("<train><a b>")
    told = dict(line.partition("=")[::2] for line in ran.stdout.splitlines() if "=" in line)
    assert told["MASTER_ADDR"] == ("n7i" if name == "jsc" else "n7")
    assert told["MASTER_PORT"] == "24711"
    assert told["SLURM_JOB_END_TIME"] == "2114478245"
    assert told["SRUN_CPUS_PER_TASK"] == "3"
    assert told["MY"] == "own"
    assert ("-j 4700_1 " if array else "-j 4711 ") in ran.stderr
    assert "PYTHONFAULTHANDLER" not in told
    assert "NCCL_DEBUG" not in told
    ran = bash(script(name, *settings(given)), tmp_path, CKPTMAN_DEBUG="1", **array)
    for variable in (
        *("PYTHONFAULTHANDLER=1", "NCCL_DEBUG=INFO", "TORCH_DISTRIBUTED_DEBUG=INFO", "TORCH_NCCL_DUMP_ON_TIMEOUT=1"),
        *("TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        *("TORCH_FR_DUMP_TEMP_FILE=./nccl-trace-4711-rank-", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=./nccl-trace-4711-rank-"),
    ):
        assert f"\n{variable}\n" in ran.stdout
    assert ran.returncode == 0


@pytest.mark.parametrize(
    ("environ", "end"),
    [
        *(({"END": end}, None) for end in ("NONE", "N/A", "", "Unknown", "UNLIMITED")),
        ({"SLURM_JOB_END_TIME": "4102444800"}, "4102444800"),
        ({"SLURM_JOB_END_TIME": "1700000000"}, "2114478245"),  # of the job this one was submitted from
    ],
)
def test_the_end_of_a_job(environ, end, tmp_path):
    ran = bash(script("generic"), tmp_path, **environ)
    told = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    assert told.get("SLURM_JOB_END_TIME") == end
    assert ("squeue" in ran.stderr) == (environ.get("SLURM_JOB_END_TIME") != end or end is None)
    assert ran.returncode == 0


@pytest.mark.parametrize("name", TRAINING)
def test_what_the_training_said_on_disk_comes_before_what_a_launcher_makes_of_it(name, tmp_path):
    array = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "4700"}
    outcome = tmp_path / "an outcome.json"
    text = script(name)

    def code(of_launcher, **environ):
        return bash(text, tmp_path, CODE=str(of_launcher), **array, **environ).returncode

    for state, codes in {"stopped": [75, 75, 75], "running": [143, 1, 0], "failed": [143, 1, 0]}.items():
        outcome.write_text(json.dumps({"state": state}, indent=1))
        assert [code(each, CKPTMAN_OUTCOME=str(outcome)) for each in (143, 1, 0)] == codes
    assert code(1, CKPTMAN_OUTCOME=str(tmp_path / "none")) == 1
    old = tmp_path / "outcome-4711.json"
    old.write_text(json.dumps({"state": "stopped"}, indent=1))  # of the attempt before, as a requeued job finds it
    assert code(1) == 1
    assert not old.exists()


@pytest.mark.parametrize("name", TRAINING)
def test_a_rendezvous_of_the_user_is_kept_and_none_is_inherited(name, tmp_path):
    array = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "4700"}
    outer = {"MASTER_ADDR": "of-another-job", "MASTER_PORT": "1"}
    for given, address, port in (
        ([], "n7i" if name == "jsc" else "n7", "24711"),
        (["master_suffix=-ib"], "n7-ib", "24711"),
        (["env.MASTER_ADDR=10.0.0.1", "master_suffix=i"], "10.0.0.1", "24711"),
        (["setup=MASTER_ADDR=mine MASTER_PORT=5"], "mine", "5"),
    ):
        ran = bash(script(name, *given), tmp_path, **array, **outer)
        assert f"\nMASTER_ADDR={address}\nMASTER_PORT={port}\n" in ran.stdout


# A srun that runs its command here.
RUNS = {"srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"', "nvidia-smi": ":"}


def test_each_torchrun_is_told_whether_it_keeps_the_rendezvous(tmp_path):
    tells = {**RUNS, "torchrun": "env | grep ^PET_; echo .", "hostname": "echo ${0##*/}-node"}
    for name, given, environ, told in (
        ("torchrun", [], {"SLURM_NODEID": "0"}, ["PET_RDZV_CONF=is_host=1"]),
        ("torchrun", [], {"SLURM_NODEID": "1"}, ["PET_RDZV_CONF=is_host=0"]),
        ("jupiter", [], {"SLURM_NODEID": "1"}, ["PET_RDZV_CONF=is_host=0"]),
        ("jsc", [], {"SLURM_NODEID": "0"}, ["PET_LOCAL_ADDR=hostname-nodei", "PET_RDZV_CONF=is_host=1"]),
        (
            "jsc",
            ["env.PET_RDZV_CONF=a=b", "env.PET_LOCAL_ADDR=c"],
            {},
            ["PET_LOCAL_ADDR=c", "PET_RDZV_CONF=a=b,is_host=1"],
        ),
    ):
        ran = bash(script(name, *given), tmp_path, others=tells, **environ)
        assert sorted(ran.stdout.split()) == [".", *told], ran.stderr


def test_torchrun_reads_what_a_node_is_told(monkeypatch):
    from torch.distributed.run import get_args_parser

    monkeypatch.setenv("PET_RDZV_CONF", "is_host=1")
    monkeypatch.setenv("PET_LOCAL_ADDR", "n7i")
    read = get_args_parser().parse_args(["train.py"])
    assert (read.rdzv_conf, read.local_addr) == ("is_host=1", "n7i")


def test_a_container(tmp_path):
    ran = bash(script("lumi", "container=my image.sif", "command=a"), tmp_path, SINGULARITY_BIND="/x")
    assert "<singularity><exec><--bind=/var/spool/slurmd," in ran.stdout
    assert '><my image.sif><bash><-c><${WITH_CONDA:-:} || exit 2; exec "$@"><bash><a>' in ran.stdout
    assert "<--cpu-bind=mask_cpu:0x00fe000000000000," in ran.stdout
    assert "SINGULARITY_BIND" not in ran.stdout
    ran = bash(script("lumi", "container=", "cpu_masks=", "command=a"), tmp_path)
    assert "<--kill-on-bad-exit=1><a>" in ran.stdout
    ran = bash(script("torchrun", "container=x", "container_command=apptainer exec", "command=a"), tmp_path)
    assert "<apptainer><exec><x><torchrun><--nnodes=2>" in ran.stdout


@pytest.fixture
def shm(tmp_path):
    """Memory of a node that holds something of a user whose id is the name of this folder."""
    folder = Path("/dev/shm", f"ckptman-{tmp_path.parent.name}-{os.getpid()}")
    folder.mkdir()
    yield folder.name.removeprefix("ckptman-")
    folder.rmdir()


@pytest.mark.parametrize("conda", [True, False], ids=["image before 2025", "image since 2025"])
@pytest.mark.parametrize("venv", [True, False], ids=["venv", "without"])
def test_python_and_the_flush_in_a_container_are_those_of_its_environments(conda, venv, shm, tmp_path):
    (tmp_path / "conda").write_text("environment=$1-$#\nexport environment\n")
    (tmp_path / "my env/bin").mkdir(parents=True)
    (tmp_path / "my env/bin/activate").write_text("environment=${environment-}+venv-$#\nexport environment\n")
    outcome = tmp_path / "outcome"
    outcome.write_text(json.dumps({"state": "failed", "root": "/a b", "attempt": 1}, indent=1))
    inside = "export WITH_CONDA='source ./conda pytorch'" if conda else ":"
    others = {
        **RUNS,
        "singularity": f'[ -z "${{environment-}}" ] || exit 9; {inside}; shift 3; exec "$@"',
        "python": 'echo "${environment-none} python $*"; exit 3',
        "ckptman": 'echo "${environment-none} ckptman $*"',
        "id": f"echo {shm}",
    }
    given = ["venv=$HERE/my env"] if venv else []
    ran = bash(
        script("lumi", "container=x.sif", "command=python 'a b'", *given),
        tmp_path,
        others=others,
        HERE=str(tmp_path),
        CKPTMAN_OUTCOME=str(outcome),
    )
    # `activate` of a venv sees the words of the command, which it does not read.
    found = {(True, True): "pytorch-1+venv-2", (True, False): "pytorch-1", (False, True): "+venv-2"}
    name = found.get((conda, venv), "none")
    python, flush = ran.stdout.splitlines()
    assert python == f"{name} python a b", ran.stderr
    assert re.sub(r"venv-\d+", "venv-2", flush) == f"{name} ckptman memory flush /a b"
    assert ran.returncode == 3
    (tmp_path / "my env/bin/activate").unlink()
    if venv:
        ran = bash(script("generic", "container=x.sif", *given), tmp_path, others=others, HERE=str(tmp_path))
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "my env/bin/activate" in ran.stderr


def test_the_job_expands_variables_in_paths_and_nothing_else(tmp_path):
    place = tmp_path / "a '$(touch made)' $HOME"
    (place / "v/bin").mkdir(parents=True)
    (place / "v/bin/activate").write_text("echo active\n")
    given = [
        "venv=${PLACE}/v",
        "env.A=$PLACE/x:~/y",
        "env.B=a~ $1 $(touch made) `touch made` $",
        "env.C=~",
        "command=a",
    ]
    ran = bash(script("generic", *given), tmp_path, PLACE=str(place), HOME="/h o")
    assert ran.stdout.startswith("active\n"), ran.stderr
    assert f"\nA={place}/x:/h o/y\nB=a~ $1 $(touch made) `touch made` $\nC=/h o\n" in ran.stdout
    given = ["container=$PLACE/x.sif", "container_binds=$PLACE,~/b", "container_command=run --overlay $PLACE/o"]
    ran = bash(script("generic", *given), tmp_path, PLACE=str(place), HOME="/h o")
    assert f"<run><--overlay><{place}/o><--bind={place},/h o/b><{place}/x.sif><python>" in ran.stdout
    assert not list(tmp_path.rglob("made"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_first_lines_say_what_a_user_looks_for(name):
    command = "python train.py --out runs/a\nb"
    first = script(name, "log_folder=logs", "job_name=big", f"command={command}").splitlines()[:13]
    facts = {line[2:15].strip(): line[16:] for line in first if re.match(r"# \w+: {2}", line)}
    training = name in TRAINING
    assert list(facts) == ["Submit:", "Log:", *["Checkpoints:"] * training, "Command:"]
    assert TEMPLATES[name].chain == facts["Submit:"].startswith("ckptman submit FILE")
    assert facts["Log:"] == f"logs/big-JOB{'_TASK' * (name == 'scaling-matrix')}.out"
    assert facts["Command:"] == "python train.py --out runs/a b"
    assert facts.get("Checkpoints:") == ("runs/a" if training else None)
    assert "`root` of [checkpoint] in run.toml" in script("generic")
    assert "# Checkpoints:  where the command saves them\n" in script("generic", "command=bash train.sh")
    assert all(len(line) <= 120 for line in script(name, "command=" + "x " * 200).splitlines() if line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "given", "asked"),
    [
        ("generic", "", {"--gres": "gpu:4", "--ntasks-per-node": "4", "--account": None, "--mem": None, "--qos": None}),
        ("generic", "gpus_per_node=0", {"--gres": None, "--ntasks-per-node": "1", "--exclusive": None}),
        ("generic", "gpus_per_node=8 gpu_type=h100 exclusive=true", {"--gres": "gpu:h100:8", "--exclusive": ""}),
        ("generic", "sbatch=--reservation=r sbatch=--no-requeue", {"--reservation": "r", "--no-requeue": ""}),
        ("torchrun", "cpus_per_task=7", {"--cpus-per-task": "28", "--ntasks-per-node": "1", "--no-kill": None}),
        ("torchrun", "restarts=3 nodes=2", {"--nodes": "2", "--no-kill": ""}),
        ("torchrun", "restarts=1 nodes=2 spare_nodes=2", {"--nodes": "4"}),
        ("lumi", "", {"--gpus-per-node": "8", "--gres": None}),
        ("jupiter", "", {"--cpus-per-task": "288"}),
        ("leonardo", "nodes=64", {"--qos": None}),
        ("leonardo", "nodes=65", {"--qos": "boost_qos_bprod"}),
        ("leonardo", "nodes=65 qos=mine", {"--qos": "mine"}),
        ("leonardo", "nodes=8 time=1-00:01", {"--qos": "boost_qos_lprod"}),
        ("leonardo", "time=4-00:00:00", {"--qos": "boost_qos_lprod"}),
        ("leonardo", "nodes=9 time=5-00:00:00 qos=special", {"--qos": "special"}),
        ("leonardo", "nodes=65 partition=other", {"--qos": None}),
        ("scaling-matrix", "", {"--array": "0-4", "--nodes": "2", "--gres": "gpu:8", "--ntasks-per-node": "8"}),
        ("scaling-matrix", "gpus_per_node=0 nodes=6", {"--array": "0-4", "--nodes": "6", "--gres": None}),
    ],
)
def test_what_slurm_is_asked_for(name, given, asked):
    seen = options(script(name, *given.split()))
    assert {option: seen.get(option) for option in asked} == asked


def calls_of(ran):
    """The calls of srun, in the order in which they were told."""
    return [line for line in ran.stdout.splitlines() if line.startswith("<--")]


def test_restarts_within_the_job(tmp_path):
    text = script("torchrun", "restarts=3", "nodes=2", "command=a")
    ran = bash(text, tmp_path, SLURMD_NODENAME="n7")
    [launch] = [call for call in calls_of(ran) if "torchrun" in call]
    assert launch.startswith("<--kill-on-bad-exit=1><sh><-c>")
    assert '; exec "$@"><node><torchrun><--max-restarts=3><--nnodes=2>' in launch
    assert "\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in ran.stdout
    assert 'done\' watch "$SLURMD_NODENAME" &' in text  # it is ended with the step, at once here
    plain = script("torchrun", "restarts=0")
    assert plain == script("torchrun")
    assert not re.search("watch=|TCP_STORE|max-restarts", plain)


def test_spare_nodes(tmp_path):
    text = script("torchrun", "restarts=1", "nodes=2", "spare_nodes=2", "command=a", "container=x")
    outcome = tmp_path / "outcome"
    outcome.write_text(json.dumps({"state": "finished"}, indent=1))
    ran = bash(text, tmp_path, SLURM_JOB_NUM_NODES="4", SLURMD_NODENAME="n7", CODE="1", CKPTMAN_OUTCOME=str(outcome))
    [launch] = [call for call in calls_of(ran) if "torchrun" in call]
    assert launch.startswith("<--no-kill><--kill-on-bad-exit=0><--wait=0><sh>")
    start = "<node><singularity><exec><--nv><x><python><-m><ckptman.train.torchrun>"
    assert f"{start}<--max-restarts=1><--nnodes=2>" in launch
    assert ran.returncode == 0  # the spare node, or one that died, ended with another code


@pytest.mark.parametrize("name", ["generic", "torchrun", "leonardo", "lumi", "superpod"])
def test_what_is_in_memory_is_flushed_after_a_crash(name, tmp_path):
    outcome = tmp_path / "outcome"
    flushed = {}
    for state in ("running", "failed", "stopped", "finished"):
        outcome.write_text(json.dumps({"state": state, "root": "/a b/é", "attempt": 1}, indent=1))
        ran = bash(script(name, "command=a"), tmp_path, CODE="9", CKPTMAN_OUTCOME=str(outcome), LC_ALL="C.UTF-8")
        assert ran.returncode == (75 if state == "stopped" else 9)
        flushed[state] = [call for call in calls_of(ran) if "memory flush" in call]
    assert flushed["stopped"] == flushed["finished"] == []
    for state in ("running", "failed"):
        [call] = flushed[state]
        assert "<--nodelist=n7><--nodes=1>" in call
        assert call.endswith("<flush></a b/é>")
    outcome.unlink()
    assert "memory flush" not in bash(script(name), tmp_path, CODE="9", CKPTMAN_OUTCOME=str(outcome)).stdout


def test_a_job_with_spare_nodes_that_is_queued_again_flushes_first(tmp_path):
    outcome = tmp_path / "outcome"
    outcome.write_text(json.dumps({"state": "running", "root": "/a", "attempt": 1}, indent=1))
    text = script("torchrun", "restarts=1", "nodes=2", "spare_nodes=1", "command=a")
    known = {"SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "n7", "CKPTMAN_OUTCOME": str(outcome)}
    for count, expected in (("0", ["torchrun", "flush"]), ("1", ["flush", "torchrun", "flush"])):
        calls = calls_of(bash(text, tmp_path, SLURM_RESTART_COUNT=count, **known))
        kinds = ["flush" if "memory flush" in call else "torchrun" if "torchrun" in call else "" for call in calls]
        assert [kind for kind in kinds if kind] == expected


@pytest.mark.parametrize("name", TRAINING)
def test_the_network_interface_is_for_gloo_and_nccl(name):
    line = "\nexport GLOO_SOCKET_IFNAME=ib0,ib1 NCCL_SOCKET_IFNAME=ib0,ib1\n"
    _, _, after = script(name, "interface=ib0,ib1").partition("MASTER_ADDR=")
    assert line in after
    assert "\nexport GLOO_SOCKET_IFNAME" not in script(name, "interface=")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("generic", "nodes=many", "nodes: input should be a valid integer"),
        ("generic", "time=00:00:00", "at least 1 minute"),
        ("generic", "time=2", "told to stop as it starts"),
        ("generic", "warning_seconds=70000", "less than or equal to 65535"),
        ("generic", "account=me\n#SBATCH --nodes=99", "would end the #SBATCH line"),
        ("generic", "job_name=a\x1b[31m", "a control character"),
        ("generic", "command=a \x00", "a control character"),
        ("generic", "setup=a \x1b", "a control character"),
        ("generic", "env.A=a \x1b", "a control character"),
        ("generic", "env.A B=a", "is not the name of an environment variable"),
        ("generic", "env=a", "env.NAME=VALUE"),
        ("generic", "command=", "nothing to run"),
        ("generic", "command=python 'train.py", "close the quotes"),
        ("generic", "container_command=", "nothing to run"),
        ("generic", "job_name=a/b", "use a name without it"),
        ("generic", "job_name=", "at least 1 character"),
        ("generic", "log_folder=logs/%j", "use a name without them"),
        ("generic", "mem=lots", "mem: not in the form"),
        ("generic", "gpu_type=a b", "gpu_type: not in the form"),
        ("generic", "interface=ib0;reboot", "interface: not in the form"),
        ("generic", "sbatch=-n 4", "write it as --name=value"),
        ("generic", "sbatch=--comment=a\nb", "would end the #SBATCH line"),
        ("generic", "container_binds=/x", "there is no container"),
        ("generic", "nodes", "write it as KEY=VALUE"),
        ("generic", "log_folder=~/logs", "log_folder: ~ would not be expanded here"),
        ("generic", "sbatch=--chdir=${WORK}", "sbatch: ${WORK} would not be expanded here"),
        ("generic", "command=python train.py --out $SCRATCH/run", "$SCRATCH would not be expanded: write the value"),
        ("generic", "command=python ~/train.py", "~ would not be expanded"),
        ("generic", "master_suffix=; reboot", "master_suffix: not in the form"),
        ("leonardo", "time=4-00:01", "time=24:00:00, as ckptman submit continues in the next job, or name a qos"),
        ("lumi", "spare_nodes=1", "ckptman template torchrun restarts ranks within the job"),
        ("lumi", "tasks_per_node=2", "cpu_masks: 8 masks for 2 ranks"),
        ("lumi", "cpu_masks=zz", "cpu_masks: not in the form"),
        ("scaling-matrix", "matrix=1,2", "such as 1x1 1x8 2x8"),
        ("scaling-matrix", "matrix=", "such as 1x1 1x8 2x8"),
        ("scaling-matrix", "nodes=1", "the largest point needs 2"),
        ("scaling-matrix", "gpus_per_node=4", "the largest point needs 8"),
        ("scaling-matrix", "tasks_per_node=4", "leave it out"),
    ],
)
def test_wrong_values(name, given, told):
    """Others are on the page, which is executed."""
    with pytest.raises(ConfigError) as caught:
        script(name, given)
    assert told in str(caught.value)


def test_all_wrong_values_are_told_at_once_and_unknown_names_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"wrong values:\n  mem: .*\n  nodes: "):
        script("generic", "nodes=0", "mem=x")
    with pytest.raises(ConfigError, match=r"^account: JSC .* account=PROJECT$"):
        render_template("jsc", {})
    with pytest.raises(UnknownKeyError) as caught:
        script("generic", "node=4")
    assert (caught.value.key, caught.value.known) == ("node", tuple(TrainingKeys.model_fields))
    with pytest.raises(UnknownKeyError, match="template verify"):
        script("verify", "nodes=4")
    with pytest.raises(NotFoundError, match="known: generic, torchrun"):
        script("../secret")


def test_every_key_is_explained_and_on_the_page():
    page = (REPOSITORY / "docs/templates.md").read_text()
    for name, each in TEMPLATES.items():
        assert f"| `{name}` |" in page
        assert each.own.keys() <= each.keys.model_fields.keys()
        for key, field in each.keys.model_fields.items():
            assert field.description
            assert f"| `{key}` |" in page
    assert TEMPLATES["scaling-matrix"].defaults["matrix"] in page
    assert {path.stem for path in FOLDER.glob("*.sbatch")} == set(TEMPLATES)


def test_the_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["template", "generic", "--set", "nodes=4"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (script("generic", "nodes=4"), "")
    assert main(["template", "verify", "-o", "a.sbatch"]) == 0
    assert main(["template", "verify", "-o", "a.sbatch", "--force", "--set", "log_folder=logs"]) == 0
    assert Path("a.sbatch").read_text() == script("verify", "log_folder=logs")
    assert "make the folder logs" in capsys.readouterr().err
    for arguments, code in (
        (["generic", "-o", "no/where"], 3),
        (["generic", "-o", "a.sbatch"], 5),
        (["generics"], 3),
        (["generic", "--config", "nowhere.toml"], 3),
        (["generic", "--set", "node=4"], 2),
        (["generic", "--force"], 2),
        (["generic", "--json"], 2),
        ([], 2),
    ):
        assert main(["template", *arguments]) == code
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("Error: ")
    assert Path("a.sbatch").read_text() == script("verify", "log_folder=logs")


def test_values_from_a_file(tmp_path, capsys):
    path = tmp_path / "site.toml"
    path.write_text('nodes = 2\naccount = "me"\nsetup = ["a", "b"]\nexclusive = true\n[env]\nA = "1"\nB = "2"\n')
    assert main(["template", "generic", "--config", str(path), "--set", "nodes=4", "--set", "env.B=3"]) == 0
    shown = capsys.readouterr().out
    assert options(shown)["--nodes"] == "4"
    assert options(shown)["--account"] == "me"
    assert "\na\nb\nexport A=1\nexport B=3\n" in shown
    for text, told in (
        ("nodes = [", "is not TOML"),
        ("nodes = 0", "nodes: "),
        ("[env]\nA = 1", "env.A: "),
        ("x=1", "'x'"),
    ):
        path.write_text(text)
        assert main(["template", "generic", "--config", str(path)]) == 2
        assert told in capsys.readouterr().err


def test_lists_for_people_and_programs(capsys):
    assert main(["template", "lumi", "--list"]) == 0
    assert re.search(r"(?m)^partition +standard-g +where it runs$", capsys.readouterr().out)
    assert main(["template", "--list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(TEMPLATES)
    assert main(["template", "lumi", "--list", "--json"]) == 0
    keys = {each["key"]: (each["default"], each["what"]) for each in json.loads(capsys.readouterr().out)["keys"]}
    assert keys["nodes"] == (1, "nodes")
    assert keys["partition"] == ("standard-g", "where it runs")


def test_an_installation_without_its_templates_says_so(monkeypatch):
    monkeypatch.setattr(templates, "FOLDER", "nowhere")
    templates._environment.cache_clear()
    with pytest.raises(CkptmanError, match=r"nowhere/generic\.sbatch is not in this installation"):
        script("generic")
    templates._environment.cache_clear()
