"""What was injected, what came of it, and whether each error told what went wrong and what to do."""

import json
import math
import random
import re
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptman.errors import CkptmanError

FAILURES = {
    "lost": "committed checkpoints lost",
    "wrong": "wrong bytes loaded",
    "hang": "hangs",
    "unclear": "unclear errors",
    "code": "foreign code run",
    "other": "other promises broken",
}
KEPT = 200
"""Failures that are described, one of each sort."""

CAUSE = re.compile(
    r"[\w.-]*/[^\s:]|\branks? \d|\banother rank\b|\bstep \d|manifest\.json|index\.json|\.distcp|\.metadata"
    r"|\bthe (?:state|value|root)\b"
)
"""What an error is about: a path, a rank, a step, a file or a value of the checkpoint."""
REMEDY = re.compile(
    r"(?:restore|load|use|name) (?:an|another) |ckptman (?:verify|list|show|prune)|remove (?:the cause|it\b|their)"
    r"|start the run again|correct (?:it\b|the )|check (?:the |its |that |permissions|mount|it )|make room"
    r"|stop that one|let it end|make it a DTensor"
    r"|upgrade ckptman|build the model|move it away|bring (?:it|them|one|this one) back|load something else"
    r"|save (?:it flatter|plain|under another)|name (?:the folder|an older)|load it (?:by|on)|ask for more"
    r"|such as step-|leave the value out|see whether (?:it|the file system) is still mounted",
    re.IGNORECASE,
)
"""What to do: one of the things that the messages of ckptman say."""


def flaw_of_text(text):
    """What an error message lacks, or None: it has to name what it is about, and say what to do."""
    if not CAUSE.search(text):
        return "names no path, rank, step or value"
    if not REMEDY.search(text):
        return "says nothing of what to do"
    return None


def flaw_of(error):
    """The same for an error that a caller of ckptman gets."""
    if not isinstance(error, CkptmanError):
        return f"{type(error).__name__} is no error of ckptman"
    return flaw_of_text(str(error))


def pattern_of(text):
    """A message without what differs from case to case: paths, numbers, digests, lists of names."""
    text = re.sub(r"(?:/[\w.+~-]+)+", lambda found: "PATH/" + found[0].rpartition("/")[2], text)
    text = re.sub(r"\b[0-9a-f]{8,}\b", "H", text)
    text = re.sub(r"\d+", "N", text)
    return " ".join(text.split())[:240]


@dataclass
class Tally:
    """Counts of one kind of fault. `dice` are seeded: the same seed injects the same faults.

    `share`: how much of all there is to do, up to 1. `mutant`: how the library is broken (see `mutants`), mostly not.
    `refused`: an error came, and nothing else. `harmless`: nothing was lost and no error was due.
    """

    kind: str
    seed: int
    share: float = 1.0
    mutant: str = ""
    trace: Path | None = None
    injected: int = 0
    refused: int = 0
    harmless: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    described: list[str] = field(default_factory=list)
    texts: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self):
        self.dice = random.Random(f"{self.kind} {self.seed}")
        self._case = ""
        self._known = set()

    def some(self, all_of_them):
        """All of them, or this tally's share, chosen by chance; at least one."""
        every = list(all_of_them)
        count = min(len(every), math.ceil(len(every) * self.share))
        return [every[at] for at in sorted(self.dice.sample(range(len(every)), count))]

    def count(self, number, least=1):
        """This tally's share of a number."""
        return min(number, max(least, round(number * self.share)))

    def takes(self):
        """Whether the next one is in this tally's share."""
        return self.dice.random() < self.share

    @contextmanager
    def fault(self, case, part=""):
        """One injected fault; what is told inside is about it. An exception that leaves the block is a failure."""
        self._case = case
        self.injected += 1
        self.parts[part or self.kind] += 1
        if self.trace is not None:
            self.trace.write_text(f"{case}\n")
        try:
            yield
        except TimeoutError as error:
            self.fail("hang", str(error))
        except Exception as error:
            self.fail("other", f"{type(error).__name__}: {error}")

    def refuse(self, error):
        """The fault was met with an error: is it a clear one?"""
        self.refused += 1
        self.hear(str(error), flaw_of(error))

    def hear(self, text, flaw=False):
        """A message that a user gets."""
        self.texts[pattern_of(text)] += 1
        flaw = flaw_of_text(text) if flaw is False else flaw
        if flaw is not None:
            self.fail("unclear", f"{flaw}: {text}")

    def survive(self):
        """The fault did no harm."""
        self.harmless += 1

    def fail(self, failure, what):
        """A promise was broken."""
        self.failures[failure] += 1
        known = f"{failure} {pattern_of(what)[:120]}"
        if known not in self._known and len(self._known) < KEPT:
            self._known.add(known)
            self.described.append(f"{failure}: {self.kind}, {self._case}: {what}"[:1000])

    def check(self, holds, failure, what):
        """Fail unless something holds."""
        if not holds:
            self.fail(failure, what)
        return bool(holds)

    def skip(self, what):
        """A part that this machine cannot do."""
        self.skipped.append(what)

    @property
    def good(self):
        return not self.failures

    def as_dict(self):
        """For `--out` and for the process that asked."""
        names = ("kind", "seed", "share", "injected", "refused", "harmless", "described", "skipped", "notes", "seconds")
        counts = {name: dict(getattr(self, name)) for name in ("failures", "texts", "parts")}
        return {name: getattr(self, name) for name in names} | counts

    @classmethod
    def from_dict(cls, data):
        """What `as_dict` gave."""
        tally = cls(data["kind"], data["seed"])
        for name, value in data.items():
            setattr(tally, name, Counter(value) if isinstance(value, dict) else value)
        return tally


def seed_of_commit():
    """By which tests draw what they do of many cases: another part with each commit."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=False)
    return int(done.stdout[:8] or b"0", 16)


@contextmanager
def timed(tally):
    """Add the time that the block takes."""
    begun = time.monotonic()
    try:
        yield
    finally:
        tally.seconds += time.monotonic() - begun


def table(tallies, titles):
    """The result for people and for docs/faults.md: markdown."""
    headers = ["kind of fault", "injected", "refused", "harmless", *(FAILURES[each] for each in FAILURES), "seconds"]
    rows = [_row(titles.get(each.kind, each.kind), [each]) for each in tallies]
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows, _row("**in all**", tallies)]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


def _row(title, tallies):
    tallies = list(tallies)
    counts = [sum(getattr(each, name) for each in tallies) for name in ("injected", "refused", "harmless")]
    counts += [sum(each.failures[name] for each in tallies) for name in FAILURES]
    return [title, *(f"{count:,}" for count in counts), f"{sum(each.seconds for each in tallies):.0f}"]


def write(path, tallies):
    """All counts and texts, as JSON."""
    path.write_text(json.dumps([each.as_dict() for each in tallies], indent=1) + "\n")
