"""The protocol of a backend: facts of a device as plain data."""

from wattune.telemetry.backend import DeviceInfo


def test_what_is_unknown_of_a_device_is_not_in_its_json() -> None:
    info = DeviceInfo(device="gpu0", name="NVIDIA H200", power_limit_w=700.0, slot=0)
    assert info.to_json() == {"device": "gpu0", "name": "NVIDIA H200", "power_limit_w": 700.0, "slot": 0}
