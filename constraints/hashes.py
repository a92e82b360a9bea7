"""Writes pins with the SHA-256 of the files that pip would install here, for `pip install --require-hashes`.

    python constraints/hashes.py constraints/cpu.txt --out constraints/cpu.hashes.txt
    pip install --require-hashes --no-deps -r constraints/cpu.hashes.txt

pip itself chooses the files and names their digests (`pip install --dry-run --report`); nothing is installed. The
result is for this Python and this kind of machine. Options after `--` are pip's, such as `-- --extra-index-url URL`.
Exit code 2 where a pin is not an exact version, or where pip finds no file for one.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

PIN: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;*]+)\s*(?:;\s*(?P<marker>.+))?")
"""A line of a constraints file: one name, one exact version, and where it applies."""


def plain(name: str) -> str:
    """Returns a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(path: Path) -> dict[str, str]:
    """Reads the pins of a constraints file by plain name.

    Raises:
        ValueError: A line is no exact version, or two are of one package.
        OSError: The file cannot be read.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = PIN.fullmatch(text)
        if match is None:
            raise ValueError(f'{path}:{number}: "{text}" is not an exact version; write name==version')
        if found.setdefault(plain(match["name"]), text) != text:
            raise ValueError(f"{path}:{number}: {match['name']} is pinned twice; keep one of the two")
    return found


def report_of(path: Path, options: list[str]) -> dict[str, Any]:
    """Asks pip which files it would install for the pins.

    Raises:
        ValueError: pip refuses; its last words are the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--report", str(report), *options, "--requirement", str(path)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not report.exists():
            raise ValueError(f"pip finds no files for {path}: {' '.join(done.stderr.split()[-60:])}")
        found: dict[str, Any] = json.loads(report.read_text())
    return found


def hashed(pins: dict[str, str], report: dict[str, Any]) -> list[str]:
    """Puts pip's digests beside the pins.

    Returns:
        A line for each pin that applies here, in the order of the names.

    Raises:
        ValueError: A file has no SHA-256, or pip chose one that nobody pinned.
    """
    lines = []
    for item in report["install"]:
        name = plain(item["metadata"]["name"])
        if name not in pins:
            raise ValueError(f"pip would install {name}, which is not pinned; add it")
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"pip names no SHA-256 of {pins[name]}; take it from an index or a folder of files")
        lines.append(f"{pins[name]} --hash=sha256:{digest}")
    return sorted(lines, key=str.lower)


def main() -> int:
    """Writes the file; returns 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pins", type=Path, help="constraints file: name==version on each line")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    try:
        lines = hashed(pins_of(given.pins), report_of(given.pins, words[end + 1 :]))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    made_for = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    head = f"# {given.pins.name} with the SHA-256 of each file, for {made_for}, {sys.platform} {platform.machine()}.\n"
    head += "# Made by `make hashes`. Install with `pip install --require-hashes --no-deps -r` this file.\n"
    given.out.write_text(head + "\n".join(lines) + "\n")
    sys.stdout.write(f"{given.out}: {len(lines)} pins\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
