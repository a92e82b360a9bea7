"""`deploy/aws/ray_cluster.yaml`: Ray takes it, and it says the same as the catalog and the file for own machines."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.label_utils import validate_node_labels
from ray.autoscaler._private.aws import node_provider
from ray.autoscaler._private.util import prepare_config, validate_config

from wattune.catalog.hardware import DEVICES

ROOT = Path(__file__).parents[3]
CONFIG = yaml.safe_load((ROOT / "deploy" / "aws" / "ray_cluster.yaml").read_text())
TYPES = CONFIG["available_node_types"]


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks AWS for the processors of its instances, which the file says itself."""
    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *_: [])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ([], None),
        (["worker_nodez"], {}),
        (["available_node_types", "h100", "label"], {"a": "b"}),
        (["available_node_types", "h100", "resources", "GPU"], "8"),
        (["head_node_type"], "heads"),
    ],
)
def test_ray_takes_the_file_and_notices_a_slip(place: list[str], value: Any) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    if not place:
        prepared = prepare_config(config)
        validate_config(prepared)
        workers = {name: one for name, one in prepared["available_node_types"].items() if name != "head"}
        assert all(one["min_workers"] == 0 < one["max_workers"] for one in workers.values()), "they come when asked for"
        assert sum(one["max_workers"] for one in workers.values()) == config["max_workers"]
        return
    inside = config
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    with pytest.raises(Exception, match=re.escape(place[-1]) + "|Additional properties|'8' is not"):
        validate_config(prepare_config(config))


def test_types_are_devices_of_the_catalog_and_settings_those_of_own_machines() -> None:
    gpus = {"p5.48xlarge": "h100_sxm", "p5en.48xlarge": "h200_sxm"}  # https://aws.amazon.com/ec2/instance-types/p5/
    for name, one in TYPES.items():
        assert validate_node_labels(one["labels"]) is None
        if name != "head":
            device = one["labels"]["wattune.io/device"]
            assert device in DEVICES and gpus[one["node_config"]["InstanceType"]] == device
            assert one["resources"]["GPU"] == 8
    own = dict(re.findall(r"export ((?:RAY|REPORTER)_\w+)=(\w+)", (ROOT / "ray_cluster.yaml").read_text()))
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        said = dict(re.findall(r"((?:RAY|REPORTER)_\w+)=(\w+)", CONFIG[key][-1]))
        assert said.items() <= own.items() and {"RAY_AUTH_MODE", "RAY_worker_niceness"} <= said.keys()
    assert "~/.ray/auth_token" in CONFIG["file_mounts"]
