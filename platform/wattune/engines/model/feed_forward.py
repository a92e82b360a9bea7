"""The feed-forward block of a decoder layer, and of experts that every token meets."""

from typing import cast

import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.tensor_ranks import ALONE


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202) or GELU feed-forward block."""

    def __init__(self, model: ModelSpec, width: int | None = None) -> None:
        """Allocates without initialising; without a width it is the model's."""
        super().__init__()
        hidden, inner, biased = model.hidden_size, width or model.ffn_hidden_size, model.has_bias("ffn")
        self.gate = nn.Linear(hidden, inner, bias=biased) if model.activation == "swiglu" else None
        self.up = nn.Linear(hidden, inner, bias=biased)
        self.down = nn.Linear(inner, hidden, bias=biased)
        self.ranks = ALONE

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        x = self.ranks.gather(x)
        up = self.up(x)
        return cast(Tensor, self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up))
