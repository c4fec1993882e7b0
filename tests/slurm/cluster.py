"""A real Slurm on this machine: one controller, several nodes that are daemons beside each other, no systemd.

Everything lies in one folder and listens on the loopback alone. Jobs are tracked by control groups as on a real cluster
(a private mount of the freezer), so that signals reach whom they reach there; where that cannot be mounted, by parents.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
START_SECONDS = 30.0
CRED_SECONDS = 5
"""A requeued job waits this long and a second more."""
KILL_WAIT_SECONDS = 6
SILENT_SECONDS, SILENT_SECONDS_OF_A_DEAD_NODE = 60, 6
"""When a silent node counts as down: a busy machine keeps daemons waiting longer than a test waits for a dead one."""

_CONF = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={run}/munge/socket,cred_expire={cred}
CryptoType=crypto/munge
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool/%n
SlurmctldPidFile={run}/pid/slurmctld.pid
SlurmdPidFile={run}/pid/slurmd.%n.pid
SlurmctldLogFile={run}/log/slurmctld.log
SlurmdLogFile={run}/log/slurmd.%n.log
PlugStackConfig={run}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/{track}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={silent}
MessageTimeout=60
BatchStartTimeout=60
MinJobAge=86400
DefMemPerCPU=100
CompleteWait=0
JobCompType=jobcomp/filetxt
JobCompLoc={run}/log/jobcomp.txt
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing():
    """The programs of Slurm that are not installed here."""
    return [each for each in PROGRAMS if shutil.which(each, path=_path()) is None]


class Cluster:
    """A cluster in a folder. `nodes`: their names. `environ`: what its clients need.

    No two clusters have nodes of the same name: the control groups of their jobs are called after node and job, and one
    would kill the jobs of the other.

    It ends with the process that started it, however that ends: see `stop`.
    """

    def __init__(self, folder, nodes=5, started_by=None):
        first = f"n{started_by or os.getpid()}0"
        self.folder, self.nodes = folder, [f"{first}{number}" for number in range(1, nodes + 1)]
        self.environ = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "CKPTMAN"))
            },
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._mounted = False
        self._dead = []

    def start(self):
        """Start all daemons, and wait until each node is idle."""
        for name in ("munge", "state", "spool", "pid", "log", "cgroup"):
            (self.folder / name).mkdir(parents=True)
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", __name__, self.folder, str(len(self.nodes)), str(os.getpid())],
            cwd=Path(__file__).parents[2],
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.folder.chmod(0o755)  # munged wants everybody to get at its socket
        self._mounted = self._mount_freezer()
        ports = _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
            for name, port in zip(self.nodes, ports[1:])
        ]
        self._conf = partial(
            _CONF.format,
            run=self.folder,
            port=ports[0],
            user=psutil.Process().username(),
            cred=CRED_SECONDS,
            kill_wait=KILL_WAIT_SECONDS,
            track="cgroup" if self._mounted else "linuxproc",
            nodes="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(self._conf(silent=SILENT_SECONDS))
        (self.folder / "plugstack.conf").write_text("")
        mount = f"CgroupMountpoint={self.folder}/cgroup" if self._mounted else ""
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\n{mount}\nConstrainCores=no\nConstrainRAMSpace=no\n"
        )
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._daemon(
            "munged",
            f"--key-file={key}",
            f"--socket={self.folder}/munge/socket",
            f"--pid-file={self.folder}/pid/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/munge/seed",
            "--num-threads=4",
        )
        self.start_controller(fresh=True)
        for name in self.nodes:
            self.start_node(name)
        self.wait(lambda: len(self.idle()) == len(self.nodes), START_SECONDS, "nodes are not idle")

    def start_controller(self, fresh=False):
        self._daemon("slurmctld", "-f", str(self.folder / "slurm.conf"), *["-c"] * fresh)
        self.wait(lambda: "UP" in self.ask("scontrol", "ping"), START_SECONDS, "no controller answers")

    def stop_controller(self):
        self._end_by_pid_file("slurmctld.pid", signal.SIGTERM)

    def _notice_silence_after(self, seconds):
        (self.folder / "slurm.conf").write_text(self._conf(silent=seconds))
        self.ask("scontrol", "reconfigure")

    def start_node(self, name):
        if name in self._dead:
            self._dead.remove(name)
            self._notice_silence_after(SILENT_SECONDS_OF_A_DEAD_NODE if self._dead else SILENT_SECONDS)
        self._daemon("slurmd", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, name):
        """What a power cut does: the daemon, and all that runs there, are gone at once, and nobody tells of it."""
        self._dead.append(name)
        self._notice_silence_after(SILENT_SECONDS_OF_A_DEAD_NODE)
        self._end_by_pid_file(f"slurmd.{name}.pid", signal.SIGKILL)
        there = []
        for process in self._processes():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name:
                    there.append(process)
        watching = []  # slurmstepd would tell the controller how the others ended
        for process in there:
            with suppress(psutil.Error):
                watching += [each for each in process.parents() if each.name() == "slurmstepd"]
        for process in (*watching, *there):
            with suppress(psutil.Error):
                process.kill()

    def kill_daemon(self, name):
        """The slurmd of a node alone: what runs there runs on."""
        self._end_by_pid_file(f"slurmd.{name}.pid", signal.SIGKILL)

    def idle(self):
        return self.ask("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split()

    def ask(self, *command):
        """What a command of Slurm prints; empty where it fails."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
        )
        return done.stdout if done.returncode == 0 else ""

    def queue(self):
        """The state of each job that waits or runs."""
        rows = (line.split("|") for line in self.ask("squeue", "-h", "-o", "%i|%T").splitlines())
        return {row[0]: row[1] for row in rows}

    def wait(self, done, timeout_seconds, what):
        """Wait until `done`. Raises: TimeoutError, with the last words of the daemons."""
        deadline = time.monotonic() + timeout_seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} after {timeout_seconds:.0f} s\n{self.last_words()}")
            time.sleep(0.1)

    def stop(self):
        """End everything that belongs to this cluster. Done by a process that waits for this, or for our death."""
        self._reaper.stdin.close()
        self._reaper.wait()

    def reap(self):
        for path in sorted((self.folder / "pid").glob("slurm*.pid")):
            self._end_by_pid_file(path.name, signal.SIGTERM)
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        self._end_by_pid_file("munged.pid", signal.SIGTERM)
        if os.path.ismount(freezer := self.folder / "cgroup/freezer"):
            self._empty_freezer()
            subprocess.run(["umount", "-l", freezer], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemon(self, *command):
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=240)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}\n{self.last_words()}")

    def _mount_freezer(self):
        freezer = self.folder / "cgroup/freezer"
        freezer.mkdir()
        command = ["mount", "-t", "cgroup", "-o", "freezer", "cgroup", str(freezer)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _empty_freezer(self):
        for name in self.nodes:
            top = self.folder / f"cgroup/freezer/slurm_{name}"
            for folder in sorted(top.rglob("*"), reverse=True) if top.is_dir() else []:
                if folder.is_dir():
                    with suppress(OSError):
                        folder.rmdir()
            with suppress(OSError):
                top.rmdir()

    def _processes(self):
        """Processes of jobs and daemons of this cluster, munged apart."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                conf = self.environ["SLURM_CONF"]
                if process.name() == "munged":
                    continue
                if process.environ().get("SLURM_CONF") == conf and process.ppid() != os.getpid():
                    found.append(process)
        return found

    def _end_by_pid_file(self, name, number):
        path = self.folder / "pid" / name
        try:
            process = psutil.Process(int(path.read_text()))
        except (OSError, ValueError, psutil.Error):
            return
        with suppress(psutil.Error):
            process.send_signal(number)
            deadline = time.monotonic() + 20
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)

    def last_words(self, folder=None):
        """The end of each log of the daemons, and of the logs of jobs in `folder`."""
        words = []
        jobs = [] if folder is None else [*folder.glob("log*"), *folder.glob("*.out"), *folder.glob("logs/*")]
        for path in (*sorted(jobs), *sorted((self.folder / "log").glob("*.log"))):
            with suppress(OSError):
                words += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-20:]]
        return "\n".join(words)


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _path():
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    run, count, starter = sys.argv[1:]
    sys.stdin.read()
    Cluster(Path(run), int(count), starter).reap()
