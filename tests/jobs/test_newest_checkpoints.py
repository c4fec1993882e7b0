"""The progress of programs that save in their own way: what is found, what is new, and what a chain does then."""

import os
import random
import sys

import pytest

from ckptman.jobs import newest_checkpoints
from ckptman.jobs.newest_checkpoints import find_left, find_newest, guess_newest, later_of, named_by, numbers_of
from tests.helpers.checkpoints import commit
from tests.helpers.slurm_chains import NOW, attempt, submitted, supervisor


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("iter_0000100", (100,)),
        ("global_step100", (100,)),
        ("checkpoint-100", (100,)),
        ("step-0000000100", (100,)),
        ("epoch=3-step=400-v1.ckpt", (3, 400)),
        ("epoch=3-val_loss=0.53.ckpt", (3,)),
        ("checkpoint_epoch_5.pth", (5,)),
        ("checkpoint_1_1000.pt", (1, 1000)),
        ("epoch_2_iter_100.pth", (2, 100)),
        ("ep0-ba100-rank0.pt", (0, 100)),
        ("model_100.pt", (100,)),
        ("0000100.pt", (100,)),
        ("ckpt_12000_loss0.53.pt", (12000,)),
        ("rank0_step_70.pt", (70,)),
        ("checkpoint_100", (100,)),
        ("last.ckpt", ()),
        ("llama-7b.pt", ()),
        ("gpt2.pt", ()),
        ("resnet50.pth", ()),
        ("model-00001-of-00003.safetensors", ()),
        ("checkpoint-2026-11-21-14.pt", ()),
        ("src_1795991082.zip", ()),
        ("release", ()),
    ],
)
def test_the_numbers_in_a_name(name, numbers):
    assert numbers_of(name) == numbers


def write(path, size=100, at=None):
    """A file of a size, or of a text; `at`: when it was changed last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(size) if isinstance(size, str) else path.write_bytes(b"x" * size)
    if at is not None:
        os.utime(path, (at, at))


LAYOUTS = {
    "megatron": lambda ck, step: [
        write(ck / f"iter_{step:07}/mp_rank_00/model_optim_rng.pt"),
        write(ck / "latest_checkpointed_iteration.txt", str(step)),
    ],
    "deepspeed": lambda ck, step: [
        write(ck / f"global_step{step}/mp_rank_00_model_states.pt"),
        write(ck / "latest", f"global_step{step}"),
    ],
    "huggingface": lambda ck, step: write(ck / f"checkpoint-{step}/model.safetensors"),
    "torchtitan": lambda ck, step: [
        write(ck / f"step-{step}/__0_0.distcp"),
        write(ck / f"step-{step}/.metadata"),
    ],
    "lightning": lambda ck, step: write(ck / f"lightning_logs/version_{step}/checkpoints/epoch=0-step={step}.ckpt"),
    "files": lambda ck, step: write(ck / f"model_{step}.pt"),
    "epochs": lambda ck, step: write(ck / f"epoch_{step // 1000}/step_{step}.pt"),
    "deepspeed in huggingface": lambda ck, step: [
        write(ck / f"checkpoint-{step}/global_step{step}/mp_rank_00_model_states.pt"),
        write(ck / f"checkpoint-{step}/latest", f"global_step{step}"),
        write(ck / f"checkpoint-{step}/rng_state_0.pth"),
    ],
    "orbax": lambda ck, step: write(ck / f"{step}/state/manifest.ocdbt"),
    "fairseq": lambda ck, step: write(ck / f"checkpoint_{step // 1000}_{step}.pt"),
    "a start, a folder": lambda ck, step: write(ck / f"2026{step:04}/checkpoint-{step}/model.pt"),
    "keras": lambda ck, step: write(ck / f"checkpoint/{step:04}.keras"),
    "flax": lambda ck, step: write(ck / f"checkpoint_{step}"),
}


@pytest.mark.parametrize("progress", [True, False], ids=["named", "guessed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_layouts_are_found(tmp_path, layout, progress):
    where = (["ck"], ()) if progress else ((), ["ck"])
    before = guess_newest(["ck"], tmp_path)
    assert before == {}
    for step, expected in ((100, True), (200, True), (200, False), (150, False), (1000, True)):
        LAYOUTS[layout](tmp_path / "ck", step)
        left = find_left(*where, tmp_path, before, 0.0, 0.0, is_known=True)
        if layout in ("megatron", "deepspeed") and step == 150:  # says itself where it goes on
            expected = False
        assert (left.has_saved, left.step) == (expected, step if expected else 0), (layout, step)
        before = later_of(before, left.newest)


def test_a_checkpoint_that_was_cut_short_is_none(tmp_path):
    for step, size in ((100, 1000), (200, 1000), (300, 400)):
        write(tmp_path / f"checkpoint-{step}/model.safetensors", size)
    write(tmp_path / "tmp-checkpoint-400/model.safetensors", 1000)
    write(tmp_path / "checkpoint-500.tmp", 1000)
    [found] = find_newest(["."], tmp_path).values()
    assert found.step == 200
    write(tmp_path / "checkpoint-400/model.safetensors", 400)  # they are smaller from now on
    [found] = find_newest(["."], tmp_path).values()
    assert found.step == 400


@pytest.mark.parametrize(
    ("first", "tracker"), [("iter_0000025", "latest_checkpointed_iteration.txt"), ("global_step25", "latest")]
)
def test_a_first_save_without_its_tracker_file_was_cut_short(tmp_path, first, tracker):
    write(tmp_path / "ck" / first / "common.pt")
    assert find_newest(["ck"], tmp_path) == guess_newest(["ck"], tmp_path) == {}
    write(tmp_path / "ck" / tracker, first)
    assert [each.step for each in find_newest(["ck"], tmp_path).values()] == [25]


def test_the_metadata_of_a_dcp_checkpoint_is_written_last(tmp_path):
    for step, size in ((100, 3000), (200, 1000)):  # the last one of torchtitan holds the model alone
        write(tmp_path / f"ck/step-{step}/__0_0.distcp", size)
        before = [each.step for each in find_newest(["ck"], tmp_path).values()]
        write(tmp_path / f"ck/step-{step}/.metadata")
        assert ([each.step for each in find_newest(["ck"], tmp_path).values()], before) == (
            [step],
            [step - 100] * (step > 100),
        )


def test_a_checkpoint_of_lightnings_requeue_counts_and_has_no_step(tmp_path):
    write(tmp_path / "ck/hpc_ckpt_1.ckpt")
    before = find_newest(["ck"], tmp_path)
    assert [each.step for each in before.values()] == [0]
    write(tmp_path / "ck/hpc_ckpt_2.ckpt")
    left = find_left(["ck"], (), tmp_path, before, 0.0, 0.0, is_known=True)
    assert (left.has_saved, left.step) == (True, 0)


def test_a_file_that_is_saved_over_counts_by_its_time_where_the_user_names_it(tmp_path):
    write(tmp_path / "out/last.ckpt", 1000, at=100.0)
    before = find_newest(["out/last.ckpt"], tmp_path)
    for size, at, has_saved in ((1000, 100.0, False), (1000, 200.0, True), (300, 300.0, False)):
        write(tmp_path / "out/last.ckpt", size, at)
        left = find_left(["out/last.ckpt"], (), tmp_path, before, 0.0, 0.0, is_known=True)
        assert left.has_saved is has_saved
        before = later_of(before, left.newest)
    # One that is only met may be written at each start: nobody knows.
    assert find_left((), ["out"], tmp_path, {}, 0.0, 0.0, is_known=True).has_saved is None


def test_files_that_are_no_checkpoints_are_no_progress(tmp_path):
    before = {}
    for start in range(4):
        write(tmp_path / f"out/{4711 + start}/log.txt")
        write(tmp_path / f"out/src_{1_795_991_082 + start}.zip")
        write(tmp_path / f"out/loader_{300 + start}.pkl")
        write(tmp_path / "out/cache.npy", 100, at=1000.0 + start)
        write(tmp_path / f"out/run-{start}x/checkpoints/epoch=0-step=400.ckpt", 100, at=1000.0 + start)
        left = find_left((), ["out"], tmp_path, before, 0.0, 0.0, is_known=True)
        assert left.has_saved is (True if start == 0 else None)
        before = later_of(before, left.newest)
    # Where the user says where it saves, nothing else counts.
    write(tmp_path / "ck/step_1.pt")
    assert (
        find_left(["ck"], ["out"], tmp_path, find_newest(["ck"], tmp_path), 0.0, 0.0, is_known=True).has_saved is False
    )


def test_a_model_with_a_number_in_its_name_is_saved_over(tmp_path):
    before = {}
    for place in ("ck/resnet_50.pth", "ck", "ck/*.pth"):
        for at in (100.0, 200.0, 300.0):
            write(tmp_path / "ck/resnet_50.pth", 100, at)
            left = find_left([place], (), tmp_path, before, 0.0, 0.0, is_known=True)
            assert left.has_saved is True, (place, at)
            before = later_of(before, left.newest)
        before = {}


def test_sizes_that_stay_smaller_are_no_accident(tmp_path):
    before, found = {}, []
    for at, size in enumerate((1000, 850, 850, 860), 100):
        write(tmp_path / "last.pt", size, at)
        left = find_left(["last.pt"], (), tmp_path, before, 0.0, 0.0, is_known=True)
        found.append(left.has_saved)
        before = later_of(before, left.newest)
    assert found == [True, False, True, True]


def test_what_is_older_than_the_chain_is_of_another_run(tmp_path):
    write(tmp_path / "ck/version_0/step=9000.ckpt", at=100.0)
    write(tmp_path / "ck/version_1/step=400.ckpt", at=300.0)
    assert find_left((), ["ck"], tmp_path, {}, 250.0, 200.0, is_known=False).step == 400


def test_what_may_not_be_looked_at_is_not_there(tmp_path, monkeypatch):
    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path / "out/checkpoint-5/model.pt")
    assert find_newest(["out", "a" * 300, "~nobody-at-all/x"], tmp_path)
    monkeypatch.setattr(os, "scandir", denied)
    assert find_newest(["out"], tmp_path) == guess_newest(["out"], tmp_path) == {}
    monkeypatch.setattr(os, "stat", denied)
    assert find_newest(["out", "out/*"], tmp_path) == guess_newest(["out"], tmp_path) == {}


def test_a_root_of_ckptman_speaks_for_itself(tmp_path):
    commit(tmp_path / "run", 30, time_seconds=5.0)
    (tmp_path / "run/.ckptman").mkdir(exist_ok=True)
    [found] = guess_newest(["run"], tmp_path).values()
    assert (found.step, found.time_seconds) == (30, 5.0)


@pytest.mark.parametrize("text", ["", "release", "\x00\xff\n", "step", "9" * 4000, "a\n" * 3000])
def test_rubbish_in_a_tracker_file(tmp_path, text):
    write(tmp_path / "latest", text)
    write(tmp_path / "checkpoint-7/model.pt")
    found = find_newest(["."], tmp_path)
    assert {each.step for each in found.values()} & {7, 0, int("9" * 18)}


def test_trees_that_cannot_be_read_or_are_huge_end_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(newest_checkpoints, "MOST_ENTRIES", 50)
    for number in range(200):
        write(tmp_path / f"logs/{number}.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling-1.pt").symlink_to(tmp_path / "nowhere")
    assert guess_newest(["."], tmp_path) == find_newest(["*.nothing", "[", "~nobody/x"], tmp_path) == {}


def test_bytes_of_any_kind_raise_nothing(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        name = bytes(chance.choice(b"step-0129_.=%\xff\xc3\n*[$ck") for _ in range(chance.randint(1, 12)))
        try:
            with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
                file.write(b"1")
        except OSError:
            continue
    find_newest(["."], tmp_path)
    guess_newest(["."], tmp_path)


def test_what_a_script_names():
    script = """#!/bin/bash
OUT=$SCRATCH/runs
srun python train.py --save $OUT/ck --load base --lr 0.1 \\
    --tensorboard-dir tb --output_dir=o1 trainer.default_root_dir=o2 config.yaml
# python old.py --save never
python -m torch.distributed.run --nproc-per-node 2 foreign.py plain --crash-after 35 --save-interval 100
echo "unclosed
"""
    environ = {"SCRATCH": "/scratch/me"}
    assert named_by(script, ["--ckpt-dir", "q"], environ) == ["q", "/scratch/me/runs/ck", "o1", "o2", "plain"]
    assert named_by("python a.py --save $NOWHERE/x --output-dir ''", [], {}) == []
    assert named_by("srun bash -c 'RANK=$SLURM_PROCID exec python a.py --save ck --lr 1'", [], {}) == ["ck"]
    assert named_by('CKPT_ARGS="--load base --save ck"', [], {}) == ["ck"]


TRAIN = """
last=$(ls -d ck/{pattern} 2> /dev/null | grep -o '[0-9]*' | sort -n | tail -1)
step=$(( ${{last:-0}} + 100 ))
mkdir -p ck/{name}; echo weights > ck/{name}/model.pt
{end}
"""


def trained(end, name="checkpoint-$step", pattern="checkpoint-*"):
    """A script that saves in its own way, and ends as `end` says."""
    return "# python train.py --save ck\n: python train.py --save ck\n" + TRAIN.format(
        end=end, name=name, pattern=pattern
    )


@pytest.mark.parametrize("end", ["exit 1", "exit 75", "kill -9 $$"])
def test_a_program_that_saves_in_its_own_way_goes_on(tmp_path, fake, end):
    chain = submitted(tmp_path, fake, trained(end))
    for number in range(1, 13):
        attempt(chain, fake, number)
    assert chain.state.state == "active"
    assert [each.step for each in chain.ends().values()] == [100 * number for number in range(1, 13)]
    assert not [each for each in fake.argv("scontrol") if each[0] == "update"]  # no pauses


def test_a_program_that_saves_the_same_again_does_not(tmp_path, fake):
    chain = submitted(tmp_path, fake, trained("rm -rf ck/checkpoint-200; exit 1", pattern="nothing"))
    for number in range(1, 5):
        attempt(chain, fake, number)
    assert chain.state.state == "stopped"
    assert "3 attempts in a row crashed with no new checkpoint" in chain.state.reason


def test_first_arguments_end_with_the_first_checkpoint_of_any_program(tmp_path, fake):
    chain = submitted(tmp_path, fake, 'echo "$@" >> seen\n' + trained("exit 1"), first_arguments=("--init",))
    attempt(chain, fake, 1)
    attempt(chain, fake, 2)
    assert (chain.folder.parent / "seen").read_text().splitlines() == ["--init", ""]


def test_long_attempts_of_which_nothing_is_known_are_no_crash_loop(tmp_path, fake):
    chain = submitted(tmp_path, fake, f"{sys.executable} -S -c 'raise SystemExit(1)'")
    for number in range(1, 6):
        clock = iter([NOW + 1000 * number, *[NOW + 1000 * number + 700.0] * 50])
        job = supervisor(chain, fake, number)
        job._clock = lambda clock=clock: next(clock)
        job.run()
    assert chain.state.state == "active"
    assert {each.committed for each in chain.ends().values()} == {None}


def test_a_pattern_that_matches_nothing_is_said(tmp_path, fake):
    chain = submitted(tmp_path, fake, "exit 1", progress=("nowhere/*.pt",))
    attempt(chain, fake, 1)
    assert chain.ends()[1].reason == "exit code 1; nothing new matches --progress nowhere/*.pt"
