"""A run without torch: it counts steps on disk, and can be asked to stop as a training loop with a Checkpointer can."""

import shlex
import sys

SAVED_EVERY = 3
"""A run that is killed falls back to a multiple of it."""
NAME = "counting.py"
RUN = f"""
import fcntl, json, os, signal, sys, time
from pathlib import Path
number, outcome = int(os.environ["CKPTMAN_ATTEMPT"]), Path(os.environ["CKPTMAN_OUTCOME"])
root, steps = Path(sys.argv[1]), int(sys.argv[2])
places = [int(each) for each in sys.argv[3].split(",") if each]
place = places[number - 1] if number <= len(places) else None
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))

def put(path, text):
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)

def tell(state):
    facts = {{"state": state, "step": step, "reason": state, "exit_code": 0, "root": str(root), "attempt": number,
             "time_seconds": time.time(), "pid": os.getpid(), "host": "lab"}}
    put(outcome, json.dumps(facts))

def log(*words):
    with open(root / "log", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

root.mkdir(exist_ok=True)
alone = open(root / "alone", "w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    log("beside another", number)
    sys.exit(9)
step = int((root / "step").read_text()) if (root / "step").exists() else 0
log("begin", number, step)
tell("running")
while step < steps and not stop:
    time.sleep(0.02)
    step += 1
    if step % {SAVED_EVERY} == 0:
        put(root / "step", str(step))
    if step == place:
        put(root / f"there-{{number}}", str(os.getpid()))
        while not stop:
            time.sleep(0.02)
put(root / "step", str(step))
tell("stopped" if stop else "finished")
log("end", number, step)
sys.exit(75 if stop else 0)
"""


def counting(folder, steps, places):
    """The command of a run that counts to `steps`; attempt k waits at `places[k - 1]` until it is asked to stop."""
    (folder / NAME).write_text(RUN)
    return shlex.join(
        [sys.executable, "-S", str(folder / NAME), str(folder / "root"), str(steps), ",".join(map(str, places))]
    )


def there(folder, number):
    """The file that is there when attempt `number` waits at its place: the id of its process."""
    return folder / f"root/there-{number}"


def check(folder, steps, places, lost):
    """It counted to its end, no attempt was beside another, and none repeated more than `lost` steps."""
    lines = [line.split() for line in (folder / "root/log").read_text().splitlines()]
    assert not [line for line in lines if line[0] == "beside"], lines
    begun = [int(step) for word, _, step in lines if word == "begin"]
    assert begun[0] == 0
    assert len(begun) == len(places) + 1, lines
    for place, start in zip(places, begun[1:]):
        assert 0 <= place - start <= lost, lines
    assert (folder / "root/step").read_text() == str(steps)
