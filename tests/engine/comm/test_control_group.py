"""What the ranks agree on by one all-reduce."""

import torch.distributed as dist

from ckptman.engine.comm.control_group import Channel, Contribution, RankFailed
from ckptman.errors import ConfigError
from tests.helpers.ranks import run_ranks


def agreements():
    channel, found = Channel(60), []
    rank = channel.rank
    sent = [0]
    real = dist.all_gather_object

    def counting(*arguments, **options):
        sent[0] += 1
        return real(*arguments, **options)

    dist.all_gather_object = counting
    try:
        met = channel.agree("save()", lambda: Contribution({"a": 1}, maxima=(rank, -rank), told=["metrics", rank]))
        found.append((met, sent[0]))
        found.append(
            channel.agree("save()", lambda: Contribution(f"value {rank}", told="x" * 5000 if not rank else None))
        )
        found.append(channel.agree("save()", lambda: Contribution(f"value {rank}", key="the same")))
        found.append(channel.agree("save()", lambda: None))
        for work in (lambda: 1 / rank, lambda: 1 / (1 - rank)):
            try:
                channel.agree("save()", lambda work=work: Contribution(work()))
            except RankFailed as failed:
                found.append((failed.failure.rank, type(failed.__cause__).__name__))
        try:
            channel.agree("save()" if rank else "restore()", lambda: None)
        except ConfigError as error:
            found.append(str(error))
    finally:
        dist.all_gather_object = real
        channel.close()
    return found


def test_ranks_agree():
    first, second = run_ranks(2, agreements)
    assert first[0] == ((None, (1, 0), ["metrics", 0]), 0), "no object was sent"
    assert first[1] == (["value 0", "value 1"], (), "x" * 5000)
    assert first[2] == first[3] == (None, (), None)
    assert (first[4], second[4]) == ((0, "ZeroDivisionError"), (0, "NoneType"))
    assert (first[5], second[5]) == ((1, "NoneType"), (1, "ZeroDivisionError"))
    assert first[6].startswith("rank 0 is in restore() and rank 1 in save(): every rank calls the same methods")
    assert first[:4] == second[:4]
    assert first[6] == second[6]


def test_one_rank_agrees_with_itself():
    met = Channel(60).agree("save()", lambda: Contribution("value", maxima=(3,), told="told"))
    assert met == (None, (3,), "told")
