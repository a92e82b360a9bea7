#!/usr/bin/env python
"""Kills what sets devices, and what owns it, at random moments, and looks whether each device is as it was found.

    python benchmarks/limit_deaths.py                                       # 1,000 deaths over the stub of NVML
    python benchmarks/limit_deaths.py --backend amd_smi --amdsmi FOLDER     # over that of AMD SMI
    python benchmarks/limit_deaths.py --csv benchmarks/results/limit_deaths.csv

The setter is the one that studies start (`wattune.limits.process.hold`), in a process of its own, with the vendor's own
Python package over a library with the vendor's ABI (`limit_stub.cpp`, `tests/contracts/amd_smi_stub`). A death is
SIGKILL of the setter, of its owner, or of both, while the owner asks for random settings and a rival wants the same
devices. `pip install --target FOLDER --no-deps amdsmi==7.0.2` makes FOLDER. Needs g++, no device and no root.
"""

import ctypes
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness import Found, Rows, benchmark

from wattune.limits.process import hold
from wattune.limits.setter import FOLDER_VARIABLE
from wattune.storage.files import write_json
from wattune.telemetry.sampler.lease import LEASE, STOP_SIGNALS, renew

HERE: Final = Path(__file__).parent
LEASE_S: Final = 0.4
LIFE_S: Final = 0.5
"""Longest from the start of a setter to the death."""
WAIT_S: Final = 20.0
VICTIMS: Final = ("setter", "owner", "both")
VALUES: Final[dict[str, dict[str, list[Any]]]] = {
    "nvml": {"power_limit_w": [200, 450, 650], "clock_mhz": [1200, 1500], "power_profile": ["max_q", "llm_training"]},
    "amd_smi": {"power_limit_w": [100, 180, 240], "clock_mhz": [1200, 1500], "power_profile": ["compute"]},
}


@dataclass(frozen=True)
class Stub:
    """A vendor's library without hardware, and the file that holds the settings of its devices."""

    backend: str
    variable: str
    """Name of the environment variable of that file."""
    pack: Callable[[random.Random], bytes]
    """Makes settings that a device may have been left with."""
    in_range: Callable[[str, int], bool]
    """Tells whether a value of a setting is one that a device can have."""


def _nvml(rng: random.Random) -> bytes:
    """Four devices: limit, lock (NVML tells none, so none is there), profiles."""
    return b"".join(
        struct.pack("11I", rng.randrange(200_000, 700_001, 1000), 0, 0, rng.choice((0, 2)), *[0] * 7) for _ in range(4)
    )


def _amd_smi(rng: random.Random) -> bytes:
    """Two packages of two dies: cap of the first, profile, lowest and highest clock, mode."""
    dies = []
    for die in range(4):
        cap = rng.randrange(100, 561) * 1_000_000 if die % 2 == 0 else 0
        dies.append(
            struct.pack(
                "2Q4I", cap, rng.choice((8, 64)), rng.choice((0, 500)), rng.choice((1600, 1700)), rng.choice((0, 3)), 0
            )
        )
    return b"".join(dies)


STUBS: Final = {
    "nvml": Stub(
        "nvml", "LIMIT_STUB_STATE", _nvml,
        lambda what, value: {"power": 200_000 <= value <= 700_000, "clock": value in (0, 1200, 1500)}.get(what, True),
    ),
    "amd_smi": Stub(
        "amd_smi", "AMDSMI_STUB_STATE", _amd_smi,
        lambda what, value: {"power": value <= 560_000_000, "clock": 0 < value <= 1700}.get(what, True),
    ),
}  # fmt: skip


def build_nvml(folder: Path) -> Path:
    """Builds the stub of NVML."""
    library = folder / "libnvidia-ml.so.1"
    options = ("-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
    subprocess.run(["g++", *options, HERE / "limit_stub.cpp", "-o", library], check=True, timeout=120)
    return library


def build_amd_smi(folder: Path, package: Path, release: str = "7") -> Path:
    """Builds the stub of AMD SMI for the Python package in a folder; returns the ROCM_PATH that holds it."""
    source = HERE.parent / "tests/contracts/amd_smi_stub/amd_smi_stub.cpp"
    wrapper = (package / "amdsmi/amdsmi_wrapper.py").read_text()
    bound = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    written = set(re.findall(r"^uint32_t (amdsmi_\w+)\(", source.read_text(), re.MULTILINE))
    assert written <= bound, "the stub defines what no wrapper calls"
    (folder / "lib").mkdir(parents=True)
    (folder / "others.inc").write_text("".join(f"NOT_SUPPORTED({name})\n" for name in sorted(bound - written)))
    options = ("-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", f"-DROCM={release}", f"-I{folder}")
    subprocess.run(["g++", *options, source, "-o", folder / "lib/libamd_smi.so"], check=True, timeout=120)
    return folder


def load(backend: str, folder: Path, amdsmi: Path | None) -> None:
    """Loads the stub into this process, for all that it forks."""
    if backend == "nvml":
        ctypes.CDLL(str(build_nvml(folder)), ctypes.RTLD_GLOBAL)  # found again by its soname
        import pynvml  # noqa: F401

        import wattune.telemetry.nvml.settings

        return
    assert amdsmi is not None, "--amdsmi names the folder of the package"
    os.environ["ROCM_PATH"] = os.environ["ROCM_HOME"] = str(build_amd_smi(folder / "rocm", amdsmi))
    sys.path.insert(0, str(amdsmi))
    import wattune.telemetry.amd_smi.settings  # noqa: F401, I001
    import amdsmi as _  # noqa: F401


def fork(act: Callable[[], object], log: Path) -> int:
    """Runs something in a child in a session of its own; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        act()
        code = 0
    except BaseException as error:
        with open(log, "a") as file:
            file.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def wait(child: int, within_s: float = WAIT_S) -> bool:
    """Waits for a child's end; kills it where that takes too long. Returns whether it ended by itself."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _own(folder: Path, backend: str, seed: int) -> None:
    """Renews the lease, and asks for other settings every few milliseconds."""
    rng, values = random.Random(seed), VALUES[backend]
    for number in range(1, 10**9):
        renew(folder / LEASE)
        asked = {axis: rng.choice(several) for axis, several in values.items() if rng.random() < 0.7}
        write_json(folder / "want.json", {"number": number, "values": asked})
        time.sleep(rng.uniform(0.02, 0.1))


@contextmanager
def _setter(stub: Stub, place: Path, name: str, devices: int, log: Path) -> Iterator[tuple[Path, int]]:
    """Starts a setter with a lease in a folder of its own."""
    folder = place / name
    folder.mkdir()
    (folder / LEASE).touch()
    values = VALUES[stub.backend] if devices else {}
    child = fork(lambda: hold(folder, backend=stub.backend, num_devices=devices, values=values, lease_s=LEASE_S), log)
    yield folder, child


def death(stub: Stub, place: Path, seed: int) -> dict[str, Any]:
    """Lets one setter work and die; returns what came of it. The environment is that of the caller's process."""
    rng, log = random.Random(seed), place / "log"
    state, found = place / "state", stub.pack(random.Random(seed))
    state.write_bytes(found)
    os.environ |= {stub.variable: str(state), FOLDER_VARIABLE: str(place / "shared")}
    os.environ |= {"LIMIT_STUB_DELAY_US": "3000", "AMDSMI_STUB_DELAY_US": "3000"}
    victim, rivals = VICTIMS[seed % 3], []
    with _setter(stub, place, "first", 4, log) as (folder, setter):
        owner = fork(lambda: _own(folder, stub.backend, seed), log)
        begun_s, dies_s = time.monotonic(), rng.uniform(0, LIFE_S)
        for rival in range(2):
            time.sleep(max(0.0, begun_s + rng.uniform(0, dies_s) - time.monotonic()))
            with _setter(stub, place, f"rival{rival}", 4, log) as (_, child):
                rivals.append(child)
        time.sleep(max(0.0, begun_s + dies_s - time.monotonic()))
        for child, name in ((setter, "setter"), (owner, "owner")):
            with suppress(ProcessLookupError):
                if victim in (name, "both"):
                    os.kill(child, signal.SIGKILL)
        in_time = wait(setter)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    for child in rivals:
        in_time &= wait(child)
    changed = state.read_bytes() != found
    with _setter(stub, place, "next", 0, log) as (_, child):
        in_time &= wait(child)
    written = Path(f"{state}.log")
    sets = [line.split() for line in written.read_text().splitlines()] if written.exists() else []
    owners: dict[str, list[str]] = {}
    for pid, device, _, _ in sets:
        if owners.setdefault(device, [pid])[-1] != pid:
            owners[device].append(pid)
    return {
        "backend": stub.backend,
        "victim": victim,
        "died_at_s": round(dies_s, 4),
        "num_sets": len(sets),
        "num_owners": max((len(set(several)) for several in owners.values()), default=0),
        "num_restored_by_next": int(changed),
        "num_not_as_found": int(state.read_bytes() != found),
        "num_out_of_range": sum(not stub.in_range(what, int(value)) for _, _, what, value in sets),
        "num_two_owners": sum(len(several) != len(set(several)) for several in owners.values()),
        "num_too_late": int(not in_time),
        "num_records_left": len(list((place / "shared").glob("*.json"))),
    }


BAD: Final = ("num_not_as_found", "num_out_of_range", "num_two_owners", "num_too_late", "num_records_left")


def deaths(
    backend: str, num: int, seed: int, folder: Path, amdsmi: Path | None = None, at_once: int = 4
) -> list[dict[str, Any]]:
    """Lets that many setters die, several at once, each over devices of its own."""
    load(backend, folder, amdsmi)

    def one(number: int) -> dict[str, Any]:
        place = folder / f"death{number}"
        place.mkdir()
        read, write = os.pipe()
        child = fork(lambda: os.write(write, repr(death(STUBS[backend], place, number)).encode()), place / "log")
        os.close(write)
        with open(read, "rb") as told:
            text = told.read()
        os.waitpid(child, 0)
        if not text:
            raise RuntimeError(f"death {number}: {(place / 'log').read_text()}")
        result: dict[str, Any] = eval(text)
        if not any(result[name] for name in BAD):
            shutil.rmtree(place)
        return result

    with ThreadPoolExecutor(at_once) as pool:
        results = []
        for result in pool.map(one, range(seed, seed + num)):
            results.append(result)
            if len(results) % 50 == 0:
                print(f"{len(results)} of {num}", file=sys.stderr, flush=True)
        return results


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--backend", choices=STUBS, default="nvml")
    parser.add_argument("--amdsmi", type=Path, help="folder with the Python package amdsmi 7.0.2")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)


@benchmark(
    claim="Whatever sets devices may die at any moment: each device is left as it was found.",
    bar="0 deaths with a device changed, out of range, with two owners, too late or with a debt; 10 settings a death",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Lets setters die; `--csv` has a row a death."""
    folder = Path(tempfile.mkdtemp(prefix="limit-deaths-"))
    found = deaths(given.backend, given.num, given.seed, folder, given.amdsmi, given.at_once)
    rows = Rows(*found[0])
    for one in found:
        rows.add(*one.values())
    num_sets, bad = sum(one["num_sets"] for one in found), {name: sum(one[name] for one in found) for name in BAD}
    notes = [
        f"{len(found)} deaths over {given.backend}: {dict(Counter(one['victim'] for one in found))}",
        f"settings written: {num_sets:,} (at least 10 a death, or nothing was tried)",
        f"deaths whose debt the next setter paid: {sum(one['num_restored_by_next'] for one in found)}",
        f"deaths with several owners, one after another: {sum(one['num_owners'] > 1 for one in found)}",
        *(f"{name}: {count} (bar: 0)" for name, count in bad.items()),
    ]
    if not any(bad.values()):
        shutil.rmtree(folder)
    missed = [f"{name} {count}" for name, count in bad.items() if count]
    return Found(rows, notes, missed + (["too few settings"] if num_sets < 10 * len(found) else []))


if __name__ == "__main__":
    main()
