"""Metrics as Prometheus reads them: names, units, labels, and what is left out."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from exposed_snapshot import NOW_NS, row, snapshot, view
from living_sampler import LivingSampler
from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from wattune.recording.serving import follower
from wattune.recording.serving.families import DEVICE_COLUMNS, NODE_COLUMNS, families
from wattune.recording.serving.follower import ClockLost, Peaks
from wattune.schema import TELEMETRY
from wattune.telemetry.sampler.process import SamplerProcess

BASE_UNITS = {"watts", "joules", "hertz", "celsius", "ratio", "bytes", "seconds"}


def read(found: list[Metric]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Returns samples by name and labels, through the encoder and the parser."""

    class Collected:
        def collect(self) -> list[Metric]:
            return found

    text = generate_latest(Collected()).decode()
    assert text.endswith("# EOF\n")
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {}), (sample.name, labels)
            samples[sample.name][labels] = sample.value
    return samples


def value(samples: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str, /, **labels: str) -> float:
    (found,) = [
        number for key, number in samples[name].items() if labels.items() <= dict(key).items()
    ]  # exactly one sample has these labels
    return found


def test_of_several_recordings_each_device_is_there_and_a_node_s_own_readings_once() -> None:
    newer = snapshot(
        recording="newer", devices={"gpu1": view(facts={"uuid": "GPU-2"})}, host=row("host", cpu_busy_frac=0.5)["host"]
    )
    older = snapshot(devices={"gpu0": view()}, host=row("host", cpu_busy_frac=0.25)["host"])
    elsewhere = snapshot(node="n1", recording="third", devices={})
    samples = read(families([newer, older, elsewhere], NOW_NS))
    assert {dict(key)["recording"] for key in samples["wattune_recording_info"]} == {"newer", "mine", "third"}
    watts = samples["wattune_device_power_watts"]
    assert sorted(dict(key)["device"] for key in watts) == ["gpu0", "gpu1"]
    assert value(samples, "wattune_node_cpu_busy_ratio", node="n0") == 0.5, "of the newest recording"
    assert len(samples["wattune_sampler_up"]) == 2, "one a node"


def test_values_are_in_base_units() -> None:
    latest = {
        **row("fast", power_instant_w=700.5, sm_clock_mhz=1515.0, event_reasons=float(0x4 | 0x1), gpu_temp_c=58.0),
        **row("slow", energy_j=1e6, throttle_power_ns=2.5e9, memory_used_bytes=2.0**30),
        **row("counter", nvlink_tx_bytes=4096.0, tensor_active_frac=0.7),
    }
    samples = read(families([snapshot(devices={"gpu0": view(latest=latest)})], NOW_NS))
    who = {"node": "n0", "device": "gpu0", "uuid": "GPU-1"}
    assert value(samples, "wattune_device_power_watts", **who) == 700.5
    assert value(samples, "wattune_device_sm_clock_hertz", **who) == 1.515e9
    assert value(samples, "wattune_device_sm_clock_max_hertz", **who) == 1.98e9
    assert value(samples, "wattune_device_energy_joules_total", **who) == 1e6
    assert value(samples, "wattune_device_driver_throttle_seconds_total", cause="power") == 2.5
    assert value(samples, "wattune_device_memory_used_bytes", **who) == 2.0**30
    assert value(samples, "wattune_device_link_bytes_total", link="nvlink", direction="transmit") == 4096
    assert value(samples, "wattune_device_active_ratio", part="tensor") == 0.7
    assert value(samples, "wattune_device_temperature_celsius", sensor="core") == 58.0
    assert value(samples, "wattune_device_throttle_reason_active", cause="power") == 1.0
    assert value(samples, "wattune_device_throttle_reason_active", cause="thermal") == 0.0
    assert value(samples, "wattune_device_power_peak_watts", window="20ms") == 930.0
    assert value(samples, "wattune_device_power_recent_peak_watts", window="1s") == 650.0
    assert value(samples, "wattune_device_clock_lost_seconds_total", **who) == 1.5
    assert value(samples, "wattune_node_devices_power_peak_watts", window="1s") == 1400.0
    assert value(samples, "wattune_recording_start_time_seconds") == 1.7e9
    assert value(samples, "wattune_sampler_failed_reads_total", code="999") == 2
    assert value(samples, "wattune_reading_age_seconds", tier="fast") == 0.5


def test_what_was_not_read_is_absent() -> None:
    bare = view(facts={}, latest=row("fast", power_instant_w=1.0), clock_lost=ClockLost(), peaks=Peaks())
    samples = read(families([snapshot(devices={"gpu0": bare}, host=None)], NOW_NS))
    names = {name for name in samples if name.startswith(("wattune_device", "wattune_node"))}
    assert names - {"wattune_node_devices_power_peak_watts", "wattune_node_devices_power_recent_peak_watts"} == {
        "wattune_device_info",
        "wattune_device_power_watts",
    }


def test_an_old_reading_is_not_shown_as_a_new_one() -> None:
    samples = read(families([snapshot()], NOW_NS + 10_000_000_000))
    assert not {name for name in samples if "_power_" in name or "_lost_" in name or name.startswith("wattune_node_")}
    assert value(samples, "wattune_reading_age_seconds", device="gpu0", tier="fast") == 10.5
    assert value(samples, "wattune_sampler_up") == 1.0


def test_before_the_recording_and_after_its_sampler_there_is_an_answer() -> None:
    assert set(read(families([], NOW_NS, num_failures=2))) == {
        "wattune_build_info",
        "wattune_exporter_failed_looks_total",
    }
    ended = snapshot(devices={}, host=None, manifest={}, sampler_alive=False)
    assert value(read(families([ended], NOW_NS)), "wattune_sampler_up") == 0.0


def test_names_are_as_prometheus_wants_them() -> None:
    found = families([snapshot()], NOW_NS)
    assert len({family.name for family in found}) == len(found) > 25
    for family in found:
        assert re.fullmatch(r"wattune_[a-z]+(_[a-z]+)*", family.name), family.name
        assert family.documentation.endswith(".") and "\n" not in family.documentation
        assert not family.unit or (family.unit in BASE_UNITS and family.name.endswith(f"_{family.unit}"))
        assert not re.search(r"gpu\d|_(total|mhz|w|j|c|s)$", family.name), family.name
        for sample in family.samples:
            expected = f"{family.name}_total" if family.type == "counter" else family.name
            assert sample.name == (f"{family.name}_info" if family.type == "info" else expected)
            about_device = family.name.startswith("wattune_device")
            assert {"node", "device", "uuid"} <= sample.labels.keys() or not about_device


def test_every_column_that_a_sampler_writes_is_exposed() -> None:
    """A new column is a decision: exposed, or listed here."""
    for listed, tiers, others in (
        (DEVICE_COLUMNS, ("fast", "counter", "slow"), {"event_reasons"}),
        (NODE_COLUMNS, ("host",), {"node_power_w"}),  # of imported logs: no sampler reads it
    ):
        exposed = {column for _, columns in listed.values() for column in columns}
        written = {name for tier in tiers for name in TELEMETRY[tier].names} - {"node", "device", "mono_ns", "wall_ns"}
        assert written - exposed == others and exposed <= written


def test_devices_that_do_not_count_are_named() -> None:
    samples = read(families([snapshot(others=["gpu1", "gpu2"])], NOW_NS))
    assert value(samples, "wattune_recording_info", not_counted="gpu1,gpu2") == 1.0


def test_labels_are_escaped() -> None:
    odd = 'a "b" \\ c\nd'
    samples = read(families([snapshot(devices={"gpu0": view(facts={"name": odd})})], NOW_NS))
    assert value(samples, "wattune_device_info", name=odd) == 1.0


def test_real_readings_make_metrics_that_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: True)
    living = LivingSampler(tmp_path)
    living.write_until(30.0)
    clock = SimpleNamespace(monotonic_ns=lambda: living.at_ns(30.0), thread_time=time.thread_time)
    monkeypatch.setattr(follower, "time", clock)
    seen = follower.Follower(living.folder, living.at_ns(20.0)).look()
    watts = read(families([seen], living.at_ns(30.2)))["wattune_device_power_watts"]
    assert len(watts) == 4 and all(600 < one < 1000 for one in watts.values())
