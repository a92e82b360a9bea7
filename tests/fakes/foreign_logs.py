# ruff: noqa: E501 - lines of logs are as long as the tools write them
"""Logs in the shapes that other tools write, of one load: plain ones, and some with what goes wrong in the field.

Shapes are those of nvidia-smi(1), dcgmi, dcgm-exporter, Prometheus' HTTP API, amd-smi, rocm-smi, Zeus, CodeCarbon, W&B,
MLflow, perf-stat(1), ipmitool(1) and Redfish.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

SECONDS = 60
START = datetime(2026, 1, 2, 23, 59, 30, tzinfo=UTC)
"""Half a minute before midnight."""


class Log(NamedTuple):
    name: str
    text: str | bytes
    energies_j: dict[str, float]
    """Under power, or risen in counters, by node, device and column."""
    note: str = ""


def watts(gpu: int, at: int) -> float:
    return 400.0 + 100 * gpu + (at * 37 % 200)


def energy(gpu: int, *, skip: Callable[[int], bool] = lambda at: False, seconds: int = SECONDS) -> float:
    """Integrates by trapezoids between the seconds that are not skipped."""
    at = [one for one in range(seconds) if not skip(one)]
    return sum((b - a) * (watts(gpu, a) + watts(gpu, b)) / 2 for a, b in pairwise(at))


def both(column: str, *, node: str = "node0", **more: Any) -> dict[str, float]:
    return {f"{node}/gpu{gpu}/{column}": energy(gpu, **more) for gpu in range(2)}


def stamp(at: float, form: str = "%Y/%m/%d %H:%M:%S.%f") -> str:
    text = (START + timedelta(seconds=at)).strftime(form)
    return text[:-3] if form.endswith("%f") else text


def epoch(at: float) -> float:
    return START.timestamp() + at


def lines(head: list[str], row: Callable[[int, int], str], *, gpus: int = 2, seconds: int = SECONDS) -> str:
    return "\n".join([*head, *(row(at, gpu) for at in range(seconds) for gpu in range(gpus))]) + "\n"


def joules(gpu: int, at: int) -> float:
    """A counter of energy: the trapezoid up to a second."""
    return 1000.0 * (gpu + 1) + energy(gpu, seconds=at + 1)


def host(at: int) -> float:
    return 1500.0 + watts(0, at)


HOST_J = sum((host(at) + host(at + 1)) / 2 for at in range(SECONDS - 1))
RISE = {f"node0/gpu{gpu}/energy_j": joules(gpu, SECONDS - 1) - joules(gpu, 0) for gpu in range(2)}
AVERAGE, INSTANT = both("power_average_w"), both("power_instant_w")


def nvidia_smi() -> list[Log]:
    head = "timestamp, index, uuid, name, power.draw [W], power.draw.instant [W], temperature.gpu, memory.used [MiB]"

    def row(at: int, gpu: int, *, index: int | None = None, power: str = "") -> str:
        power = power or f"{watts(gpu, at):.2f} W"
        number = gpu if index is None else index
        return f"{stamp(at)}, {number}, GPU-{gpu}a-1, NVIDIA H100 80GB HBM3, {power}, {watts(gpu, at):.2f} W, 60, 71000 MiB"

    def nasty(at: int, gpu: int) -> str:
        again = f"{head}\n" if at % 20 == 0 and gpu == 0 and at else ""
        return again + row(at, gpu, index=1 - gpu if at > 30 else gpu, power="[N/A]" if at == 7 else "")

    gone = both("power_average_w", skip=lambda at: at == 7)
    cut = f"{stamp(SECONDS)}, 0, GPU-0a-1, NVID"
    bare = lines([], lambda at, gpu: f"{stamp(at)}, {gpu}, NVIDIA H100 80GB HBM3, {watts(gpu, at):.2f}, 700.00, 60")
    units = lines([], lambda at, gpu: f"{stamp(at)}, {gpu}, {watts(gpu, at):.2f} W, 0x0000000000000004, 1980 MHz")
    dmon = ["#Date       Time        gpu    pwr  gtemp  mtemp     sm   pclk ", "#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %    MHz "]  # fmt: skip
    whole = {f"node0/gpu{gpu}/power_average_w": sum((round(watts(gpu, at)) + round(watts(gpu, at + 1))) / 2 for at in range(SECONDS - 1)) for gpu in range(2)}  # fmt: skip

    def dmon_row(at: int, gpu: int) -> str:
        again = "\n".join(dmon) + "\n" if at % 20 == 0 and gpu == 0 and at else ""
        return (
            f"{again} {stamp(at, '%Y%m%d   %H:%M:%S')}      {gpu}    {watts(gpu, at):.0f}     60      -    100   1980 "
        )

    def query(at: int, gpu: int) -> str:
        head = f"\n==============NVSMI LOG==============\n\nTimestamp                                 : {stamp(at, '%a %b %d %H:%M:%S %Y')}\nDriver Version                            : 550.54.15\n\nAttached GPUs                             : 2\n" if gpu == 0 else ""  # fmt: skip
        return f"""{head}GPU 00000000:{gpu + 1}7:00.0
    GPU Power Readings
        Average Power Draw                : {watts(gpu, at):.2f} W
        Instantaneous Power Draw          : {watts(gpu, at):.2f} W
        Current Power Limit               : 700.00 W
    Module Power Readings
        Average Power Draw                : N/A
        Current Power Limit               : N/A
"""

    return [
        Log("smi.csv", lines([head], row), AVERAGE | INSTANT),
        Log(
            "smi_nasty.csv",
            b"\xef\xbb\xbf" + (lines([head], nasty) + cut).replace("\n", "\r\n").encode(),
            gone | INSTANT,
        ),
        Log("smi_powershell.csv", lines([head], row).encode("utf-16"), AVERAGE | INSTANT),
        Log("smi_noheader.csv", units, AVERAGE),
        Log("smi_noheader_nounits.csv", bare, AVERAGE),
        Log("dmon.txt", lines(dmon, dmon_row), whole),
        Log("query.txt", lines([], query), AVERAGE | INSTANT),
    ]


def dcgm() -> list[Log]:
    head = [
        "#Entity   POWER        POWINST      TOTEC        TMPTR  ",
        "ID        W            W            mJ           C      ",
    ]
    rows = lines(head, lambda at, gpu: f"GPU {gpu}     {watts(gpu, at):.3f}      {watts(gpu, at):.3f}      {joules(gpu, at) * 1000:.0f}      60")  # fmt: skip
    stamped = lines(
        [f"{stamp(0, '%Y-%m-%dT%H:%M:%S')} {head[0]}", f"{stamp(0, '%Y-%m-%dT%H:%M:%S')} {head[1]}"],
        lambda at, gpu: f"{stamp(at, '%Y-%m-%dT%H:%M:%S')} GPU {gpu}     {watts(gpu, at):.3f}      {'N/A' if at == 5 else f'{watts(gpu, at):.3f}'}      {joules(gpu, at) * 1000:.0f}      60",
    )  # fmt: skip
    labels = '{{gpu="{0}",UUID="GPU-{0}a",device="nvidia{0}",modelName="NVIDIA H100 80GB HBM3",Hostname="n7",DCGM_FI_DRIVER_VERSION="550.54.15"}}'

    def scrape(at: int, gpu: int, *, time: bool) -> str:
        own = labels.format(gpu)
        end = f" {epoch(at) * 1000:.0f}" if time else ""
        head = (
            "" if gpu else "# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).\n# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"
        )
        before = f"# {stamp(at, '%Y-%m-%dT%H:%M:%SZ')}\n" if not time and not gpu else ""
        return f"{before}{head}DCGM_FI_DEV_POWER_USAGE{own} {watts(gpu, at):.3f}{end}\nDCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{own} {joules(gpu, at) * 1000:.0f}{end}\nDCGM_FI_DEV_GPU_TEMP{own} 60{end}\nDCGM_FI_DEV_MEMORY_TEMP{own} 9223372036854775794{end}"

    series = [
        {
            "metric": {"__name__": name, "gpu": str(gpu), "Hostname": "n7", "UUID": f"GPU-{gpu}a", "instance": "10.0.0.7:9400"},
            "values": [[epoch(at), f"{value(gpu, at):.3f}"] for at in range(SECONDS)],
        }
        for name, value in (("DCGM_FI_DEV_POWER_USAGE", watts), ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", lambda gpu, at: joules(gpu, at) * 1000))
        for gpu in range(2)
    ]  # fmt: skip
    at_n7 = {name.replace("node0", "n7"): value for name, value in (AVERAGE | RISE).items()}
    gone = both("power_instant_w", skip=lambda at: at == 5)
    return [
        Log("dcgmi_stamped.txt", stamped, AVERAGE | gone | RISE),
        Log("dcgmi_untimed.txt", rows, {}, "has no column of times"),
        Log("exporter.prom", lines([], lambda at, gpu: scrape(at, gpu, time=True)), at_n7),
        Log(
            "exporter_scrapes.prom",
            lines([], lambda at, gpu: scrape(at, gpu, time=False)) + "DCGM_FI_DEV_GPU_TEMP{gp",
            at_n7,
        ),
        Log("range.json", json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}), at_n7),
    ]


def amd() -> list[Log]:
    monitor = lines(
        ["timestamp,gpu,power_usage,hotspot_temperature,memory_temperature,gfx_clk,vram_used"],
        lambda at, gpu: f"{epoch(at):.0f},{gpu},{watts(gpu, at):.0f},61,{'N/A' if gpu else 40},2100,1024",
    )
    metric = [
        {
            "gpu": gpu,
            "timestamp": int(epoch(at)),
            "power": {"socket_power": {"value": watts(gpu, at), "unit": "W"}, "gfx_voltage": "N/A"},
            "temperature": {"edge": "N/A", "hotspot": {"value": 61, "unit": "C"}, "mem": {"value": 40, "unit": "C"}},
            "clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}, "min_clk": {"value": 500, "unit": "MHz"}}},
            "energy": {"total_energy_consumption": {"value": joules(gpu, at), "unit": "J"}},
        }
        for at in range(SECONDS)
        for gpu in range(2)
    ]
    rocm = lines(
        [],
        lambda at, gpu: (
            f"{epoch(at):.0f}\ndevice,Average Graphics Package Power (W),Temperature (Sensor junction) (C)\ncard0,{watts(0, at)},61.0\ncard1,{watts(1, at)},None\n"
        ),
        gpus=1,
    )
    cards = [
        json.dumps(
            {
                "time": stamp(at, "%Y-%m-%dT%H:%M:%S+00:00"),
                **{f"card{gpu}": {"Current Socket Graphics Package Power (W)": f"{watts(gpu, at)}", "Temperature (Sensor junction) (C)": "61.0"} for gpu in range(2)},
                "system": {"Driver version": "6.3"},
            }
        )
        for at in range(SECONDS)
    ]  # fmt: skip
    split = "\n".join(json.dumps(metric[at : at + 2], indent=2) for at in range(0, len(metric), 2))
    return [
        Log("amd_monitor.csv", monitor, AVERAGE),
        Log("amd_metric.json", json.dumps(metric), AVERAGE | RISE),
        Log("amd_watch.json", split + '\n[\n  {\n    "gpu": 0,', AVERAGE | RISE),
        Log("rocm_loop.csv", rocm, AVERAGE),
        Log("rocm.jsonl", "\n".join(cards) + '\n{"time": "20', AVERAGE),
    ]


def python_tools() -> list[Log]:
    zeus = lines(["time,gpu0,gpu1"], lambda at, _: f"{epoch(at)},{watts(0, at)},{watts(1, at)}", gpus=1)
    nasty = lines(["Time,GPU0 (mW),GPU1 (mW)"], lambda at, _: f"{stamp(at, '%Y-%m-%d %I:%M:%S %p')},{watts(0, at) * 1000},{watts(1, at) * 1000}", gpus=1)  # fmt: skip
    carbon_head = "timestamp,project_name,run_id,experiment_id,duration,emissions,emissions_rate,cpu_power,gpu_power,ram_power,cpu_energy,gpu_energy,ram_energy,energy_consumed,country_name"
    carbon = f"{carbon_head}\n{stamp(600, '%Y-%m-%dT%H:%M:%S')},codecarbon,5b0f,1,600.5,0.01,0.0001,42.5,431.2,10.0,0.007,0.07,0.0017,0.0787,Germany\n"
    totals = {
        "node0/gpu0/energy_j": 0.07 * 3.6e6,
        "node0/host/package_power_w": 0.007 * 3.6e6,
        "node0/host/dram_power_w": 0.0017 * 3.6e6,
    }
    wandb = "\n".join(
        json.dumps({"_runtime": at, "_timestamp": epoch(at), "_wandb": True, "system.cpu": 3.1} | {f"system.gpu.{gpu}.powerWatts": watts(gpu, at) for gpu in range(2)} | {f"system.gpu.{gpu}.temp": 60 for gpu in range(2)} | {"system.gpu.process.0.powerWatts": 999.0})
        for at in range(SECONDS)
    )  # fmt: skip
    export = lines(
        ['"Relative Time (Process)","run-1 - system/gpu.0.powerWatts","run-1 - system/gpu.0.powerWatts__MIN","run-1 - system/gpu.0.powerWatts__MAX"'],
        lambda at, _: f'"{at}","{watts(0, at)}","{watts(0, at)}","{watts(0, at)}"',
        gpus=1,
    )  # fmt: skip
    store = lines([], lambda at, _: f"{epoch(at) * 1000:.0f} {watts(0, at)} {at}", gpus=1)
    long = lines(["run_id,key,value,timestamp,step"], lambda at, gpu: f"ab12,system/gpu_{gpu}_power_usage_watts,{watts(gpu, at)},{epoch(at) * 1000:.0f},{at}")  # fmt: skip
    return [
        Log("zeus.csv", zeus, AVERAGE),
        Log("zeus_nasty.csv", nasty, AVERAGE),
        Log("emissions.csv", carbon, totals),
        Log("wandb.jsonl", wandb, AVERAGE),
        Log("wandb_export.csv", export, {"node0/gpu0/power_average_w": energy(0)}),
        Log("gpu_0_power_usage_watts", store, {"node0/gpu0/power_average_w": energy(0)}),
        Log("mlflow.csv", long, AVERAGE),
    ]


def hosts() -> list[Log]:
    perf = lines(["# started on Fri Jan  2 23:59:30 2026", ""], lambda at, _: f"     {at + 1:.9f},{watts(0, at) / 4:.2f},Joules,power/energy-pkg/,1001061293,100.00,,\n     {at + 1:.9f},{watts(0, at) / 40:.2f},Joules,power/energy-ram/,1001061293,100.00,,", gpus=1)  # fmt: skip
    text = lines(["#           time             counts unit events"], lambda at, _: f"     {at + 1:.9f}              {'<not counted>' if at < 0 else f'{watts(0, at) / 4:.2f}'} Joules power/energy-pkg/", gpus=1)  # fmt: skip
    sockets = lines([], lambda at, _: "\n".join(f"     {at + 1:.9f},S{one},1,{watts(0, at) / 8:.3f},Joules,power/energy-pkg/,1001061293,100.00,," for one in range(2)), gpus=1)  # fmt: skip
    package_j = {"node0/host/package_power_w": sum(watts(0, at) / 4 for at in range(SECONDS))}
    ram_j = {"node0/host/dram_power_w": sum(watts(0, at) / 40 for at in range(SECONDS))}
    node_j = {"node0/host/node_power_w": HOST_J}

    def dcmi(at: int, _: int) -> str:
        return f"""
    Instantaneous power reading:              {host(at):8.0f} Watts
    Minimum during sampling period:                  7 Watts
    Maximum during sampling period:                604 Watts
    Average power reading over sample period:      217 Watts
    IPMI timestamp:                           {stamp(at, "%a %b %d %H:%M:%S %Y")}
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   activated

"""

    sdr = lines([], lambda at, _: f"{stamp(at, '%Y-%m-%dT%H:%M:%S')} Pwr Consumption  | 77h | ok  |  7.1 | {host(at):.0f} Watts\n{stamp(at, '%Y-%m-%dT%H:%M:%S')} Inlet Temp       | 04h | ok  |  7.1 | 23 degrees C", gpus=1)  # fmt: skip
    redfish = [{"timestamp": stamp(at, "%Y-%m-%dT%H:%M:%SZ"), "@odata.id": "/redfish/v1/Chassis/1/Power", "PowerControl": [{"MemberId": "0", "PowerConsumedWatts": host(at), "PowerCapacityWatts": 6000}], "PowerSupplies": [{"LineInputVoltage": 230}]} for at in range(SECONDS)]  # fmt: skip
    report = {"@odata.id": "/redfish/v1/TelemetryService/MetricReports/PowerMetrics", "MetricValues": [{"MetricId": "SystemPowerConsumption", "Timestamp": stamp(at, "%Y-%m-%dT%H:%M:%S+01:00"), "MetricValue": str(host(at))} for at in range(SECONDS)]}  # fmt: skip
    pdu = lines(["Date;Time;Outlet 1 Active Power (W);Outlet 1 Current (A)"], lambda at, _: f"{stamp(at, '%Y-%m-%d')};{stamp(at, '%H:%M:%S')};{host(at):.1f};6.1", gpus=1)  # fmt: skip
    kilowatts = lines(["timestamp,pdu_name,total_power_kw"], lambda at, _: f"{stamp(at, '%d.%m.%Y %H:%M:%S')},rack-7,{host(at) / 1000}", gpus=1)  # fmt: skip
    return [
        Log("perf.csv", perf, package_j | ram_j),
        Log("perf.txt", text, package_j),
        Log("perf_sockets.csv", sockets, package_j),
        Log("dcmi.txt", lines([], dcmi, gpus=1), node_j),
        Log("sdr.txt", sdr, node_j),
        Log("redfish.json", json.dumps(redfish), node_j),
        Log("report.json", json.dumps(report), node_j),
        Log("pdu.csv", pdu, node_j),
        Log("pdu_kw.csv", kilowatts, {"rack-7/host/node_power_w": HOST_J}),
    ]


LOGS = {log.name: log for make in (nvidia_smi, dcgm, amd, python_tools, hosts) for log in make()}
