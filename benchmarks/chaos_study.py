"""One study in a place of its own, and what it is done to: processes killed or stopped, disks full, a clock moved.

Only processes that inherited the study's own mark are ever sent a signal.
"""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))
from mlflow_server import free_port
from raylet_cluster import raylet_cluster

MARK = "WATTUNE_CHAOS"
"""Variable that every process of a study inherits: its value is the study's."""

CLOCK = "WATTUNE_CHAOS_CLOCK"
"""Variable with the file that moves a study's wall clock; see chaos_clock.cpp."""

PROCESSES = {
    "driver": "",
    "worker": "RayTrainWorker",
    "lane actor": "LaneKeeper",
    "result maker": "ray::Aside",
    "node post": "ray::Post",
    "telemetry actor": "TelemetryActor",
    "sampler": "wattune.telemetry.sampler",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
"""Kinds of a study's processes, with a text in their command lines."""

STANDING = ("raylet", "gcs")
"""Kinds that a cluster has without the study. One with a node beside the head's, which has a post, is only joined."""

SERVERS = ("mlflow server", "storage server")
"""Servers a study sends its results to."""

DISK = ("full disk", "full temporary disk", "read-only disk")
CLOCKS = ("clock forward", "clock back")
STOPS = tuple(f"stop {kind}" for kind in ("driver", "worker", "lane actor", "result maker", "raylet", "sampler"))
HAZARDS = (*PROCESSES, *SERVERS, *DISK, *CLOCKS, *STOPS)

SPACE: dict[str, Any] = {
    "model": {"name": "llama3_8b", "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4}
    | {"num_kv_heads": 2, "vocab_size": 256},
    "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
    "engine": "torch",
    "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 8},
    "space": {"micro_batch_size": [1, 2, 4], "sharding": ["none", "zero1"], "recompute": ["none", "full"]},
    "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 2},
    "objective": "maximize tokens_per_s",
    "search": {"strategy": "grid"},
}

DISK_MB = 160
"""Size of a study's own disk: some ten times what it writes."""

STEP_S = 3600
"""Seconds that the clock is set forward or back."""

BUCKET = "chaos"
GONE_WITHIN_S = 15.0
"""Longest that a process may outlive its study; a sampler's lease is 10 s."""


def in_own_namespace() -> None:
    """Starts this program again, if it may mount, where its mounts are seen by its children only, and go with them."""
    may = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    if os.environ.get("WATTUNE_CHAOS_MOUNTS") is None and may:
        os.environ["WATTUNE_CHAOS_MOUNTS"] = "own"
        os.execvp("unshare", ["unshare", "-m", "--propagation", "private", sys.executable, *sys.argv])


def allowed() -> dict[str, str]:
    """Returns the hazards this machine does not allow, with the reason."""
    missing = {}
    if os.environ.get("WATTUNE_CHAOS_MOUNTS") != "own":
        missing |= dict.fromkeys(DISK, "needs the right to mount file systems")
    if shutil.which("g++") is None or sys.platform != "linux":
        missing |= dict.fromkeys(CLOCKS, "needs g++ on Linux")
    return missing


def mount(*words: str | Path) -> None:
    """Mounts or unmounts in this program's own namespace."""
    subprocess.run([*map(str, words)], check=True, capture_output=True, timeout=30)


def own(mark: str) -> list[psutil.Process]:
    """Lists the living processes that inherited a study's mark, except this one."""
    every = psutil.process_iter(["cmdline", "environ"])  # another user's tells neither
    return [one for one in every if one.pid != os.getpid() and (one.info["environ"] or {}).get(MARK) == mark]


def find(kind: str, mark: str, driver: int) -> list[psutil.Process]:
    """Finds the living processes of a kind."""
    if kind == "driver":
        return [one for one in own(mark) if one.pid == driver]
    return [one for one in own(mark) if one.pid != driver and PROCESSES[kind] in " ".join(one.info["cmdline"] or ())]


def tell(processes: Sequence[psutil.Process], number: int) -> None:
    """Sends a signal to processes that may be gone."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


@dataclass
class Server:
    """A server of the study's, on loopback, that can be killed and started again on its port."""

    kind: str
    folder: Path
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        if self.kind == "mlflow server":
            words = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers"]
            words += ["1", "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port"]
        else:
            words = ["-m", "moto.server", "-H", "127.0.0.1", "-p"]
        with open(self.folder / f"{self.kind}.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words, str(self.port)],
                stdout=log,
                stderr=log,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
                start_new_session=True,
            )
        end_s = time.monotonic() + 180
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 2).close()
                break
            time.sleep(0.3)
        else:
            raise RuntimeError(f"the {self.kind} did not start; see its log in {self.folder}")
        if self.kind == "storage server":  # it keeps everything in memory: a killed one comes back empty
            self.bucket().create()

    def bucket(self) -> Any:
        """Returns the bucket of the storage server."""
        import boto3

        settings = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{self.port}", **settings).Bucket(BUCKET)

    def kill(self) -> None:
        """Kills it, with its own workers: the session has nobody else."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


class Place:
    """A study's own disk, temporary folder, shared memory, clock and servers."""

    def __init__(self, folder: Path, name: str, hazards: Sequence[str], **changes: Any) -> None:
        """Makes all of it.

        Args:
            folder: Holds logs, and the study where nothing can be mounted.
            name: The study's name.
            hazards: What will happen to it: servers and a clock are made where one of these needs them.
            changes: Changes of `SPACE`.
        """
        self.name, self.mark = name, f"{os.getpid()}-{name}"
        self.folder = folder / name
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
        self.mounts = os.environ.get("WATTUNE_CHAOS_MOUNTS") == "own"
        if self.mounts:
            mount("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", self.disk)
            mount("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", self.temporary)
            mount("mount", "-t", "tmpfs", "-o", "size=4g,mode=1777", "tmpfs", "/dev/shm")
        self.study = self.disk / name
        self.space = self.folder / "space.yaml"
        self.space.write_text(yaml.safe_dump({"study": name, **SPACE, **changes}))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY_", "MLFLOW_"))}
        self.environment = kept | {
            MARK: self.mark,
            "WATTUNE_STORAGE": str(self.disk),
            "TMPDIR": str(self.temporary),
            "WATTUNE_RUNTIME": str(self.folder / "locks"),
        }
        (self.folder / "locks").mkdir(mode=0o700)
        self.servers = {kind: Server(kind, self.folder) for kind in SERVERS if kind in hazards}
        self.options: list[str] = []
        for kind, server in self.servers.items():
            server.start()
            self._use(kind, server.port)
        self.clock: Path | None = None
        if set(hazards) & set(CLOCKS):
            self._make_clock()
        self.joins, self.cluster, self.began_at = "node post" in hazards, contextlib.ExitStack(), b""
        if self.joins:
            self.environment["RAY_AUTH_MODE"] = "disabled"

    def _use(self, kind: str, port: int) -> None:
        if kind == "mlflow server":
            self.options += ["--tracking-uri", f"http://127.0.0.1:{port}"]
            return
        self.options += ["--storage", f"s3://{BUCKET}/here"]
        self.environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _make_clock(self) -> None:
        library, source = self.folder / "chaos_clock.so", Path(__file__).with_name("chaos_clock.cpp")
        command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=120)
        ctypes.CDLL(str(library))  # it loads, or this says why
        self.clock = self.folder / "clock"
        self.set_clock(0)
        self.environment |= {CLOCK: str(self.clock), "LD_PRELOAD": str(library)}

    def set_clock(self, offset_s: int) -> None:
        """Moves the study's wall clock to the machine's plus this."""
        assert self.clock is not None
        with open(self.clock, "r+b" if self.clock.exists() else "wb") as file:
            file.write(struct.pack("<q", offset_s))

    def start(self, verb: str, *arguments: str, log: Path, **settings: Any) -> "subprocess.Popen[bytes]":
        """Starts a command of wattune's, its standard error in a log; first a cluster to join, if it is gone."""
        joined = ["--address", self._address()] if self.joins and verb == "run" else []
        with open(log, "ab") as said:
            command = [sys.executable, "-m", "wattune", verb, *arguments, *self.options, *joined, "--json"]
            return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=said, **settings)

    def _address(self) -> str:
        """Returns where the cluster is that the study joins: a head without processors, and a node for the ranks."""
        offset = self.clock.read_bytes() if self.clock else b""  # Ray places nothing for as long as it was set back
        if [len(find(kind, self.mark, 0)) for kind in STANDING] != [2, 1] or offset != self.began_at:
            self.cluster.close()
            self.raylets = self.cluster.enter_context(raylet_cluster(self.folder, self.environment))
            self.raylets("add node")
            self.began_at = offset
        return self.raylets.address

    def tracking_uri(self) -> str:
        """Returns the address of the study's tracking store."""
        server = self.servers.get("mlflow server")
        return f"http://127.0.0.1:{server.port}" if server else f"sqlite:///{self.disk}/mlflow.db"

    @contextlib.contextmanager
    def under(self, hazard: str, driver: int, drawn: random.Random) -> Iterator[str]:
        """Does to the study what a hazard says, and undoes at the end of the body what can be undone.

        Yields what it hit; empty if there was no such process at the time.
        """
        if hazard in PROCESSES:
            found = find(hazard, self.mark, driver)
            hit = [drawn.choice(found)] if found else []
            tell(hit, signal.SIGKILL)
            yield f"process {hit[0].pid}" if hit else ""
        elif hazard.startswith("stop "):
            found = find(hazard.removeprefix("stop "), self.mark, driver)
            tell(found, signal.SIGSTOP)
            try:
                yield f"{len(found)} process(es)" if found else ""
            finally:
                tell(found, signal.SIGCONT)
        elif hazard in SERVERS:
            self.servers[hazard].kill()
            try:
                yield hazard
            finally:
                self.servers[hazard].start()
        elif hazard in CLOCKS:
            self.set_clock(STEP_S if hazard == "clock forward" else -STEP_S)
            yield f"{STEP_S} s"
        elif hazard == "read-only disk":
            mount("mount", "--bind", self.disk, self.disk)
            mount("mount", "-o", "remount,bind,ro", self.disk)
            try:
                yield "the study's disk"
            finally:
                mount("umount", "-l", self.disk)
        else:
            filler = (self.disk if hazard == "full disk" else self.temporary) / "filler"
            fill(filler)
            try:
                yield str(filler.parent)
            finally:
                filler.unlink()

    def left(self) -> list[str]:
        """Lists what is in the temporary folder and in shared memory.

        Compiled kernels stay on purpose, MLflow keeps an empty lock for each database, and the folders that every
        study of a user shares stay empty. After an error the latest cluster's folder stays for a day, for the logs
        that the message names.
        """
        shared = f"wattune-{os.getuid()}"
        log = self.folder / "log.txt"
        said = log.read_text() if log.exists() else ""
        failed = [path.parent for path in self.temporary.glob(f"{shared}/ray-*/failed") if str(path.parent) in said]
        found = []
        for path in sorted(self.temporary.rglob("*")):
            inside = path.relative_to(self.temporary)
            kept = "inductor" in str(inside) or path.name.startswith("db_init_lock-") or str(inside) == shared
            whose = (f"{shared}/spool", f"{shared}/last_words")
            kept = kept or (path.is_dir() and str(inside) in whose and not any(path.iterdir()))
            kept = kept or (len(failed) == 1 and (path == failed[0] or failed[0] in path.parents))
            if not kept:
                found.append(str(inside))
        if self.mounts:
            # MLflow's server makes one at each start, and leaves it when it is killed.
            servers = [*Path("/dev/shm").glob("tmp*/")] if "mlflow server" in self.servers else []
            found += [str(path) for path in sorted(Path("/dev/shm").iterdir()) if path not in servers]
        return found

    def remaining(self) -> list[psutil.Process]:
        """Returns the processes that live on after the study, beyond the time they may; ends a cluster it joined."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (alive := self._alive()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        self.cluster.close()
        for path in (self.temporary / "ray", *self.temporary.glob("pymp-*")):  # that of its dashboard
            shutil.rmtree(path, ignore_errors=True)
        return alive

    def _alive(self) -> list[psutil.Process]:
        """Lists the study's processes; those of a cluster that it joined are not its own."""
        if not self.joins:
            return own(self.mark)
        return [one for kind in PROCESSES.keys() - STANDING for one in find(kind, self.mark, 0)]

    def close(self, *, keep: bool) -> None:
        """Ends the servers and the processes that are left, and unmounts; keeps the study's files if asked to."""
        for server in self.servers.values():
            server.kill()
        self.cluster.close()
        tell(own(self.mark), signal.SIGKILL)
        if keep and self.mounts:
            shutil.copytree(self.disk, self.folder / "kept", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        if self.mounts:
            for path in (self.disk, self.temporary, "/dev/shm"):
                mount("umount", "-l", path)
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def fill(filler: Path) -> None:
    """Writes until the disk has no byte left."""
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 24, 1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass
