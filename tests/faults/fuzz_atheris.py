"""Fuzzing guided by coverage: `python -m tests.faults.fuzz_atheris TARGET FOLDER [options of libFuzzer]`.

atheris is no dependency of ckptman: `pip install atheris` first, into an environment that has the others. Inputs that
reach something new are put into FOLDER; what of it is worth keeping goes into `corpus/TARGET/`, and is tried in every
campaign from then on.
"""

import sys
import tempfile
from pathlib import Path


def main(arguments):
    import atheris

    with atheris.instrument_imports(include=["ckptman", "zipfile", "pickle", "json"]):
        from tests.faults.fuzz_targets import REFUSALS, TARGETS, Stage, seeds_of

    name = arguments[1]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        there, seeds = Stage(Path(folder)), Path(folder, "seeds")
        seeds.mkdir()
        for number, data in enumerate(seeds_of(there)[name]):
            (seeds / str(number)).write_bytes(data)

        def one(data):
            try:
                TARGETS[name](there, data)
            except REFUSALS:
                pass

        kept = Path(__file__).with_name("corpus") / name
        known = [str(kept)] if kept.is_dir() else []
        Path(arguments[2]).mkdir(exist_ok=True)
        atheris.Setup([arguments[0], arguments[2], str(seeds), *known, *arguments[3:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
