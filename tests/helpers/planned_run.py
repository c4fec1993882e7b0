"""A run to plan, of which a test says what matters to it."""

from ckptman.forecast.scenario import Model, Scenario, Tier

GB = 10**9
TIER = Tier("scratch", 1e9, 2e9, "1 GB/s")
MODEL = Model("a model", 64 * GB, 64 * GB, 0)
"""Of 64 GB: 2 GB for each of 32 ranks."""


def scenario(model=MODEL, **changes):
    given = {
        "nodes": 4,
        "gpus_per_node": 8,
        "tiers": (TIER,),
        "staging_bytes_per_second": 10e9,
        "blocking": False,
        "init_seconds": 600.0,
        "factor": 4.0,
        "notice_seconds": 0.0,
        "queue_seconds": 0.0,
        "mtbf_seconds": 4 * 3600.0,
        "run_seconds": 30 * 86_400.0,
        "step_seconds": None,
        "retention": None,
        "in_memory": None,
    }
    return Scenario(model=model, **{**given, **changes})
