"""Communication inside layers: tensor, context and expert parallel, for one layer and pass. And loads of experts."""

from dataclasses import dataclass

import numpy as np

from wattune.arrays import Floats
from wattune.catalog.models import ONE_BLOCK, ModelSpec
from wattune.cost.memory.shapes import skewed_load
from wattune.cost.step_time.facts import EngineFacts
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.work import KernelShapes, Machine, Summable
from wattune.workload import Workload


@dataclass(frozen=True, slots=True)
class LayerTraffic(Summable):
    """Seconds of exposed communication of one layer, forward and backward; what is computed again is in backward."""

    tp_forward_s: Floats
    tp_backward_s: Floats
    cp_forward_s: Floats
    cp_backward_s: Floats
    ep_forward_s: Floats
    ep_backward_s: Floats


def expert_imbalance(model: ModelSpec, workload: Workload, ep: Floats) -> Floats:
    """Computes the load of the busiest expert parallel rank over the mean load.

    A router that chooses by itself is taken as balanced within a tenth.
    """
    routing = workload.routing
    if model.is_moe and (routing is None or routing.by == "learned"):
        return np.where(ep > 1, 1.1, 1.0)
    return skewed_load(model, workload, ep)


def layer_traffic(
    machine: Machine,
    links: Links,
    model: ModelSpec,
    shapes: KernelShapes,
    facts: EngineFacts,
    attention_s: Floats,
    overlaps_tp: Floats,
) -> LayerTraffic:
    """Predicts communication of one layer that no compute hides.

    - Tensor parallel with a sequence split: two all-gathers and two reduce-scatters a pass (Korthikanti et al. 2022,
      arXiv 2205.05198, section 4.2.2), else two all-reduces forward and one for each product that reads the input
      backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Overlapped with products, a fifth stays exposed.
    - Context parallel: keys and values travel a ring beside attention (Liu et al. 2023, arXiv 2310.01889); what is
      longer than attention is exposed. All ranks pass on at once, so a hop is as slow as one that leaves a node.
    - Expert parallel: two all-to-alls a pass. Where experts are split too and the engine `gathers_rows`, ranks exchange
      the rows of their own tokens, then the ranks of a split expert gather each other's and scatter the sums (Megatron-
      Core, `MoEAlltoAllTokenDispatcher`); of the pairs of tensor parallel, that of attention is left.
    """
    h, width, tokens = model.hidden_size, machine.item_bytes, shapes.tokens
    ones = np.ones_like(tokens)
    again = facts.recomputed_frac * (shapes.recompute == 2)
    whole = tokens * h * width
    gathers_rows = model.is_moe and facts.gathers_rows
    one_block = model.layer_kinds in ONE_BLOCK
    across = links.group(shapes.tp, ones)
    if facts.splits_sequence:
        gathered = tokens * h if facts.gathers_cast and machine.cast_bytes else whole
        gather_s = links.collective_s("all_gather", across, gathered)
        pair_s = gather_s + links.collective_s("reduce_scatter", across, whole)
        pairs = 1 if gathers_rows or one_block else 2
        forward_s, backward_s = pairs * pair_s, pairs * pair_s
        if facts.gathers_again:
            backward_s = backward_s + gather_s  # half of both hide behind the product for gradients of inputs
        if facts.keeps_operations:  # of collectives it keeps what was reduced
            backward_s = backward_s + pairs * gather_s * (shapes.recompute == 1)
    else:
        reduce_s = links.collective_s("all_reduce", across, whole)
        readers = (3 if model.has_attention else 1 * model.has_ssm) + (model.ffn_matrices - 1) * model.has_ffn
        forward_s, backward_s = (1 if one_block else 2) * reduce_s, readers * reduce_s
    exposed = np.where(overlaps_tp > 0, 0.2, 1.0)
    tp_forward_s = forward_s * exposed
    tp_backward_s = backward_s * exposed + again * tp_forward_s

    kv_bytes = tokens * (0 if model.has_ssm else model.kv_width) * width / shapes.tp
    ring = links.group(shapes.cp, shapes.tp)
    hop_s = links.send_s(kv_bytes, ring.nodes > 1, ring.spine_hops_frac)
    first_s = np.where(shapes.cp > 1, hop_s, 0.0)
    hops_s = (shapes.cp - 1) * first_s
    cp_forward_s = np.maximum(hops_s - attention_s, 0.0) + 0.2 * first_s
    cp_backward_s = np.maximum(2 * hops_s - 2.5 * attention_s, 0.0) + 0.4 * first_s + again * cp_forward_s

    if model.is_moe:
        held = tokens * model.num_experts_per_token * h * width * shapes.etp / shapes.tp
        exchange, split = links.group(shapes.ep, shapes.etp), links.group(shapes.etp, ones)
        sent = held / shapes.etp if gathers_rows else held
        two_s = 2 * links.collective_s("all_to_all", exchange, sent)
        if gathers_rows:
            two_s = two_s + links.collective_s("all_gather", split, held)
            two_s = two_s + links.collective_s("reduce_scatter", split, held)
        ep_forward_s, ep_backward_s = two_s, two_s * (1 + again)
    else:
        ep_forward_s = ep_backward_s = np.zeros_like(tokens)
    return LayerTraffic(tp_forward_s, tp_backward_s, cp_forward_s, cp_backward_s, ep_forward_s, ep_backward_s)
