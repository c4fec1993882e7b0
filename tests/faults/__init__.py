"""The fault campaign: what can go wrong with a disk, a process or a checkpoint is made to go wrong, thousands of times.

    python -m tests.faults                      # everything, half an hour and more on two cores (make faults)
    python -m tests.faults --quick              # a small part of each kind
    python -m tests.faults --only flips,disk --seed 7

Each kind of fault is one module with a function `run(tally, quick)`. `tally` counts what was injected and what came of
it; `mutants` breaks the library on purpose, to see that the campaign notices.
"""
