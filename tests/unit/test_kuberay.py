"""`deploy/kuberay`: the manifest keeps to RayJob's fields, and agrees with the catalog, the pins and the Dockerfile.

The schema below is of RayJob v1 as of KubeRay 1.7.0, by the names that its CRD has: whole for what is KubeRay's, and of
pods what the manifest uses. `WATTUNE_RAYJOB_CRD=FILE` (`kubectl get crd rayjobs.ray.io -o yaml`) holds the manifest
against a cluster's whole CRD too.
"""

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.label_utils import validate_node_labels

from wattune.catalog.hardware import DEVICES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
CLAIM, JOB = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
ANY: dict[str, Any] = {}


def fields(required: tuple[str, ...] = (), /, **known: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": known}


def of(*names: str, **kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, COUNT, SWITCH = {"type": "string"}, {"type": "integer", "format": "int32"}, {"type": "boolean"}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
CONTAINER = fields(
    ("name",),
    **of("name", "image", "imagePullPolicy", "workingDir", type="string"),
    command=listed(TEXT),
    args=listed(TEXT),
    env=listed(fields(("name",), name=TEXT, value=TEXT, valueFrom=ANY)),
    envFrom=listed(fields(secretRef=fields(name=TEXT, optional=SWITCH), configMapRef=ANY, prefix=TEXT)),
    ports=listed(fields(("containerPort",), containerPort=COUNT, name=TEXT, protocol=TEXT)),
    resources=fields(limits=QUANTITIES, requests=QUANTITIES, claims=ANY),
    volumeMounts=listed(fields(("mountPath", "name"), mountPath=TEXT, name=TEXT, readOnly=SWITCH, subPath=TEXT)),
    securityContext=ANY,
)
POD = fields(
    metadata=ANY,
    spec=fields(
        ("containers",),
        containers=listed(CONTAINER),
        volumes=listed(
            fields(("name",), name=TEXT, persistentVolumeClaim=fields(("claimName",), claimName=TEXT, readOnly=SWITCH))
        ),
        nodeSelector=TEXTS,
        tolerations=listed(fields(**of("key", "operator", "value", "effect", type="string"))),
        terminationGracePeriodSeconds=COUNT,
        **of("serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName", type="string"),
        **of("hostNetwork", type="boolean"),
    ),
)
GROUP = {"labels": TEXTS, "resources": TEXTS, "rayStartParams": TEXTS, "template": POD}
SCHEMA = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS),
    spec=fields(
        **of("entrypoint", "jobId", "runtimeEnvYAML", "entrypointResources", "managedBy", type="string"),
        **of("activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit", type="integer"),
        **of("ttlSecondsAfterFinished", type="integer"),
        **of("shutdownAfterJobFinishes", "suspend", type="boolean"),
        **of("entrypointNumCpus", "entrypointNumGpus", type="number"),
        submissionMode=TEXT,
        **of(
            "clusterSelector", "deletionStrategy", "metadata", "submitterConfig", "submitterPodTemplate", type="object"
        ),
        rayClusterSpec=fields(
            ("headGroupSpec",),
            rayVersion=TEXT,
            authOptions=fields(mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=SWITCH),
            enableInTreeAutoscaling=SWITCH,
            autoscalerOptions=fields(
                version={"enum": ["v1", "v2"]},
                idleTimeoutSeconds=COUNT,
                upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
                **of("image", "imagePullPolicy", type="string"),
                **of("resources", "securityContext", type="object"),
                **of("args", "command", "env", "envFrom", "volumeMounts", type="array"),
            ),
            headGroupSpec=fields(
                ("template",),
                **GROUP,
                serviceType=TEXT,
                enableIngress=SWITCH,
                **of("headService", "ingressOptions", type="object"),
            ),
            workerGroupSpecs=listed(
                fields(
                    ("groupName", "maxReplicas", "minReplicas", "template"),
                    **GROUP,
                    groupName=TEXT,
                    **of("replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", type="integer"),
                    suspend=SWITCH,
                    scaleStrategy=ANY,
                )
            ),
            **of("gcsFaultToleranceOptions", "headServiceAnnotations", "historyServerOptions", type="object"),
            **of("networkPolicy", "tlsOptions", "upgradeStrategy", type="object"),
            managedBy=TEXT,
            suspend=SWITCH,
        ),
    ),
)


def of_crd(path: str) -> dict[str, Any]:
    """The schema of a CRD as Kubernetes prunes by it: a field that it does not name is an error."""
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    schema = next(one for one in versions if one["name"] == "v1")["schema"]["openAPIV3Schema"]

    def close(node: Any) -> None:
        for one in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
            close(one)
        if isinstance(node, dict) and isinstance(node.get("properties"), dict):
            node.setdefault("additionalProperties", bool(node.get("x-kubernetes-preserve-unknown-fields")))
        if isinstance(node, dict) and node.get("x-kubernetes-int-or-string"):
            node["type"] = ["integer", "string"]

    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


SCHEMAS = {"ours": SCHEMA} | ({"crd": of_crd(given)} if (given := os.environ.get("WATTUNE_RAYJOB_CRD")) else {})


def wrong(job: Any) -> set[str]:
    return {name for name, schema in SCHEMAS.items() if list(jsonschema.Draft7Validator(schema).iter_errors(job))}


def places(node: Any) -> Iterator[list[Any]]:
    """Every object of the manifest with fixed fields, as the path to it."""
    if isinstance(node, dict):
        yield []
        for name, one in node.items():
            if name not in ("labels", "rayStartParams", "nodeSelector", "limits", "requests", "metadata"):
                yield from ([name, *rest] for rest in places(one))
    elif isinstance(node, list):
        for number, one in enumerate(node):
            yield from ([number, *rest] for rest in places(one))


def test_the_manifest_keeps_to_the_schema_and_no_wrong_field_passes_anywhere() -> None:
    assert not wrong(JOB)
    tried = 0
    for place in places(JOB):
        for name in ("resource", "evn"):  # what a slip of the finger makes
            mutant = copy.deepcopy(JOB)
            inside = mutant
            for step in place:
                inside = inside[step]
            inside[name] = {}
            assert wrong(mutant) == set(SCHEMAS), [*place, name]
            tried += 1
    assert tried > 60


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"], "16"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "rayStartParams", "num-gpus"], 8),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "env", 0, "value"], 0),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "secret"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers"], None),
    ],
)
def test_a_wrong_value_is_noticed(path: list[Any], value: Any) -> None:
    mutant = copy.deepcopy(JOB)
    inside = mutant
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    assert wrong(mutant) == set(SCHEMAS)


def test_each_pool_is_of_a_device_of_the_catalog_and_takes_whole_nodes() -> None:
    pools = {pool["groupName"]: pool for pool in CLUSTER["workerGroupSpecs"]}
    assert list(pools) == ["h200", "h100", "mi250"]
    for pool in pools.values():
        assert validate_node_labels(pool["labels"]) is None
        device = DEVICES[pool["labels"]["wattune.io/device"]]
        pod = pool["template"]["spec"]
        (container,) = pod["containers"]
        (resource,) = container["resources"]["limits"].keys() - {"memory"}
        vendor = {"nvidia.com/gpu": "nvidia", "amd.com/gpu": "amd"}[resource]
        assert device.vendor == vendor and container["image"].endswith({"nvidia": ":cuda", "amd": ":rocm"}[vendor])
        assert pool["rayStartParams"]["num-gpus"] == str(container["resources"]["limits"][resource])
        assert pool["minReplicas"] == 0 < pool["maxReplicas"] and [one["key"] for one in pod["tolerations"]] == [
            resource
        ]
        if vendor == "nvidia":  # the GPU operator's label is the product's name with hyphens
            assert pod["nodeSelector"] == {"nvidia.com/gpu.product": device.product_names[0].replace(" ", "-")}


def test_head_storage_settings_and_versions_agree_with_the_rest_of_the_project() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints" / "cpu.txt").read_text(), re.MULTILINE))
    assert CLUSTER["rayVersion"] == pins["ray"] and CLUSTER["authOptions"] == {"mode": "token"}
    pod = CLUSTER["headGroupSpec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    command = JOB["spec"]["entrypoint"].split()
    assert command[:2] == ["wattune", "run"] and command[command.index("--storage") + 1] == mount["mountPath"]
    assert (ROOT / command[2].removeprefix("/opt/wattune/")).is_file()
    assert mount["name"] == volume["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    exported = dict(re.findall(r"export ((?:RAY|REPORTER)_\w+)=(\w+)", (ROOT / "ray_cluster.yaml").read_text()))
    settings = {one["name"]: one["value"] for one in container["env"]}
    assert settings.items() <= (exported | {"RAY_worker_niceness": "0"}).items()
    assert exported.keys() - settings.keys() == {"RAY_AUTH_MODE", "RAY_enable_autoscaler_v2"}


def test_the_image_is_built_of_what_is_here_and_of_the_pins() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    assert sources and all((ROOT / source).exists() and source.split("/")[0] not in ignored for source in sources)
    assert {"platform", "pyproject.toml", "constraints/cpu.txt"} <= set(sources)
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2 and all("--constraint constraints/cpu.txt" in line for line in installs)
    python = re.search(r"CPython (3\.\d+)", (ROOT / "constraints" / "cpu.txt").read_text())[1]
    assert f"ARG BASE=python:{python}-slim" in lines and lines[-1].startswith("USER ") and "root" not in lines[-1]
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    used = {one for given in re.findall(r"EXTRAS=([\w,]+)", text) for one in given.split(",")}
    assert used <= set(extras) and "s3" in used
