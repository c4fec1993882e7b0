"""Fuzzing of every parser: bytes that were good and are changed, JSON made by hypothesis, and the corpus: inputs that
reached something new when atheris, guided by coverage, tried the same targets.
"""

import json
import traceback
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as some

from tests.faults.fuzz_targets import REFUSALS, TARGETS, seeds_of, stage
from tests.faults.limits import in_child, limit
from tests.faults.tally import Tally

CORPUS = Path(__file__).with_name("corpus")
MEMORY_BYTES = 1024 * 1024 * 1024
SECONDS = 10.0
PART_SECONDS = 900.0
OF_JSON = ("manifest", "index", "values", "plain_value", "verified", "outcome")
"""Targets that are given JSON."""
INTERESTING = (
    *(b"", b"\0", b"\xff" * 8, b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}"),
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000),
)


def run(tally):
    """Every target, in a process with little memory."""
    for name in TARGETS:
        end = in_child(partial(_fuzz, name, tally.seed, tally.count(1500)), PART_SECONDS, MEMORY_BYTES)
        if end.value is None:
            with tally.fault(f"{name}: {end.said[-300:]}", name):
                tally.fail("hang" if end.hung else "other", f"the fuzzer itself ended: {end.error} {end.status}")
            continue
        other = Tally.from_dict(end.value)
        tally.injected += other.injected
        tally.refused += other.refused
        tally.harmless += other.harmless
        tally.failures += other.failures
        tally.described += other.described
        tally.parts[name] += other.injected


def _fuzz(name, number, count):
    tally = Tally(f"fuzz {name}", number)
    with stage() as there:
        seeds = seeds_of(there)[name]
        kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
        for at, data in enumerate([*seeds, *kept]):
            one(tally, there, TARGETS[name], data, f"corpus {at}")
        for at in range(count):
            data = change(tally.dice.choice([*seeds, *kept]), tally.dice)
            one(tally, there, TARGETS[name], data, f"change {at}")
        if name in OF_JSON:
            by_hypothesis(tally, there, TARGETS[name], seeds[0], count // 3)
    return tally.as_dict()


def one(tally, there, target, data, what):
    """One input. What is neither taken nor refused is told with the bytes that did it."""
    with tally.fault(f"{what}: {data[:200]!r}"), limit(SECONDS):
        try:
            target(there, data)
        except REFUSALS:
            tally.refused += 1
        except TimeoutError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.fail("unclear", f"{type(error).__name__}: {str(error)[:300]} in {where.filename}:{where.lineno}")
        else:
            tally.survive()


def by_hypothesis(tally, there, target, good, count):
    """JSON of any form, and good JSON with a part of any form."""
    is_open = target is TARGETS["manifest"]  # its last field, the digest, is added by the target
    known = json.loads(good + b"\n}" if is_open else good)

    @seed(tally.dice.randrange(2**32))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=some.data())
    def any_json(data):
        made = data.draw(JSON) if not isinstance(known, dict) else replaced(known, data.draw)
        text = json.dumps(made).encode()
        one(tally, there, target, text[:-1] if is_open else text, "hypothesis")

    any_json()


def replaced(known, draw):
    """A copy of good JSON in which one part, however deep, is another."""
    made = json.loads(json.dumps(known))
    here = made
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return made
        key = draw(some.sampled_from(keys))
        if isinstance(here[key], (dict, list)) and here[key] and draw(some.booleans()):
            here = here[key]
            continue
        here[key] = draw(JSON)
        return made


_NUMBERS = some.one_of(some.integers(), some.sampled_from([2**31, 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30]))
_LEAVES = some.one_of(some.none(), some.booleans(), _NUMBERS, some.floats(), some.text(max_size=20))
_KEYS = some.one_of(some.sampled_from(["~", "v", "bytes", "digest", "file", "shape", "count"]), some.text(max_size=5))
_KINDS = some.sampled_from(
    ["int", "float", "complex", "dict", "OrderedDict", "Counter", "tuple", "set", "bytes", "tensor", "numpy"]
)
JSON = some.recursive(
    _LEAVES,
    lambda inner: some.one_of(
        some.lists(inner, max_size=4),
        some.dictionaries(_KEYS, inner, max_size=4),
        some.fixed_dictionaries({"~": _KINDS, "v": inner}),
    ),
    max_leaves=12,
)


def change(data, dice):
    """Good bytes, changed in one to four ways."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        dice.choice(_WAYS)(made, dice)
    return bytes(made[: 1 << 20])


def _flip(data, dice):
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _byte(data, dice):
    if data:
        data[dice.randrange(len(data))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])


def _number(data, dice):
    size = dice.choice([1, 2, 4, 8])
    at = dice.randrange(max(1, len(data) - size))
    value = dice.choice([0, 1, -1, 2 ** (8 * size - 1) - 1, -(2 ** (8 * size - 1)), dice.randrange(256) % 128])
    data[at : at + size] = value.to_bytes(size, "little", signed=True)


def _cut(data, dice):
    low, high = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    del data[low : min(high, low + dice.choice([1, 8, 64, 1 << 20]))]


def _insert(data, dice):
    at = dice.randrange(len(data) + 1)
    low = dice.randrange(len(data) + 1)
    data[at:at] = dice.choice([dice.choice(INTERESTING), bytes(data[low : low + dice.choice([1, 8, 64])])])


_WAYS = (_flip, _byte, _number, _cut, _insert)
