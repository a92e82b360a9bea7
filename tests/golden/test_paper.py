"""The 386 published files of "Characterizing the Efficiency of Distributed Training", as `wattune plan` judges them.

`paper/files.csv` is our transcription of sitar-lab/CharLLM-PPT at dad5f27 (MIT): a row a file, `batch_nodes` from its
batch script. `device` and `mode` are what the script starts. What must be found is in the artifact's own arithmetic,
written here without any rule of wattune's.
"""

import csv
import itertools
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import wattune
from wattune.api import forecast, scale
from wattune.catalog.models import MODELS
from wattune.errors import SpaceError

ROOT = Path(__file__).parents[2]
SPACES = sorted((ROOT / "search_spaces" / "paper").glob("*.yaml"))
TEXTS = ("family", "folder", "file", "mode", "device")
Row = dict[str, Any]
ROWS: list[Row] = [
    {name: value if name in TEXTS else int(value) for name, value in row.items()}
    for row in csv.DictReader((Path(__file__).parent / "paper" / "files.csv").open())
]
DEGREES = ("tp", "pp", "dp", "ep", "seq_len")
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads")


def dp(row: Row) -> int:
    return int(row["num_nodes"] * 8 / (row["tp"] * row["pp"]))


def model(row: Row) -> str:
    return row["file"].split("_")[0].replace("-", "_")


def entry(row: Row) -> dict[str, Any]:
    """The file as an entry of `plans`. Where its switch sets several overlaps, that of tensor parallel ranks stands."""
    overlap = "tp" if row["tp_overlap"] else "grad_param" if row["dp_overlap"] else "none"
    sharding = "zero3" if row["fsdp"] else "zero1" if row["mode"] == "pretrain" else "none"
    kept = ("tp", "pp", "ep", "micro_batch_size", "global_batch_size", "seq_len")
    recompute = "full" if row["recompute"] else "none"
    return {**{name: row[name] for name in kept}, "dp": dp(row)} | {
        "sharding": sharding,
        "recompute": recompute,
        "overlap": overlap,
    }


def document(rows: list[Row]) -> dict[str, Any]:
    """The space of files of one family, model and batch script, with a plan a file."""
    first, name = rows[0], model(rows[0])
    own = {size: first[size] for size in SIZES if first[size] != getattr(MODELS[name], size)}
    lora = {"lora": {"rank": 32, "targets": ["q", "k", "v"]}} if first["mode"] == "lora" else {}
    engine = "torch" if first["fsdp"] else "megatron"
    te = {"transformer_engine": True} if engine == "megatron" and first["mode"] == "pretrain" else {}
    sizes = {key: sorted({row[key] for row in rows}) for key in ("seq_len", "global_batch_size")}
    return {
        "study": "published",
        "model": {"name": name, **own},
        "cluster": {"device": first["device"], "num_nodes": first["batch_nodes"], "devices_per_node": 8, **te},
        "engine": engine,
        "workload": {"mode": first["mode"], **sizes, **lora},
        "plans": [entry(row) for row in rows],
        "objective": "maximize tokens_per_s",
    }


def judged(rows: list[Row]) -> list[tuple[str, str]]:
    """Rule and reason, or `kept` and the trial that stands for it, of each file; files must differ."""
    made = document(rows)
    planned = wattune.plan(made)
    found = forecast(planned)
    # What does not fit is judged behind the rules, so it is one of the kept.
    verdicts = [(one.config, "kept", one.trial_id) for one in planned.kept]
    verdicts += [(one.config, "kept", one.into) for one in planned.equivalent]
    verdicts += [(one.config, one.rule, one.reason) for one in (*planned.rejected, *found.rejected)]
    of = {frozenset((*made["plans"][0],)) & {*config}: None for config, _, _ in verdicts}
    (names,) = of
    table = {tuple(config[name] for name in sorted(names)): (rule, text) for config, rule, text in verdicts}
    return [table[tuple(plan[name] for name in sorted(names))] for plan in made["plans"]]


def group(row: Row) -> tuple[Any, ...]:
    return row["family"].replace("-fsdp", ""), row["fsdp"], model(row), row["mode"], *(row[size] for size in SIZES)


@cache
def verdicts() -> dict[tuple[str, str, str], tuple[str, str]]:
    """Verdict by family, folder and file, with `copy` for one that another folder has too."""
    found: dict[tuple[str, str, str], tuple[str, str]] = {}
    for _, of_group in itertools.groupby(sorted(ROWS, key=group), key=group):
        rows, copies = list(of_group), []
        own = lambda row: row["folder"].replace("-", "_") == model(row)  # noqa: E731 - the folder's own file first
        rows.sort(key=own, reverse=True)
        try:
            wattune.plan(document(rows))
        except SpaceError as error:
            lines = error.problems
            assert all("the same as entry" in line for line in lines), error
            copies = [int(line.split("[")[1].split("]")[0]) for line in lines]
        for place in copies:
            found[tuple(rows[place][name] for name in ("family", "folder", "file"))] = "copy", lines[0]
        first = [row for place, row in enumerate(rows) if place not in copies]
        for row, verdict in zip(first, judged(first), strict=True):
            found[row["family"], row["folder"], row["file"]] = verdict
    return found


def verdict(row: Row) -> tuple[str, str]:
    return verdicts()[row["family"], row["folder"], row["file"]]


def breaks_arithmetic(row: Row) -> bool:
    """Tells files whose stages have no equal layers, or whose batch has no whole micro-batches."""
    return row["num_layers"] % row["pp"] > 0 or row["global_batch_size"] % (row["micro_batch_size"] * dp(row)) > 0


def weights_gb(row: Row) -> float:
    """Gigabytes of bf16 weights of one rank, by the published number of parameters (billions)."""
    dense, experts = {"gpt3_175b": (174.6, 0), "llama3_70b": (70.6, 0), "mixtral_8x22b": (5.3, 135.3)}.get(
        model(row), (1.6, 45.1)
    )
    return (
        2 * (dense / (row["tp"] * row["pp"]) + experts / (row["tp"] * row["pp"] * row["ep"])) / (dp(row) ** row["fsdp"])
    )


def misplaced(row: Row) -> bool:
    return row["folder"].replace("-", "_") != model(row)


def test_the_transcription_has_the_published_counts():
    assert len(ROWS) == 386
    assert sum(map(breaks_arithmetic, ROWS)) == 25
    assert sum(weights_gb(row) > 141 for row in ROWS) == 38
    assert sum(row["num_nodes"] != row["batch_nodes"] for row in ROWS) == 8
    assert sum(map(misplaced, ROWS)) == 32
    assert sum(model(row) == "mixtral_8x7b" and row["hidden_size"] == 6144 for row in ROWS) == 22


def test_every_flagged_file_is_told_and_why():
    flagged = set()
    for row in ROWS:
        rule, reason = verdict(row)
        name = row["family"], row["folder"], row["file"]
        other = model(row) == "mixtral_8x7b" and row["hidden_size"] == 6144
        if misplaced(row):
            assert rule == "copy", row
        elif row["num_nodes"] != row["batch_nodes"]:
            assert rule == "world_size" and "dp=4 is not world_size=64" in reason
        elif breaks_arithmetic(row):
            assert rule == ("layers" if row["num_layers"] % row["pp"] else "batch"), (row, rule)
        elif weights_gb(row) > 141:
            assert rule == "memory", (row, rule)
        else:
            twin = (
                row["family"].startswith("optimization") and row["ep"] > 1 and row["tp"] == 1 and row["file"][-5] == "1"
            )
            assert rule == "copy" if twin else rule in ("kept", "memory"), (row, rule, reason)
            if not other:
                continue
        flagged.add(name)
    assert len(flagged) == 97


def test_a_model_that_is_not_what_its_name_says_is_told():
    (one,) = wattune.plan(
        document([row for row in ROWS if row["hidden_size"] == 6144 and row["num_layers"] == 32][:1])
    ).warnings
    assert "mixtral_8x7b with hidden_size=6144 is another model" in one and "catalog: 4096" in one
    (twin,) = wattune.plan(document([ROWS[0]]) | {"model": {"name": "llama3_8b", **_numbers("llama3_70b")}}).warnings
    assert "its numbers are those of llama3_70b" in twin
    plain = document([ROWS[0]])
    assert wattune.plan(plain).warnings == ()
    fewer = wattune.plan(plain | {"model": {"name": "mixtral_8x7b", "num_layers": 16, "hidden_size": 256}})
    assert fewer.warnings == (), "a toy of few layers is no claim about the model"


def _numbers(name: str) -> dict[str, int]:
    return {size: getattr(MODELS[name], size) for size in (*SIZES, "num_kv_heads")}


def pairs() -> list[tuple[Row, Row]]:
    """The files that differ by the overlap switch alone: suffixes 0x000 and 1x000."""
    swept = {(row["family"], row["file"]): row for row in ROWS if row["family"].startswith("optimization")}
    return [
        (row, swept[family, f"{file[:-5]}1{file[-4:]}"]) for (family, file), row in swept.items() if file[-5] == "0"
    ]


def test_twenty_pairs_of_overlap_off_and_on_are_the_same_run():
    same = []
    for off, on in pairs():
        rows = [row | {"batch_nodes": row["num_nodes"]} for row in (off, on)]  # the nodes that its settings say
        if entry(off) == entry(on):
            with pytest.raises(SpaceError, match="the same as entry 0"):
                wattune.plan(document(rows))
        elif not wattune.plan(document(rows)).equivalent:
            continue
        same.append((off["family"], off["file"]))
    assert len(pairs()) == 64 and len(same) == 20, same
    assert Counter(file.rsplit("_", 2)[0] for _, file in same) == Counter(
        {"gpt3-175b": 6, "llama3-70b": 4, "mixtral-8x22b": 4, "mixtral-8x7b": 6}
    )


@pytest.mark.parametrize("seed", range(3))
def test_tuples_that_nobody_published_are_judged_by_rule(seed: int):
    """Mutants: every degree, size and node count drawn anew, against plain arithmetic."""
    draw = random.Random(seed)
    row = draw.choice([row for row in ROWS if not misplaced(row) and row["mode"] == "pretrain"])
    heads = {"gpt3_175b": 96, "llama3_70b": 8, "mixtral_8x22b": 8, "mixtral_8x7b": 8}[model(row)]
    rows, expected = [], []
    while len(rows) < 60:
        tp, pp = (draw.choice([1, 2, 3, 4, 6, 8, 16, 20, 32]) for _ in range(2))
        size, batch = draw.choice([1, 2, 3, 4, 8, 16]), draw.choice([32, 96, 128])
        one = row | {"tp": tp, "pp": pp, "micro_batch_size": size, "global_batch_size": batch, "ep": 1, "fsdp": 0}
        stated, world = draw.choice([1, 2, 4, 8, 16, 32]), row["batch_nodes"] * 8
        if any(entry(other) == entry(one) for other in rows):
            continue
        one["num_nodes"] = tp * pp * stated / 8  # what `dp` reads
        expected.append(
            tp * pp * stated == world
            and heads % tp == 0
            and row["num_layers"] % pp == 0
            and batch % (size * stated) == 0
        )
        rows.append(one)
    assert [rule in ("kept", "memory") for rule, _ in judged(rows)] == expected
    assert any(expected) and not all(expected)


STEPS = {
    "tp": (lambda n: 2 * n, lambda n: n + 1),
    "pp": (lambda n: 2 * n, lambda n: n + 1),
    "ep": (lambda n: n + 1, lambda n: 2 * n),
    "micro_batch_size": (lambda n: n + 1, lambda n: 3 * n),
    "global_batch_size": (lambda n: n + 1, lambda n: n - 1),
    "num_nodes": (lambda n: 2 * n, lambda n: n + 1),
}
"""One number of a file, off by one or by a factor."""


def test_one_number_of_a_file_changed_is_told():
    """Mutants of sound files of every kind of work: those that cannot run are told, and those that can are kept."""
    draw = random.Random(0)
    judged_as: Counter[str] = Counter()
    sound = [row for row in ROWS if not misplaced(row) and verdict(row)[0] == "kept"]
    for family in sorted({group(row) for row in sound}):
        rows, expected = [], []
        for row in draw.sample(own := [row for row in sound if group(row) == family], min(len(own), 12)):
            key = draw.choice([key for key in STEPS if key != "ep" or row["ep"] > 1])
            one = row | {key: draw.choice(STEPS[key])(row[key])}
            if not dp(one) or any(entry(one) == entry(other) for other in rows):
                continue
            heads = {"gpt3_175b": 96}.get(model(row), 8)
            rows.append(one)
            expected.append(
                one["tp"] * one["pp"] * dp(one) == one["batch_nodes"] * 8
                and heads % one["tp"] == 0
                and not breaks_arithmetic(one)
                and (one["ep"] == 1 or (8 % one["ep"] == 0 and dp(one) % one["ep"] == 0))
            )
        # What does not fit is told too, but by its size.
        found = judged(rows)
        assert [rule in ("kept", "memory") for rule, _ in found] == expected, [*zip(rows, found, expected, strict=True)]
        judged_as.update(rule for rule, _ in found)
    assert judged_as["kept"] >= 5 and judged_as.keys() >= {"world_size", "batch", "layers"}, judged_as


@pytest.mark.parametrize("overlap", ["grad_param", "tp"])
def test_a_switch_that_nobody_published_is_the_same_run_where_nothing_is_left_to_overlap(overlap: str):
    row = next(row for row in ROWS if model(row) == "llama3_70b" and row["mode"] == "pretrain" and not row["fsdp"])
    for tp, pp in itertools.product([1, 2, 4, 8], [1, 2, 4, 8, 16, 20]):
        off = row | {"tp": tp, "pp": pp, "num_nodes": row["batch_nodes"], "micro_batch_size": 1, "recompute": 1}
        if off["batch_nodes"] * 8 % (tp * pp) or off["num_layers"] % pp:
            continue
        made = document([off | {"tp_overlap": 0, "dp_overlap": 0}])
        made["plans"].append(made["plans"][0] | {"overlap": overlap})
        planned = wattune.plan(made)
        idle = tp == 1 if overlap == "tp" else dp(off) == 1
        assert len(planned.equivalent) == idle and len(planned.kept) == 2 - idle, (tp, pp, overlap)


COUNTS = {
    "fsdp_h100x64": (4, 4, 8),
    "fsdp_h200x32": (16, 16, 0),
    "lora_h200x32": (61, 0, 7),
    "micro_batch_h200x32": (51, 0, 1),
    "micro_batch_mi250x32": (30, 0, 0),
    "optimization_h100x64": (56, 6, 6),
    "optimization_h200x32": (52, 10, 0),
    "parallelism_h100x64": (14, 0, 1),
    "parallelism_h200x32": (13, 0, 0),
    "parallelism_mi250x32": (10, 0, 0),
    "prefill_h200x32": (87, 0, 11),
}
"""Kept, equivalent and rejected by the rules, of each shipped sweep."""


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_each_sweep_plans(path: Path):
    planned = wattune.plan(path)
    total = len(planned.kept) + len(planned.rejected) + len(planned.equivalent)
    assert total == planned.spec.num_combinations and planned.kept
    assert COUNTS[path.stem] == (len(planned.kept), len(planned.equivalent), len(planned.rejected))
    assert all("dp" in plan for plan in planned.spec.plans), "a tuple is data"


def test_the_sweeps_hold_the_published_tuples():
    """Every file of the artifact, with the right width, is a combination of a shipped sweep."""
    shipped, published = set(), {(model(row), row["device"], *(entry(row)[name] for name in DEGREES)) for row in ROWS}
    for path in SPACES:
        planned = wattune.plan(path)
        for one in (*planned.kept, *planned.equivalent, *planned.rejected):
            config = one.config
            several = planned.spec.workloads
            length = config.get("seq_len", several[0].seq_len)
            degrees = (*(config.get(name, 1) for name in DEGREES[:-1]), length)
            device = planned.spec.clusters[0].rank_device.name
            assert (config["model"], device, *degrees) in published or device == "mi250_gcd", "a tuple of nobody"
            shipped.add(
                (
                    config["model"],
                    several[0].mode,
                    planned.spec.clusters[0].rank_device.name,
                    *(config.get(name, 1) for name in ("tp", "pp", "dp", "ep", "micro_batch_size")),
                    config.get("global_batch_size", several[0].global_batch_size),
                    config.get("seq_len", several[0].seq_len),
                    config.get("sharding", "none"),
                    config.get("recompute", "none"),
                    config.get("overlap", "none"),
                )
            )
    for row in ROWS:
        plan = entry(row)
        names = (
            "tp",
            "pp",
            "dp",
            "ep",
            "micro_batch_size",
            "global_batch_size",
            "seq_len",
            "sharding",
            "recompute",
            "overlap",
        )
        assert (model(row), row["mode"], row["device"], *(plan[name] for name in names)) in shipped, row
    assert yaml.safe_load(SPACES[0].read_text())["study"].startswith("paper_")


def test_a_sweep_scales_to_one_node_with_its_distance():
    """On four devices what stands for a tuple is within the distance allowed, and the rest is told."""
    path = ROOT / "search_spaces" / "paper" / "parallelism_h200x32.yaml"
    _, planned, distances = scale(path, "1x4", allow_percent=12)
    assert all(one.percent <= 12 for one in distances)
    assert len(planned.kept) >= 8 and {one.spec.model.name for one in planned.kept} >= {"gpt3_175b", "mixtral_8x7b"}
    assert len(planned.kept) + len(planned.rejected) == len(wattune.plan(path).kept)
    assert {one.rule for one in planned.rejected} == {"scale_down"}


def sweep(name: str) -> list[tuple[Row, dict[str, float]]]:
    """Configurations of a shipped sweep that may fit, with their estimates."""
    found = forecast(ROOT / "search_spaces" / "paper" / f"{name}.yaml")
    columns = found.estimates.columns
    return [
        (dict(one.config), {metric: float(column.value[place]) for metric, column in columns.items()})
        for place, one in enumerate(found.kept)
    ]


def figure(rows: list[tuple[Row, dict[str, float]]], metric: str, **config: Any) -> float:
    (found,) = [figures for own, figures in rows if all(own.get(key) == value for key, value in config.items())]
    return found[metric]


def test_the_page_says_what_the_sweeps_estimate():
    page = " ".join((ROOT / "docs" / "paper.md").read_text().split())
    small, large = sweep("parallelism_h200x32"), sweep("parallelism_h100x64")
    sizes, fsdp, optimized = sweep("micro_batch_h200x32"), sweep("fsdp_h200x32"), sweep("optimization_h200x32")
    speed, power, energy = "tokens_per_s", "device_power_mean_w", "energy_per_token_j"
    gpt, llama, mixtral = {"model": "gpt3_175b"}, {"model": "llama3_70b"}, {"model": "mixtral_8x22b"}

    def by_size(size: int, metric: str, tp: int) -> float:
        return figure(sizes, metric, **gpt, tp=tp, micro_batch_size=size)

    def gathered(size: int) -> float:
        return figure(fsdp, speed, **gpt, micro_batch_size=size, recompute="full", overlap="none")

    def at_tp4(kept: str) -> float:
        return figure(optimized, speed, **llama, tp=4, recompute=kept, overlap="none")

    figures = {
        "{:.1f} times the tokens/s at TP4": figure(large, speed, **llama, tp=4) / figure(small, speed, **llama, tp=4),
        "{:.2f} times the tokens/s, at": figure(small, speed, **gpt, tp=2) / figure(large, speed, **gpt, tp=2),
        "at {:.2f} times the energy": figure(small, energy, **gpt, tp=2) / figure(large, energy, **gpt, tp=2),
        "{:.0f} times as fast over": figure(small, speed, **mixtral, tp=1) / figure(small, speed, **mixtral, tp=4),
        "{:.0f} W a device at PP16": figure(small, power, **gpt, tp=2),
        "{:.0f} W at PP8": figure(small, power, **gpt, tp=4),
        "keeps {:.2f} of its speed": at_tp4("full") / at_tp4("none"),
        "| {:.1f} times |": gathered(4) / gathered(1),
        **{"%.2f" % (by_size(size, speed, 2) / by_size(1, speed, 2)): 0.0 for size in (2, 4, 8)},
        "{:.0f} W falls": by_size(1, power, 2),
        "to {:.0f} W from 1 to 8": by_size(8, power, 2),
        "rises to {:.0f} W at 2": by_size(2, power, 8),
    }
    assert [text.format(value) for text, value in figures.items() if text.format(value) not in page] == []
    assert not [
        own for own, _ in optimized if own["model"] == "mixtral_8x22b" and (own["tp"], own["recompute"]) == (1, "none")
    ]


def test_the_page_of_projections_says_what_a_faster_network_brings():
    """Speed of 800 over 100 Gb/s a device on 8,192 H100."""
    page, long = (ROOT / "docs" / "projection.md").read_text(), {"seq_len": 8192, "recompute": "full"}
    wide: dict[str, Any] = {**long, "tp": 8, "sharding": "zero1", "global_batch_size": 2048, "engine": "megatron"}
    plans = {
        "Llama-3 8B +{:.0f} %": {**wide, "model": "llama3_8b", "tp": 2, "global_batch_size": 8192},
        "70B +{:.0f} %": {**wide, "model": "llama3_70b", "pp": 4},
        "405B +{:.0f} %": {**wide, "model": "llama3_1_405b", "pp": 16, "layout": [8] * 14 + [7, 7]},
    }
    for text, plan in plans.items():
        slow, fast = (
            wattune.estimate(cluster=f"1024x8 h100_sxm over {network}", **plan).figures["step_time_s"]["value"]
            for network in ("roce_100", "xdr")
        )
        assert text.format(100 * (slow / fast - 1)) in page
