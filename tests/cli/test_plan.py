"""`ckptman plan`: what it says, and that its numbers are those of the formulas; and what it refuses."""

import json
import math
import re
from pathlib import Path

import pytest

from ckptman.cli.app import main
from ckptman.forecast.goodput import Costs, best_interval_seconds, shares
from ckptman.forecast.save_costs import warning_seconds
from ckptman.policies.intervals import daly_interval_seconds

pytestmark = pytest.mark.usefixtures("forked")

SEVEN = ["plan", "--params", "7B", "--dtype", "bfloat16", "--moment-dtype", "float32", "--nodes", "4"]
CONFIG = """
[model]
dim = 64
layers = 2
heads = 4
vocab_size = 512
[data]
path = "tokens"
sequence_tokens = 128
global_batch = 32
micro_batch = 2
[run]
steps = 100
[checkpoint]
root = "ck"
keep_last = 2
"""
MODELS = """
from torch import nn

def good():
    return nn.Linear(1000, 1000)

def tuned():
    model = nn.Sequential(nn.Linear(20_000, 20_000), nn.Linear(1000, 8, bias=False))
    model[0].requires_grad_(False)
    return model

def lazy():
    return nn.Sequential(nn.LazyLinear(10), nn.Linear(10, 10))
"""


def planned(arguments, capsys):
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(arguments, capsys):
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    return told.err


def test_the_figures_of_the_practitioners(capsys):
    made = planned([*SEVEN, "--mtbf", "8h"], capsys)
    assert made["checkpoint"] == {"rule_bytes": 70e9, "tensors_bytes": 70e9}
    assert made["mesh"] == {"gpus": 32, "replicate": 4, "shard": 8}
    scratch, project = (each for each in made["tiers"] if each["name"] in ("scratch", "project"))
    assert scratch["save_seconds"] == 35  # 70 GB takes 35 s on tier 1
    assert project["save_seconds"] == 140  # and more than 2 min on tier 2
    assert made["memory"]["parameters_bytes"] == 7e9 * 2 / 8
    assert made["memory"]["optimizer_bytes"] == 7e9 * 8 / 8
    assert made["memory"]["total_checkpointed_bytes"] < made["memory"]["total_plain_bytes"]
    assert planned(["plan", "--params", "9e9"], capsys)["checkpoint"]["rule_bytes"] == 180e9


def test_each_number_of_a_tier_follows_from_the_others(capsys):
    made = planned([*SEVEN, "--mtbf", "3h", "--init", "10min", "--blocking", "--tier", "a=2GB/s"], capsys)
    (tier,) = made["tiers"]
    assert made["failures"]["mtbf_seconds"] == 3 * 3600
    assert tier["stall_seconds"] == tier["save_seconds"] == 35
    assert tier["restart_seconds"] == 600 + 35
    assert tier["interval_by_init_seconds"] == 4 * 635
    assert tier["interval_by_daly_seconds"] == daly_interval_seconds(35, 3 * 3600, 635)
    assert tier["interval_best_seconds"] == best_interval_seconds(35, 3 * 3600)
    assert tier["interval_seconds"] == min(900, tier["interval_best_seconds"])
    assert tier["goodput"] + tier["lost"] + tier["stalled"] + tier["restarting"] == pytest.approx(1)
    assert tier["lost_per_failure_seconds"] == pytest.approx(tier["interval_seconds"] / 2 + 35, rel=0.1)
    assert tier["warning_seconds"] == warning_seconds(35)


def test_failures_of_many_gpus_are_those_of_the_published_run(capsys):
    made = planned(["plan", "--params", "405B", "--nodes", "2048"], capsys)
    assert made["failures"]["mtbf_seconds"] == pytest.approx(54 * 86400 / 419)
    made = planned(["plan", "--params", "405B", "--nodes", "2048", "--rate", "rsc1"], capsys)
    assert made["failures"]["mtbf_seconds"] / 3600 == pytest.approx(1.8, abs=0.01)  # as the paper projects


@pytest.mark.parametrize(("rules", "kept"), [([], 2880), (["--keep-last", "3", "--keep-best", "accuracy:2:max"], 5)])
def test_disk_is_what_the_rules_keep_and_what_lies_beside_it(rules, kept, capsys):
    (tier,) = planned([*SEVEN, "--tier", "a=2GB/s", *rules], capsys)["tiers"]
    assert (tier["saves"], tier["interval_seconds"], tier["kept"]) == (2880, 900, kept)
    # One that is being saved, the one that the run went on from, and the newest that was verified.
    assert tier["disk_bytes"] == (kept + 3 * bool(rules)) * 70e9


def test_rates_of_nodes_and_the_limit_of_a_file_system(capsys):
    tiers = ["a=2GB/s", "b=2GB/s/node", "c=1GB/s/gpu", "d=2GB/s/node:5GB/s", "e=2GB/s:1GB/s"]
    made = planned([*SEVEN, *(f"--tier={each}" for each in tiers)], capsys)
    rates = [each["rate_bytes_per_second"] / 1e9 for each in made["tiers"]]
    assert rates == [2, 8, 32, 5, 1]


@pytest.mark.slow
def test_a_folder_is_measured(tmp_path, capsys):
    (tier,) = planned([*SEVEN, "--tier", f"here={tmp_path}", "--explain"], capsys)["tiers"]
    assert tier["rate_bytes_per_second"]["value"] > 1e6
    assert "measured in" in tier["rate_bytes_per_second"]["source"]
    assert list(tmp_path.iterdir()) == []


def test_a_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    made = planned(["plan", "--config", "run.toml", "--gpus", "4"], capsys)
    assert not made["model"]["shape_is_assumed"]
    assert made["checkpoint"]["tensors_bytes"] > 12 * made["model"]["parameters"]
    assert made["checkpoint"]["files_bytes"] > made["checkpoint"]["data_files_bytes"]
    assert made["memory"]["gradients_bytes"] == 4 * made["model"]["parameters"]  # micro-batches are accumulated
    assert made["tiers"][0]["kept"] == 2
    assert "memory_tier" not in made
    in_memory = ["--set", "checkpoint.memory=true", "--set", "checkpoint.memory_copies=3", "--nodes", "4"]
    taken = planned(["plan", "--config", "run.toml", "--gpus", "4", *in_memory], capsys)["memory_tier"]
    assert taken["copies"] == 3
    steps = ["plan", "--config", "run.toml", *in_memory, "--set", "checkpoint.memory_steps=20"]
    assert "go by steps, EverySteps(steps=20): say what a step takes" in refused(steps, capsys)
    assert planned([*steps, "--step", "2s"], capsys)["memory_tier"]["interval_seconds"] == 40
    assert planned([*steps, "--memory-interval", "1min"], capsys)["memory_tier"]["interval_seconds"] == 60
    wider = planned(["plan", "--config", "run.toml", "--gpus", "4", "--set", "model.dim=128"], capsys)
    assert wider["model"]["parameters"] > made["model"]["parameters"]
    assert wider["memory"]["parameters_bytes"] < wider["memory"]["gradients_bytes"]
    message = refused(["plan", "--config", "run.toml", "--set", "model.dim=65"], capsys)
    assert "model.dim: 65 is not a multiple" in message
    Path("run.toml").write_text(CONFIG.replace("vocab_size = 512", ""))
    assert "--set model.vocab_size=N" in refused(["plan", "--config", "run.toml"], capsys)
    huge = f"1{320 * '0'}"
    for key in ("model.dim", "model.ffn_dim", "model.layers", "data.sequence_tokens", "data.micro_batch"):
        changed = ["plan", "--config", "run.toml", "--set", "model.vocab_size=9", "--set", f"{key}={huge}"]
        assert f"{key}: at most " in refused([*changed, "--set=model.heads=2", "--set=model.kv_heads=1"], capsys)
    assert ", at most 100, not 10000000" in refused(["plan", "--config", "run.toml", "--moments", "10000000"], capsys)
    assert "is in the configuration" in refused(["plan", "--config", "run.toml", "--layers", "3"], capsys)


def test_a_model_of_this_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models_of_a_plan.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    made = planned(["plan", "--model", "my_models_of_a_plan:good", "--gpus", "1"], capsys)
    assert made["model"]["parameters"] == 1_001_000
    assert made["checkpoint"]["tensors_bytes"] == 3 * 4 * 1_001_000 + 2 * 4
    tuned = planned(["plan", "--model", "my_models_of_a_plan:tuned", "--gpus", "1"], capsys)
    assert (tuned["model"]["parameters"], tuned["model"]["frozen"]) == (8000, 400_020_000)
    assert tuned["memory"]["parameters_bytes"] == 4 * (8000 + 400_020_000)
    assert tuned["memory"]["gradients_bytes"] == 4 * 8000
    assert tuned["model"]["dim"] > 1000  # the shape is that of all parameters
    message = refused(["plan", "--model", "my_models_of_a_plan:lazy"], capsys)
    assert "0.weight has no shape before its first input" in message


def test_every_number_is_explained(capsys, ends):
    out = ends(0, *SEVEN, "--keep-last", "3", "--explain", "--gpu-memory", "80GB").out
    table, _, explained = out.partition("\ncheckpoint\n")
    assert "without activation checkpointing it fits in 80 GB" in table
    for words in (
        "rule = 70 GB: 5 x 7,000,000,000 parameters x 2 B",
        "save = 35 s: 70 GB / 2 GB/s",
        "arXiv 2407.21783",
        "419 unexpected interruptions in 54 days on 16,384 GPUs",
        "warning = 120 s: 1.5 x 35 s",
        "HKUST",
    ):
        assert words in explained
    made = planned([*SEVEN, "--keep-last", "3", "--explain"], capsys)
    sections = [made["checkpoint"], made["memory"], made["failures"], *made["tiers"]]
    figures = [each for section in sections for name, each in section.items() if name != "name"]
    assert len(figures) > 60
    assert all(each["formula"] for each in figures)
    assert explained.count(" = ") >= len(figures)


def test_formulas_give_their_numbers(capsys):
    """Those that are told in symbols, worked out as they are written."""
    for more in (["--blocking"], ["--mtbf", "2h"], ["--staging", "1MB/s"]):
        (tier,) = planned([*SEVEN, "--mtbf", "9h", "--tier", "a=1GB/s", *more, "--explain"], capsys)["tiers"]
        value = {name: each["value"] for name, each in tier.items() if name != "name"}
        known = {"T": value["interval_seconds"], "S": value["stall_seconds"], "D": value["save_seconds"]}
        known |= {"R": value["restart_seconds"], "M": 7200 if "2h" in more else 9 * 3600}
        for name in ("lost_per_failure_seconds", "lost", "stalled", "restarting", "goodput"):
            formula, _, rest = tier[name]["formula"].partition(";")
            parts = {key: known_as for key, _, known_as in (each.strip().partition(" = ") for each in rest.split(";"))}
            for key in ("E", "B"):
                formula = re.sub(rf"\b{key}\b", f"({parts.get(key, key)})", formula)
            formula = re.sub(r"e\^(\([^()]*\))", r"exp(\1)", formula)
            formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
            assert eval(formula, {"exp": math.exp}, known) == pytest.approx(value[name], rel=1e-9), tier[name]
    assert value["stall_seconds"] == value["save_seconds"]
    assert "no longer than the save, 70 s" in tier["stall_seconds"]["formula"]


def test_a_shape_says_what_was_given(capsys):
    for given, told in (
        ([], "shapes of Llama 2 and 3"),
        (["--dim", "4096"], "dim as given, layers from 12 x layers x dim^2 parameters"),
        (["--layers", "32"], "layers as given, dim from 12 x layers x dim^2 parameters"),
        (["--dim", "4096", "--layers", "32"], "dim and layers as given"),
    ):
        source = planned([*SEVEN, *given, "--explain"], capsys)["memory"]["activations_bytes"]["source"]
        assert source.startswith(told)
        assert ("128 x layers" in source) == (not given)


def test_what_is_said_of_slow_and_of_lost_places(ends):
    out = ends(0, "plan", "--params", "405B", "--nodes", "64", "--tier", "nfs=0.5GB/s", "--tier", "shm=4GB/s").out
    assert "nfs: a save takes 2.7 h, longer than the bound of 15 min" in out
    assert "shm: memory of a node, and gone with it" in out
    assert "save to nfs: every 9,720 s" in out


def test_a_bound_that_costs_more_than_a_percent_is_named(capsys, ends):
    slow = ["plan", "--params", "70e9", "--nodes", "8", "--tier", "a=2GB/s", "--mtbf", "100h"]
    (tier,) = planned([*slow, "--blocking"], capsys)["tiers"]
    costs = Costs(tier["stall_seconds"], tier["save_seconds"], tier["restart_seconds"])
    assert tier["goodput_best"] == shares(tier["interval_best_seconds"], costs, 360_000).good
    assert tier["goodput"] < 0.6 < 0.94 < tier["goodput_best"]
    told = ends(0, *slow, "--blocking").out
    assert "a: the bound costs more than it is worth: 53.08 % of the time is training that lasts at 15 min" in told
    assert "94.82 % at the best interval, 4.87 h: save in the background (without --blocking), or take " in told
    assert f"EverySeconds({math.ceil(tier['interval_best_seconds'])})" in told
    for arguments in (slow, [*slow, "--blocking", "--mtbf", "5min"]):  # the stall is short, or the bound does not hold
        assert main(arguments) == 0
        assert "the bound costs" not in capsys.readouterr().out


def test_any_count_of_a_rule_is_planned(capsys):
    huge = f"1{320 * '0'}"
    for rule in ("--keep-last", "--keep-every", "--keep-best=loss", "--keep-daily", "--keep-monthly", "--keep-steps"):
        arguments = [f"{rule}:{huge}"] if "best" in rule else [rule, huge]
        made = planned([*SEVEN, *arguments, "--step", "3s"], capsys)
        assert all(1 <= tier["kept"] <= tier["saves"] for tier in made["tiers"])


@pytest.mark.parametrize("arguments", [["--mtbf", "1s"], ["--tier", "a=1B/s"], ["--mtbf", "9999d", "--length", "1s"]])
def test_what_is_beyond_all_measure_is_still_planned(arguments, capsys, ends):
    made = planned([*SEVEN, "--keep-last", "2", *arguments], capsys)
    assert all(0 <= tier["goodput"] <= 1 and tier["lost_per_failure_seconds"] >= 0 for tier in made["tiers"])
    told = ends(0, *SEVEN, *arguments).out
    assert ("a restart takes longer than it is from one failure to the next" in told) == ("9999d" not in arguments)


LARGE = ["plan", "--params", "70e9", "--nodes", "64", "--tier", "a=10GB/s", "--mtbf", "8h", "--queue", "30min"]


def test_memory_is_planned_where_any_of_its_options_is_given(capsys):
    without = planned(LARGE, capsys)
    assert "memory_tier" not in without
    assert without["tiers"][0]["restart_seconds"] == 1800 + 1200 + 84
    for option in ("memory", "memory-interval=1min", "copies=1", "exchange=1GB/s", "host-memory=1TB", "survived=0"):
        made = planned([*LARGE, f"--{option}"], capsys)
        assert [each["name"] for each in made["after_a_failure"]] == ["disk alone", "with memory", "restarts in place"]
        assert {name: value for name, value in made.items() if name in without} == without
    assert made["memory_tier"]["survived"] == 0
    assert made["after_a_failure"][2]["goodput"] <= made["after_a_failure"][0]["goodput"]


def test_what_is_said_of_memory(capsys, ends):
    def told(*options):
        return ends(0, *LARGE, *options).out

    assert "after a failure" not in told()
    assert "memory of a node for it: 65.62 GB of 1 TB\n" in told("--host-memory", "1TB")
    assert "65.62 GB of 100 GB; /dev/shm has half of that, unless" in told("--host-memory", "100GB")
    assert "65.62 GB, which does not fit in 64 GB" in told("--host-memory", "64GB")
    assert "memory of a node for it: 65.62 GB\n" in told("--memory")
    assert "survives the loss of any one node: 90 % of the failures" in told("--memory")
    assert "survives the loss of any 2 nodes" in told("--copies", "3")
    assert "survives that of processes alone" in told("--copies", "1")
    assert "survives that of processes alone" in told("--memory", "--nodes", "1")
    assert "with memory alone less of the time is training that lasts" in told("--memory")
    assert main([each.replace("10GB/s", "0.5GB/s") for each in LARGE] + ["--memory"]) == 0  # saves take half an hour
    assert "with memory alone" not in capsys.readouterr().out
    explained = told("--memory", "--explain")
    assert "of a node = 65.62 GB: (3 slots + 2 x 1 received) x 8 ranks x 1.641 GB" in explained
    assert "restart = 52.8 min: flush 84 s + queue 30 min + init 20 min + load 84 s" in explained
    assert "rate assumed, TCP over" in explained
    assert "8.4 % came from switches and cables" in explained
