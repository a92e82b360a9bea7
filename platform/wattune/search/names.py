"""Names of plans among others: a plan's own name, with the sizes of the workload where those differ."""

from collections.abc import Callable, Iterable

from wattune.trial import TrialSpec
from wattune.workload import Workload


def namer(workloads: Iterable[Workload]) -> Callable[[TrialSpec], str]:
    """Returns what names plans so that none of other sizes share a name; a size that all share is left out."""
    own = {id(one): one for one in workloads}.values()  # a million candidates share few
    several_lengths = len({one.seq_len for one in own}) > 1
    several_batches = len({one.global_batch_size for one in own}) > 1

    def sizes(workload: Workload) -> str:
        length = f" seq{workload.seq_len}" if several_lengths else ""
        batch = f" gbs{workload.global_batch_size}" if several_batches else ""
        return length + batch if workload.is_known else ""

    return lambda spec: spec.label + sizes(spec.workload)
