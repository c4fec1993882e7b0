"""`ckptman memory list | flush | clear`: checkpoints in the memory of this node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, flag, option, path_argument
from ckptman.cli.select import Root
from ckptman.errors import CkptmanError, ConfigError
from ckptman.storage.format import paths

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.node_memory import NodeMemory, Owner, Part

memory_app = typer.Typer(
    help="Checkpoints in the memory of this node: see them, bring them to disk, remove them.",
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
)
Where = Annotated[str, option("--path", "DIR", "Where the run keeps them: the path of its MemoryTier (/dev/shm).")]
ALIVE, WAITING, LEFT = "alive", "may go on", "left behind"


@memory_app.command("list", cls=Verb)
def list_memory(path: Where = paths.MEMORY_PATH, as_json: AsJson = False) -> None:
    """List what runs of this user hold, or have left, in the memory of this node.

    A part is what one rank saved; each is on several nodes, and a checkpoint may be complete between them.
    """
    from ckptman.storage.catalog.backends.node_memory import found_on, left_behind

    base = Path(path)
    left = {each.folder for each in left_behind(base, _ended(base))}
    found = [
        (each, _owner(each), LEFT if each.folder in left else ALIVE if each.is_alive() else WAITING)
        for each in found_on(base)
    ]
    if as_json:
        console.say_json([_as_dict(*each) for each in found])
        return
    if not found:
        console.say(f"No run of this user has anything in {path}.")
        return
    rows = []
    for memory, owner, state in found:
        whose = (owner.root, owner.job_id or "-") if owner is not None else ("?", "-")
        parts = [(str(part.step), parts_text(part)) for part in memory.parts()] or [("-", "-")]
        sizes = [console.size(memory.size_bytes), *[""] * (len(parts) - 1)]
        rows += [(*each, size, memory.node, *whose, state) for each, size in zip(parts, sizes)]
    console.say(
        *console.table(
            ("step", "parts", "memory", "node", "root", "job", "state"), rows, right="step memory", drop=("job", "node")
        )
    )


@memory_app.command("flush", cls=Verb)
def flush_memory(
    root: Root,
    nodes: Annotated[
        int | None,
        option(
            "--nodes", "N", "How many nodes are left, each of which flushes (SLURM_STEP_NUM_NODES, if that is set)."
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="Give up when nothing came from other nodes for so long."),
    ] = 120.0,
    path: Where = paths.MEMORY_PATH,
    as_json: AsJson = False,
) -> None:
    """Bring the newest checkpoint in memory to ROOT, after an attempt that ended without a save.

    Run it on each node that is left, at the same time, by one process: `srun --ntasks-per-node=1 ckptman memory flush
    ROOT`. Each node brings its share. Where the disk has what is as new, nothing is done. Exit code 3: the nodes that
    are left have not all parts of it. 11: the run is alive.
    """
    from ckptman.policies.parameters import check_count, check_positive
    from ckptman.runtime.journal import note
    from ckptman.runtime.outcome import this_node
    from ckptman.storage.catalog.backends.node_memory import NodeMemory
    from ckptman.storage.catalog.tiers import read_identity
    from ckptman.storage.transfer.memory_flush import flush

    check_positive("memory flush", "--timeout", timeout)
    step_nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    if nodes is None and step_nodes.isdecimal():
        nodes = int(step_nodes)
    if nodes is not None:
        check_count("memory flush", "--nodes", nodes)
    # A root without an identity never had anything in memory.
    identity = read_identity(root) or "0" * 32
    memory = NodeMemory(Path(path), identity, this_node(os.environ))
    done = flush(root, memory, nodes=nodes, timeout_seconds=timeout)
    if done.committed is not None:
        note(root, "memory_flushed", step=done.committed, why=done.why)
    if as_json:
        console.say_json({"root": root, "node": memory.node, **vars(done)})
        return
    brought = (
        f" This node brought {console.count(done.files, 'file')}, {console.size(done.bytes)}." if done.files else ""
    )
    console.say(f"{root}: {done.why}.{brought}")


@memory_app.command("clear", cls=Verb)
def clear_memory(
    root: Annotated[str | None, path_argument("[ROOT]", "The folder that holds the run's checkpoints on disk.")] = None,
    all_dead: Annotated[bool, flag("--all-dead", "What all runs that are over have left on this node.")] = False,
    path: Where = paths.MEMORY_PATH,
) -> None:
    """Remove what a run that is over has in the memory of this node.

    Never what a run that is alive has: exit code 2.
    """
    from ckptman.storage.catalog.backends.node_memory import found_on, left_behind

    if (root is None) != all_dead:
        raise ConfigError("say which: the ROOT of the run, or --all-dead for all runs that are over")
    base = Path(path)
    if root is None:
        going = list(left_behind(base, _ended(base)))
    else:
        going = [each for each in found_on(base) if _is_of(each, root)]
        for each in going:
            if why := _why_alive(each):
                raise ConfigError(f"the run of {root} is not over on {each.node}: {why}. End it first")
    freed = sum(map(clear, going))
    staying = len(found_on(base)) if root is None else 0
    stays = f" {console.count(staying, 'run')} may go on, and keep theirs." if staying else ""
    what = console.count(len(going), "run")
    console.say(f"Removed what {what} had, {console.size(freed)}.{stays}" if going else f"Nothing to remove.{stays}")


def parts_text(part: Part) -> str:
    """Return how much of a checkpoint is here: `3 of 8`."""
    here, total = part.data_files
    return f"{here} of {total}" if total is not None else f"{here}, without manifest"


def in_memory(root: Path) -> list[tuple[NodeMemory, Part]]:
    """Return the checkpoints of a root of which this node has parts. Nothing where that cannot be told."""
    base = Path(paths.MEMORY_PATH)
    if not os.path.lexists(paths.user_folder(base)):  # as a rule, and it costs nothing
        return []
    from ckptman.storage.catalog.backends.node_memory import found_on
    from ckptman.storage.catalog.tiers import read_identity

    try:
        identity = read_identity(root)
        return [(each, part) for each in found_on(base) if each.root_id == identity for part in each.parts()]
    except CkptmanError:
        return []


def superseded(root: Path) -> list[NodeMemory]:
    """Return what runs of a root that are over have left on this node, where the disk has what is as new."""
    base, mine = Path(paths.MEMORY_PATH), {each.folder for each, _ in in_memory(root)}
    if not mine:
        return []
    from ckptman.storage.catalog.backends.node_memory import left_behind
    from ckptman.storage.catalog.catalog import Catalog, any_will_do, attempt_and_step

    newest = attempt_and_step(Catalog(root).scan(until=any_will_do))
    return [
        each
        for each in left_behind(base, _ended(base))
        if each.folder in mine
        and all((part.manifest.attempt, part.step) <= newest for part in each.parts() if part.manifest is not None)
    ]


def _ended(base: Path) -> dict[str, bool]:
    from ckptman.jobs.slurm.commands import ended_jobs
    from ckptman.storage.catalog.backends.node_memory import job_ids

    return ended_jobs(job_ids(base), os.environ)


def _owner(memory: NodeMemory) -> Owner | None:
    try:
        return memory.owner()
    except (CkptmanError, OSError):
        return None


def _why_alive(memory: NodeMemory) -> str:
    """Return why a run counts as alive, "" where it does not: not because of the shell in which all this happens."""
    import psutil

    if memory.is_alive():
        return "its ranks are alive"
    owner = _owner(memory)
    if owner is None or not owner.is_supervised or owner.pid in [each.pid for each in psutil.Process().parents()]:
        return ""
    return f"what started its ranks is alive (pid {owner.pid}), and may start them anew"


def _is_of(memory: NodeMemory, root: str) -> bool:
    """Return whether it is of a root, which may be gone."""
    from ckptman.storage.catalog.tiers import read_identity

    owner = _owner(memory)
    return memory.root_id == read_identity(Path(root)) or (
        owner is not None and owner.root == str(Path(root).absolute())
    )


def clear(memory: NodeMemory) -> int:
    """Remove it, unless a run has begun meanwhile. Returns the bytes that it had."""
    size = memory.size_bytes
    if memory.is_alive():
        return 0
    memory.clear()
    return size


def _as_dict(memory: NodeMemory, owner: Owner | None, state: str) -> dict[str, Any]:
    return {
        "path": memory.folder,
        "node": memory.node,
        **{name: getattr(owner, name, None) for name in ("root", "run_id", "job_id")},
        "bytes": memory.size_bytes,
        "state": state,
        "checkpoints": describe_parts([(memory, part) for part in memory.parts()]),
    }


def describe_parts(found: Sequence[tuple[NodeMemory, Part]]) -> list[dict[str, Any]]:
    """Parts of checkpoints for programs."""
    return [
        {
            "step": part.step,
            "node": memory.node,
            "path": memory.path_of(part.step),
            "parts": part.data_files[0],
            "parts_saved": part.data_files[1],
            "bytes": sum(part.sizes.values()),
        }
        for memory, part in found
    ]
