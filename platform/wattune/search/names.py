"""Names of plans among others: a plan's own name, with mode and sizes of the workload where those differ."""

from collections.abc import Callable, Iterable

from wattune.workload import Workload


def namer(workloads: Iterable[Workload]) -> Callable[..., str]:
    """Returns what names plans, with their labels if known, so that none of other sizes share a name.

    A size that all share is left out.
    """
    own = {id(one): one for one in workloads}.values()  # a million candidates share few
    before = {"mode": " ", "seq_len": " seq", "global_batch_size": " gbs"}
    several = [name for name in before if len({getattr(one, name) for one in own}) > 1]

    def sizes(workload: Workload) -> str:
        return "".join(f"{before[name]}{getattr(workload, name)}" for name in several if workload.is_known)

    return lambda spec, label="": (label or spec.label) + sizes(spec.workload)
