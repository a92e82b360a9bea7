"""Several raylets on this machine, for tests that end some of them: a process of its own, told what to do on stdin.

It prints `address HOST:PORT` once, and `done` after each line it is given: `add NAME`, `kill NAME` (SIGKILL, with all
that runs there) or `end`. Each raylet is a power domain of its own. The head, where
drivers run, has as many processors as the second argument says; the first is the dashboard's port.
"""

import sys

from ray._private import services
from ray.cluster_utils import Cluster

from wattune.orchestrate.cluster import NODE_START_S, _patience


def main() -> None:
    """Obeys until `end`, or until nobody speaks any more."""
    services.wait_for_node.__defaults__ = (NODE_START_S,)  # Ray itself gives a node 30 s to start, in two places
    with _patience():
        obey()


def obey() -> None:
    cluster = Cluster(
        initialize_head=True,
        shutdown_at_exit=True,
        head_node_args={
            "num_cpus": int(sys.argv[2]),
            "labels": {"wattune.io/domain": "head", "wattune.io/device": "cpu"},
            "include_dashboard": True,
            "dashboard_port": int(sys.argv[1]),
            "include_log_monitor": False,  # it reads the logs of all processes for drivers that show them: none does
        },
    )
    nodes = {}
    say(f"address {cluster.address}")
    for line in sys.stdin:
        order, _, name = line.strip().partition(" ")
        if order == "add":
            labels = {"wattune.io/domain": name, "wattune.io/device": "cpu"}
            nodes[name] = cluster.add_node(num_cpus=2, labels=labels, include_dashboard=False)
        elif order == "kill":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        else:
            break
        say("done")
    cluster.shutdown()


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - whoever started this reads it


if __name__ == "__main__":
    main()
