"""A real SLURM cluster on one machine: munge, MariaDB, slurmdbd, slurmctld and N slurmd.

It looks like JUWELS Booster from outside: partitions `booster` (24 h) and `develbooster` (2 h),
whole nodes of 48 cores and 4 GPUs (fake devices), an account that must be given. The partition
`urgent` preempts. No systemd, cgroups or network; everything lives under one folder and is stopped
by pid.
"""

import contextlib
import fcntl
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ACCOUNT = "maect"
GPUS, CPUS, MEMORY_MB = 4, 48, 480_000
MARK = "# slurm test cluster"
COMMAND_SECONDS = 60.0  # for any command of the cluster's
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch")


def missing() -> str | None:
    """Why the cluster cannot run here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(absent)}: run tests/install.sh"
    return None


class Cluster:
    """The cluster under `root`; its daemons are known by the pid files there."""

    def __init__(self, root: Path, nodes: int = 3, port: int = 26800) -> None:
        self.root, self.port = root, port
        self.nodes = [f"jwb{number:04d}" for number in range(1, nodes + 1)]
        self.conf = root / "etc" / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}

    # Life

    def start(self) -> None:
        """Bring everything up; seconds."""
        if self._pids():
            raise RuntimeError(f"a test cluster is already running in {self.root}")
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("etc", "run", "state", "log", "spool", "dev", "db"):
            (self.root / name).mkdir(parents=True)
        for number in range(GPUS):
            device = self.root / "dev" / f"nvidia{number}"
            try:
                os.mknod(device, 0o20666, os.makedev(1, 3))
            except PermissionError:
                device.touch()
        self._configure()
        self._hosts([f"127.0.1.{number} {name}" for number, name in enumerate(self.nodes, 1)])
        self.start_daemon("munged")
        self._wait(lambda: self._works("munge", "-S", f"{self.root}/run/munge.sock", "-n"))
        self.start_daemon("mariadbd")
        sql = ["mariadb", "--no-defaults", "-S", str(self.root / "db" / "sock"), "-e"]
        self._wait(lambda: self._works(*sql, "create database if not exists slurm_acct"))
        self.start_daemon("slurmdbd")
        self._works("sacctmgr", "-i", "add", "cluster", "testcluster")
        user = getpass.getuser()
        for account in ("none", ACCOUNT):
            self.run("sacctmgr", "-i", "add", "account", account)
            self.run("sacctmgr", "-i", "add", "user", user, f"account={account}")
        # On the real machine a job without an account is refused.
        self.run("sacctmgr", "-i", "modify", "user", user, "set", "defaultaccount=none")
        self.start_daemon("slurmctld")
        for node in self.nodes:
            self.start_node(node)
        self._wait(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"))

    def stop(self) -> None:
        """Cancel all jobs and end exactly what `start` launched; bounded, whatever hangs."""
        if "slurmctld" in self._pids():
            self._works("scancel", "--full", "-u", getpass.getuser())
            with contextlib.suppress(RuntimeError):
                self._wait(lambda: self._answer("squeue", "-h") in ("", None), 10)
        order = [f"slurmd.{node}" for node in self.nodes]
        for name in [*order, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            self.stop_daemon(name)
        _kill(self._ours())
        self._hosts([])

    # Faults

    def kill_node(self, node: str) -> None:
        """Power loss: slurmd, its step daemons and every process of its jobs."""
        lost = self._ours(node)
        self.stop_daemon(f"slurmd.{node}", signal.SIGKILL)
        _kill(lost)
        for socket_file in (self.root / "spool" / node).glob(f"{node}_*"):
            socket_file.unlink()

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._daemon(f"slurmd.{node}", "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def start_daemon(self, name: str) -> None:
        """Start munged, mariadbd, slurmdbd or slurmctld, and wait until it answers."""
        root = self.root
        if name == "munged":
            options = ["-F", "--force", "--num-threads=2", f"--key-file={root}/etc/munge.key"]
            options += [f"--socket={root}/run/munge.sock", f"--pid-file={root}/run/munge.daemon"]
            options += [f"--log-file={root}/log/munge.log", f"--seed-file={root}/run/munge.seed"]
            self._daemon("munged", "munged", *options)
        elif name == "mariadbd":
            data = ["--no-defaults", f"--datadir={root}/db/data", "--user=root"]
            if not (root / "db" / "data").exists():
                flags = ["--auth-root-authentication-method=normal", "--skip-test-db"]
                flags += ["--skip-name-resolve", f"--tmpdir={root}/db"]
                self.run("mariadb-install-db", *data, *flags)
            options = [f"--socket={root}/db/sock", "--skip-networking", "--skip-grant-tables"]
            options += [f"--pid-file={root}/run/mariadb.daemon", "--performance-schema=OFF"]
            options += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]
            self._daemon("mariadbd", "mariadbd", *data, *options, f"--tmpdir={root}/db")
        elif name == "slurmdbd":
            self._daemon("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=f"{root}/db/sock")
            self._wait(lambda: self._listens(self.port + 1))
        elif name == "slurmctld":
            self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
            self._wait(lambda: self._works("scontrol", "ping"))

    def daemon(self, name: str) -> psutil.Process:
        """A live daemon; KeyError if it is not there."""
        return psutil.Process(self._pids()[name])

    def stop_daemon(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one daemon (slurmd.NODE, slurmctld, slurmdbd, mariadbd, munged)."""
        with contextlib.suppress(KeyError, psutil.NoSuchProcess):
            process = self.daemon(name)
            process.send_signal(number)
            _, alive = psutil.wait_procs([process], timeout=15)
            _kill(alive)
        (self.root / "run" / f"{name}.pid").unlink(missing_ok=True)

    # Questions

    def run(self, *words: str) -> str:
        """Output of a command that must succeed."""
        result = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if result.returncode:
            raise RuntimeError(f"{words}: {result.stdout}{result.stderr}")
        return result.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """Node name to state, `idle` for one that is up and free."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def release(self, job_id: str) -> None:
        """Spare a requeued job its two minutes of waiting."""
        # Credentials count in seconds: one made in the second of the requeue is revoked with it.
        time.sleep(2)
        self._works("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    # Inside

    def _configure(self) -> None:
        here, root = socket.gethostname().split(".")[0], self.root
        conf = (Path(__file__).parent / "slurm.conf").read_text()
        lines = [
            f"NodeName={name} NodeHostname={here} NodeAddr=127.0.1.{number} "
            f"Port={self.port + 10 + number} CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS}"
            for number, name in enumerate(self.nodes, 1)
        ]
        conf = conf.format(root=root, host=here, ctld=self.port, dbd=self.port + 1, account=ACCOUNT)
        self.conf.write_text(conf + "\n".join(lines) + "\n")
        devices = f"{root}/dev/nvidia[0-{GPUS - 1}]"
        names = ",".join(self.nodes)
        (root / "etc" / "gres.conf").write_text(f"NodeName={names} Name=gpu File={devices}\n")
        database = root / "etc" / "slurmdbd.conf"
        database.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={root}/run/munge.sock\nDbdHost=localhost\n"
            f"DbdPort={self.port + 1}\nSlurmUser=root\nLogFile={root}/log/slurmdbd.log\n"
            f"PidFile={root}/run/slurmdbd.daemon\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=localhost\nStorageUser=root\nStorageLoc=slurm_acct\nCommitDelay=0\n"
        )
        database.chmod(0o600)
        prolog = root / "etc" / "task_prolog.sh"
        # Its devices are files: jobs compute on the CPU, although they are given GPUs.
        prolog.write_text('#!/bin/sh\necho "export DS_ACCELERATOR=cpu"\n')
        prolog.chmod(0o755)
        key = root / "etc" / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def _daemon(self, name: str, *words: str, **more: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                words, env={**self.env, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        (self.root / "run" / f"{name}.pid").write_text(str(process.pid))

    def _pids(self) -> dict[str, int]:
        found = {}
        for file in (self.root / "run").glob("*.pid"):
            try:
                process = psutil.Process(int(file.read_text()))
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and process.environ().get("SLURM_CONF") == str(self.conf):
                    found[file.stem] = process.pid
            except (psutil.Error, ValueError):
                continue
        return found

    def _ours(self, node: str | None = None) -> list[psutil.Process]:
        """Step daemons and job processes of one node, or of all."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if env.get("SLURM_CONF") != str(self.conf):
                    continue
                if process.name().startswith("slurmstepd"):
                    # A step daemon's node shows only in the name of its socket.
                    sockets = [str(c.laddr) for c in process.net_connections("unix")]
                    if node is None or any(f"/spool/{node}/" in name for name in sockets):
                        found.append(process)
                elif "SLURMD_NODENAME" in env and node in (None, env["SLURMD_NODENAME"]):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _hosts(self, lines: list[str]) -> None:
        """Names of the nodes; locked, or another cluster would read what this one truncates."""
        mark = f"{MARK} {self.port}"
        # In place: /etc/hosts may be a bind mount, which cannot be replaced.
        with open("/etc/hosts", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            kept = [line for line in file.read().splitlines() if not line.endswith(mark)]
            file.seek(0)
            file.write("\n".join([*kept, *(f"{line} {mark}" for line in lines)]) + "\n")
            file.truncate()

    def _works(self, *words: str) -> bool:
        return self._answer(*words) is not None

    def _answer(self, *words: str) -> str | None:
        """Output of a command, or None if it failed or hangs."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return self.run(*words)
        return None

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def _wait(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                tails = [
                    f"== {file.name}\n{file.read_text(errors='replace')[-1000:]}"
                    for file in sorted((self.root / "log").iterdir())
                ]
                raise RuntimeError("the test cluster does not start\n" + "\n".join(tails))
            time.sleep(0.05)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
