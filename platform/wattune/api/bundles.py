"""Results as one zip file with checksums, to hand on; and checking one, which derives its verdicts anew."""

import io
import json
import math
import zipfile
import zlib
from collections import Counter
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow.parquet as pq

from wattune.api.experiments import judged
from wattune.api.exports import export
from wattune.api.reports import report
from wattune.api.results import folder_of, rank
from wattune.errors import PlanError, WattuneError
from wattune.intervals import t_quantile
from wattune.storage.digests import FILES, object_of, with_digest
from wattune.storage.files import is_file_of, is_inside, named_path
from wattune.units import unit_of
from wattune.version import __version__
from wattune.view.files import ranking_table

_LIST: Final = "bundle.json"
_LEAST_REACH: Final = 0.2  # of an interval by its runs alone; all runs of a study tell more. Our choice
_MOST_BYTES: Final = 2**29  # of all files, unpacked: a thousand trials take some 20 MB. Our choice
_OF_STUDY: Final = ("study.yaml", "space.*.yaml", "candidates.parquet", "trials/*/spec.json", "trials/*/run.json")
_DAMAGE: Final = (WattuneError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
_CITATION: Final = """cff-version: 1.2.0
message: Cite these results so.
type: dataset
title: {title}
authors: [name: The authors of these results]
references: [{{type: software, title: wattune, version: {version}, authors: [name: The wattune authors]}}]
"""


def packed(name: str, *, storage: str | None = None) -> bytes:
    """Returns a study, whose report is written anew, or a folder of experiments or of their results, as a zip file."""
    place = named_path(name)
    results = place / "results" if (place / "results").is_dir() else place
    if not (place / "study.yaml").exists() and any(b'"claims"' in one.read_bytes() for one in results.glob("*.json")):
        kind, title = "experiments", place.absolute().name
        files = _found(results, "results/", "*.json", "*.svg", "*.parquet")
        files |= _found(results.parent, "", *(f"{one.stem.split('@')[0]}.py" for one in results.glob("*.json")))
    else:
        study = folder_of(name, storage=storage)
        report(study)
        kind, title, files = "study", study.name, _found(study.path, "study/", *_OF_STUDY)
        files |= _found(study.path, "", "ranking.parquet", "report.html")
        files["repeats.parquet"] = export(study, "parquet")
    files["CITATION.cff"] = _CITATION.format(title=json.dumps(title), version=__version__).encode()
    digests = {one: sha256(content).hexdigest() for one, content in files.items()}
    files[_LIST] = with_digest({"kind": kind, "name": title, "version": __version__, FILES: digests})
    packet = io.BytesIO()
    with zipfile.ZipFile(packet, "w") as file:
        for one in sorted(files):
            file.writestr(zipfile.ZipInfo(one), files[one], zipfile.ZIP_DEFLATED)
    return packet.getvalue()


def check_bundle(path: Path) -> dict[str, Any]:
    """Compares the files of a bundle with their checksums, and derives its verdicts anew. Runs no code of it.

    A study is ranked again. A verdict of an experiment follows again from its interval, which must hold the effect of
    the runs beside it. Returns `verdicts` (how many of each were derived) and `differences` (what is wrong, by file).
    Raises `PlanError`: it is no bundle, or a damaged one. Nothing is written but to a temporary folder.
    """
    verdicts = Counter[str]()
    with TemporaryDirectory() as text:
        folder = Path(text)
        try:
            here = _unpacked(path, folder)
            told = object_of((folder / _LIST).read_bytes())
            facts, listed = {key: str(told[key]) for key in ("name", "version")}, {**told[FILES], _LIST: here[_LIST]}
            derive = {"study": _ranks, "experiments": _claims}[told["kind"]]
        except (*_DAMAGE, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise PlanError(f"{path} is no whole bundle: {str(error) or 'it ends early'}; get it again") from error
        wrong = dict.fromkeys(listed.keys() ^ here.keys(), "not there, or not in the list of files")
        wrong |= {one: "differs from its checksum" for one, was in listed.items() if here.get(one, was) != was}
        for one in wrong.keys() & here.keys():  # never a name that only the list has: it may lead out of the folder
            (folder / one).unlink()
        for place in sorted(folder.glob("ranking.parquet" if derive is _ranks else "results/*.json")):
            try:
                found = derive(place)
            except _DAMAGE as error:
                found = {f"no verdict can be derived, {type(error).__name__} {error}": ("", "unknown")}
            verdicts.update(now.partition(";")[0] for _, now in found.values())
            lines = [f"{what}: packed {was}, derived {now}" for what, (was, now) in found.items() if was != now]
            wrong |= {place.relative_to(folder).as_posix(): "\n ".join(lines)} if lines else {}
    return {**facts, FILES: len(here), "verdicts": dict(verdicts), "differences": dict(sorted(wrong.items()))}


def _found(folder: Path, below: str, *patterns: str) -> dict[str, bytes]:
    paths = [path for one in patterns for path in folder.glob(one) if is_file_of(folder, path)]
    return {below + path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _unpacked(path: Path, folder: Path) -> dict[str, str]:
    """Writes the files of a zip file to a folder, after a look at names and sizes; returns the SHA-256 of each."""
    if not path.is_file():
        raise ValueError("no such file")
    with zipfile.ZipFile(path) as file:
        names = [one.orig_filename for one in file.infolist()]
        if odd := [one for one in names if not is_inside(one) or {*"\\:"} & {*one} or not one.isprintable()]:
            raise ValueError(f"the name {odd[0][:60]!r} leads out of it")
        if (size := sum(one.file_size for one in file.infolist())) > _MOST_BYTES:
            raise ValueError(f"{size:,} bytes unpacked, allowed: {_MOST_BYTES:,}")
        if len({*names}) < len(names) or _LIST not in names:
            raise ValueError(f"it lacks {_LIST}, or has a file twice")
        for one in names:
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (folder / one).write_bytes(file.read(one))
    return {one: sha256((folder / one).read_bytes()).hexdigest() for one in names}


def _ranks(path: Path) -> dict[str, tuple[str, str]]:
    """Returns verdict and rank of each trial of a study, as packed and as ranked again."""
    tables = (pq.read_table(path), ranking_table(rank(path.parent / "study")))
    there, here = ({row["trial_id"]: f"{row['verdict']}; {row['rank']}" for row in one.to_pylist()} for one in tables)
    return {one: (there.get(one, "none"), here.get(one, "none")) for one in there | here}


def _claims(path: Path) -> dict[str, tuple[str, str]]:
    """Returns the verdicts of an experiment's claims, as packed and as judged again; the first is its own."""
    result, tested = json.loads(path.read_bytes()), []
    rows = pq.read_table(path.with_suffix(".parquet")).to_pylist() if result["evidence"] != "estimated" else []
    if {row["cluster"] for row in rows} - {result["hardware"]}:
        raise ValueError(f"its runs are not of {result['hardware']}")
    there, here = [result["verdict"]], []
    for one in result["claims"]:
        there.append(one["verdict"])
        here.append(judged(one["expected"], one)["verdict"])
        if rows and one["high"] is not None:
            kelvin, own = unit_of(one["metric"]) == "degC", dict[str, list[float]]()
            for row in (row for row in rows if row[one["metric"]] is not None):
                own.setdefault(row["trial_id"], []).append(
                    row[one["metric"]] if kelvin else math.log(row[one["metric"]])
                )
            a, b = (own[arm] for arm in sorted(own))
            low = -math.inf if one["low"] is None else one["low"]
            tested.append((low, fmean(b) - fmean(a), one["high"]))
            free, ends = len(a) + len(b) - 2, [low, one["high"], one["effect"]]
            # About the effect as a log ratio, or as a difference where the metric can be 0.
            about = min(abs(low + high - 2 * effect) for low, high, effect in (ends, map(math.expm1, ends)))
            if one["low"] is None:  # the difference holds a fall to nothing, which has no logarithm
                about = 2 * math.expm1(one["effect"]) - math.expm1(one["high"]) + 1.0
            spread = sum((value - fmean(arm)) ** 2 for arm in (a, b) for value in arm) / max(free, 1)
            reach = t_quantile(max(free, 1)) * math.sqrt(spread * (1 / len(a) + 1 / len(b)))
            if about > 1e-9 or one["high"] - low < 2 * _LEAST_REACH * reach:
                raise ValueError(f"the interval of {one['metric']} is not that of its runs")
    # The table does not say which arm is the first one, so either may be, for all claims.
    if not any(all(low <= sign * effect <= high for low, effect, high in tested) for sign in (1, -1)):
        raise ValueError("its intervals do not hold the effects of its runs")
    return {"verdicts": ("; ".join(there), "; ".join([here[0], *here]))}
