"""What wattune takes from the sensor libraries beyond their functions; a row of docs/dependencies.md each."""

import importlib.util
import inspect

import pytest
from installed import load, parameters


@pytest.mark.private_api("pynvml.nvmlDeviceGetFieldValues")
def test_nvmldevicegetfieldvalues() -> None:
    nvml = load("pynvml")
    assert "(values[i].fieldId, values[i].scopeId) = fieldId" in inspect.getsource(nvml.nvmlDeviceGetFieldValues)
    assert nvml.nvmlMemory_v2 and parameters(nvml.nvmlDeviceGetMemoryInfo) == ["handle", "version"]
    request = nvml.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2", "metrics"} <= {name for name, *_ in request._fields_}
    assert nvml.NVML_GPM_METRICS_GET_VERSION == 1 and callable(nvml.nvmlDeviceGetComputeRunningProcesses_v3)


@pytest.mark.private_api("pynvml THROTTLE_POWER")
def test_nvml_fi_dev() -> None:
    from wattune.telemetry.nvml import fields, gpm

    nvml = load("pynvml")
    reason = "NVML_FI_DEV_CLOCKS_EVENT_REASON_"
    names = {
        "NVML_FI_DEV_PERF_POLICY_POWER": fields.THROTTLE_POWER,
        "NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION": fields.LOW_UTILIZATION,
        "NVML_FI_DEV_MEMORY_TEMP": fields.MEMORY_TEMP,
        "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION": fields.TOTAL_ENERGY,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": fields.NVLINK_TX,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": fields.NVLINK_RX,
        "NVML_FI_DEV_POWER_AVERAGE": fields.POWER_AVERAGE,
        "NVML_FI_DEV_POWER_INSTANT": fields.POWER_INSTANT,
        f"{reason}SW_THERM_SLOWDOWN": fields.NEW_THROTTLE_FIELDS.sw_thermal,
        f"{reason}HW_THERM_SLOWDOWN": fields.NEW_THROTTLE_FIELDS.hw_thermal,
        f"{reason}HW_POWER_BRAKE_SLOWDOWN": fields.NEW_THROTTLE_FIELDS.power_brake,
        "NVML_GPM_METRIC_SM_UTIL": gpm.SM_UTIL,
        "NVML_GPM_METRIC_ANY_TENSOR_UTIL": gpm.ANY_TENSOR_UTIL,
        "NVML_GPM_METRIC_DRAM_BW_UTIL": gpm.DRAM_BW_UTIL,
        "NVML_GPM_METRIC_PCIE_TX_PER_SEC": gpm.PCIE_TX_PER_SEC,
        "NVML_GPM_METRIC_PCIE_RX_PER_SEC": gpm.PCIE_RX_PER_SEC,
    }
    assert {name: getattr(nvml, name) for name in names} == names


@pytest.mark.private_api("amdsmi.amdsmi_wrapper")
def test_amdsmi_wrapper() -> None:
    if importlib.util.find_spec("amdsmi") is None:  # tests/contracts/test_amd_smi_stub.py runs the real package
        pytest.skip("amdsmi is not installed")
    wrapper = load("amdsmi").amdsmi_wrapper
    for name in ("amdsmi_gpu_metrics_t", "amdsmi_get_gpu_metrics_info", "amdsmi_version_t", "amdsmi_get_lib_version"):
        assert hasattr(wrapper, name), name
    assert isinstance(wrapper.amdsmi_status_t__enumvalues, dict)
