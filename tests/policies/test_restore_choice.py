"""What a restore takes, over all small roots."""

from dataclasses import dataclass
from itertools import product

import pytest

from ckptman.policies.restore_choice import choose


@dataclass(frozen=True)
class Saved:
    step: int
    complete: bool = True
    nonfinite_reason: str = ""


KINDS = ["good", "incomplete", "nonfinite", "suspect", "both"]


def chosen(kinds, **options):
    """The choice in a root with these checkpoints, the newest first; its lists as places in `kinds`."""
    found = [
        Saved(place, kind != "incomplete", "model.weight" if kind in ("nonfinite", "both") else "")
        for place, kind in enumerate(kinds)
    ]
    suspects = {place: "why" for place, kind in enumerate(kinds) if kind in ("suspect", "both")}
    return choose(found, suspects, **options)


def places(kinds, *wanted):
    return [place for place, kind in enumerate(kinds) if kind in wanted]


def steps(entries):
    return [each.step for each in entries]


@pytest.mark.parametrize("size", range(5))
def test_the_newest_that_is_complete_finite_and_no_suspect(size):
    for kinds in product(KINDS, repeat=size):
        choice = chosen(kinds)
        has_finite = bool(places(kinds, "good", "suspect"))
        assert choice.only_nonfinite == (not has_finite and bool(places(kinds, "nonfinite", "both")))
        assert steps(choice.tried) == places(kinds, "good" if has_finite else "nonfinite")
        # A suspect could be what is wanted instead: nobody goes back to NaN without having been asked.
        wants_last_resort = has_finite and not places(kinds, "suspect")
        assert steps(choice.last_resort) == (places(kinds, "nonfinite") if wants_last_resort else [])
        assert choice.all == choice.tried + choice.last_resort
        assert choice.only_suspects == (not choice.tried and any(kind != "incomplete" for kind in kinds))


@pytest.mark.parametrize("size", range(5))
def test_what_is_passed_over_is_newer_than_what_is_taken(size):
    for kinds in product(KINDS, repeat=size):
        choice = chosen(kinds)
        taken = choice.tried[0].step if choice.tried else len(kinds)
        before = kinds[:taken]
        if choice.only_nonfinite:
            assert choice.nonfinite == []
            assert steps(choice.suspects) == places(before, "both")
        else:
            first_finite = min(places(kinds, "good", "suspect"), default=len(kinds))
            assert steps(choice.nonfinite) == places(kinds[:first_finite], "nonfinite", "both")
            assert steps(choice.suspects) == places(before, "suspect")


@pytest.mark.parametrize("size", range(5))
def test_without_a_wish_for_finite_ones_only_suspects_are_passed_over(size):
    for kinds in product(KINDS, repeat=size):
        choice = chosen(kinds, prefer_finite=False)
        assert (choice.last_resort, choice.nonfinite, choice.only_nonfinite) == ([], [], False)
        assert steps(choice.tried) == places(kinds, "good", "nonfinite")
