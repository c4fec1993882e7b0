"""`ckptman plan`: that its numbers are those of the formulas, and what it advises."""

import json
import math
import re

import pytest

from ckptman.cli.app import main
from ckptman.forecast.goodput import Costs, best_interval_seconds, shares
from ckptman.forecast.save_costs import warning_seconds
from ckptman.policies.intervals import daly_interval_seconds

pytestmark = pytest.mark.usefixtures("forked")

SEVEN = ["plan", "--params", "7B", "--dtype", "bfloat16", "--moment-dtype", "float32", "--nodes", "4"]
MODELS = """
from torch import nn

def tuned():
    model = nn.Sequential(nn.Linear(20_000, 20_000), nn.Linear(1000, 8, bias=False))
    model[0].requires_grad_(False)
    return model

def lazy():
    return nn.Sequential(nn.LazyLinear(10), nn.Linear(10, 10))
"""


@pytest.fixture
def planned(capsys):
    def run(*arguments):
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_the_figures_of_the_practitioners(planned):
    made = planned(*SEVEN, "--mtbf", "8h")
    assert made["checkpoint"] == {"rule_bytes": 70e9, "tensors_bytes": 70e9}
    scratch, project = (each for each in made["tiers"] if each["name"] in ("scratch", "project"))
    assert scratch["save_seconds"] == 35  # 70 GB takes 35 s on tier 1
    assert project["save_seconds"] == 140  # and more than 2 min on tier 2
    assert made["memory"]["host_copy_of_a_node_bytes"] == 70e9 / 4
    assert planned("plan", "--params", "9e9")["checkpoint"] == {"rule_bytes": 180e9, "tensors_bytes": 108e9}


def test_the_scenario_is_echoed(planned):
    made = planned(*SEVEN, "--mtbf", "8h", "--queue", "1h", "--keep-last", "3", "--max-bytes", "1TB", "--copies", "3")
    assert made["model"]["title"] == "7,000,000,000 parameters in bfloat16"
    assert (made["nodes"], made["gpus_per_node"], made["blocking"]) == (4, 8, False)
    assert (made["init_seconds"], made["mtbf_seconds"], made["queue_seconds"]) == (1200, 28_800, 3600)
    assert made["retention"] == "(KeepLast(count=3)) & AtMost(bytes=1000000000000)"
    assert made["in_memory"]["copies"] == made["memory_tier"]["copies"] == 3


def test_each_number_of_a_tier_follows_from_the_others(planned):
    made = planned(*SEVEN, "--mtbf", "3h", "--init", "10min", "--blocking", "--tier", "a=2GB/s")
    (tier,) = made["tiers"]
    assert made["memory"] == {}  # no private copies
    assert tier["stall_seconds"] == tier["save_seconds"] == 35
    assert tier["restart_seconds"] == 600 + 35
    assert tier["interval_by_init_seconds"] == 4 * 635
    assert tier["interval_by_daly_seconds"] == daly_interval_seconds(35, 3 * 3600, 635)
    assert tier["interval_best_seconds"] == best_interval_seconds(35, 3 * 3600)
    assert tier["interval_seconds"] == min(900, tier["interval_best_seconds"])
    assert tier["goodput"] + tier["lost"] + tier["stalled"] + tier["restarting"] == pytest.approx(1)
    assert tier["lost_per_failure_seconds"] == pytest.approx(tier["interval_seconds"] / 2 + 35, rel=0.1)
    assert tier["warning_seconds"] == warning_seconds(35)


def test_failures_of_many_gpus_are_those_of_the_published_run(planned):
    made = planned("plan", "--params", "405B", "--nodes", "2048")
    assert made["failures"]["mtbf_seconds"] == pytest.approx(54 * 86400 / 419)
    made = planned("plan", "--params", "405B", "--nodes", "2048", "--rate", "rsc1")
    assert made["failures"]["mtbf_seconds"] / 3600 == pytest.approx(1.8, abs=0.01)  # as the paper projects


def test_rates_of_nodes_and_the_limit_of_a_file_system(planned):
    tiers = ["a=2GB/s", "b=2GB/s/node", "c=1GB/s/gpu", "d=2GB/s/node:5GB/s", "e=2GB/s:1GB/s"]
    made = planned(*SEVEN, *(f"--tier={each}" for each in tiers))
    assert [each["rate_bytes_per_second"] / 1e9 for each in made["tiers"]] == [2, 8, 32, 5, 1]


@pytest.mark.slow
def test_a_folder_is_measured(tmp_path, planned):
    (tier,) = planned(*SEVEN, "--tier", f"here={tmp_path}", "--explain")["tiers"]
    assert tier["rate_bytes_per_second"]["value"] > 1e6
    assert "measured in" in tier["rate_bytes_per_second"]["formula"]
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_this_folder(tmp_path, monkeypatch, planned, ends):
    (tmp_path / "my_models_of_a_plan.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    made = planned("plan", "--model", "my_models_of_a_plan:tuned", "--gpus", "1")
    assert (made["model"]["parameters"], made["model"]["frozen"]) == (8000, 400_020_000)
    assert made["checkpoint"]["tensors_bytes"] == 4 * (3 * 8000 + 400_020_000)
    assert made["checkpoint"]["files_bytes"] > made["checkpoint"]["tensors_bytes"]
    told = ends(2, "plan", "--model", "my_models_of_a_plan:lazy").err
    assert "0.weight has no shape before its first input" in told


def test_every_number_is_explained(planned, ends):
    explained = ends(0, *SEVEN, "--keep-last", "3", "--memory", "--explain").out.partition("\ncheckpoint\n")[2]
    for words in ("arXiv 2407.21783", "warning = 120 s: 1.5 x 35 s", "HKUST", "8.4 % came from switches and cables"):
        assert words in explained
    made = planned(*SEVEN, "--keep-last", "3", "--memory", "--explain")
    sections = [made[name] for name in ("checkpoint", "memory", "failures", "memory_tier")]
    sections += [*made["tiers"], *made["after_a_failure"]]
    figures = [each for section in sections for name, each in section.items() if name != "name"]
    assert len(figures) > 60
    assert all(each["formula"] for each in figures)
    assert explained.count(" = ") >= len(figures)


@pytest.mark.parametrize("more", [["--blocking"], ["--mtbf", "2h"], ["--staging", "1MB/s"]])
def test_formulas_give_their_numbers(more, planned):
    """Those in symbols, worked out as they are written."""
    (tier,) = planned(*SEVEN, "--mtbf", "9h", "--tier", "a=1GB/s", *more, "--explain")["tiers"]
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
    if "--staging" in more:
        assert value["stall_seconds"] == value["save_seconds"]
        assert "no longer than the save, 70 s" in tier["stall_seconds"]["formula"]


def test_what_is_said_of_slow_and_of_lost_places(ends):
    out = ends(0, "plan", "--params", "405B", "--nodes", "64", "--tier", "nfs=0.5GB/s", "--tier", "shm=4GB/s").out
    assert "nfs: a save takes 2.7 h, longer than the bound of 15 min" in out
    assert "shm: memory of a node, and gone with it" in out
    assert "save to nfs: every 9,720 s" in out
    out = ends(0, *SEVEN, "--keep-last", "9", "--max-bytes", "300GB").out
    assert "350 GB are there while a save is under way, and --max-bytes is 300 GB" in out


def test_a_bound_that_costs_more_than_a_percent_is_named(planned, ends):
    slow = ["plan", "--params", "70e9", "--nodes", "8", "--tier", "a=2GB/s", "--mtbf", "100h"]
    (tier,) = planned(*slow, "--blocking")["tiers"]
    costs = Costs(tier["stall_seconds"], tier["save_seconds"], tier["restart_seconds"])
    assert tier["goodput_best"] == shares(tier["interval_best_seconds"], costs, 360_000).good
    told = ends(0, *slow, "--blocking").out
    assert "a: the bound costs more than it is worth: 53.08 % of the time is training that lasts at 15 min" in told
    assert "94.82 % at the best interval, 4.87 h: save in the background (without --blocking), or take " in told
    assert f"EverySeconds({math.ceil(tier['interval_best_seconds'])})" in told
    for arguments in (slow, [*slow, "--blocking", "--mtbf", "5min"]):  # the stall is short, or the bound does not hold
        assert "the bound costs" not in ends(0, *arguments).out


def test_any_count_of_a_rule_is_planned_and_saves_are_no_more_frequent_than_steps(planned):
    huge = f"1{320 * '0'}"
    for rule in ("--keep-last", "--keep-every", "--keep-best=loss", "--keep-daily", "--keep-monthly", "--keep-steps"):
        arguments = [f"{rule}:{huge}"] if "best" in rule else [rule, huge]
        made = planned(*SEVEN, *arguments, "--step", "1h")
        assert all(1 <= tier["kept"] <= tier["saves"] == 720 for tier in made["tiers"])


@pytest.mark.parametrize("arguments", [["--mtbf", "1s"], ["--tier", "a=1B/s"], ["--mtbf", "9999d", "--length", "1s"]])
def test_what_is_beyond_all_measure_is_still_planned(arguments, planned, ends):
    made = planned(*SEVEN, "--keep-last", "2", *arguments)
    assert all(0 <= tier["goodput"] <= 1 and tier["lost_per_failure_seconds"] >= 0 for tier in made["tiers"])
    told = ends(0, *SEVEN, *arguments).out
    assert ("a restart takes longer than the time between failures" in told) == ("9999d" not in arguments)


LARGE = ["plan", "--params", "70e9", "--nodes", "64", "--tier", "a=10GB/s", "--mtbf", "8h", "--queue", "30min"]


def test_memory_is_planned_if_any_of_its_options_is_given(planned):
    without = planned(*LARGE)
    assert "memory_tier" not in without
    assert without["tiers"][0]["restart_seconds"] == 1800 + 1200 + 84
    for option in ("memory", "memory-interval=1min", "copies=1", "exchange=1GB/s", "host-memory=1TB", "survived=0"):
        made = planned(*LARGE, f"--{option}")
        assert [each["name"] for each in made["after_a_failure"]] == ["disk alone", "with memory", "restarts in place"]
        assert made["tiers"] == without["tiers"]
    assert made["after_a_failure"][2]["goodput"] <= made["after_a_failure"][0]["goodput"]
    made = planned(*LARGE, "--memory-interval", "20steps", "--step", "3s")
    assert made["memory_tier"]["interval_seconds"] == 60


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--host-memory 100GB", "65.62 GB of 100 GB; /dev/shm has half of that, unless"),
        ("--host-memory 64GB", "65.62 GB, which does not fit in 64 GB"),
        ("--memory", "memory of a node for it: 65.62 GB\n"),
        ("--copies 3", "survives the loss of any 2 nodes"),
        ("--memory --nodes 1", "survives that of processes alone"),
        ("--memory --explain", "of a node = 65.62 GB: (3 slots + 2 x 1 received) x 8 ranks x 1.641 GB"),
        ("--memory --explain", "restart = 52.8 min: flush 84 s + queue 30 min + init 20 min + load 84 s"),
    ],
)
def test_what_is_said_of_memory(options, told, ends):
    assert told in ends(0, *LARGE, *options.split()).out


def test_memory_pays_if_saves_to_disk_take_half_an_hour(ends):
    assert "with memory alone" not in ends(0, *[each.replace("10GB/s", "0.5GB/s") for each in LARGE], "--memory").out
