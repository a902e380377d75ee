"""What a row costs: the estimate by which rows are balanced (PACK-19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agrpo.packer.flops import Flops


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a row = linear * tokens + attention * sum(depth + 1) over its unique tokens.

    The unit is attending to one context token in all layers, so `attention` is 1 and `linear` says how many tokens of
    context cost as much as the matrix products of one token (about 15,000 for Qwen3-1.7B).
    """

    linear: float  # cost per unique token
    attention: float = 1.0  # cost per context token of a unique token

    def of(self, num_tokens: int, depth_sum: int) -> float:
        """Cost of `num_tokens` unique tokens whose depths + 1 add up to `depth_sum`."""
        return self.linear * num_tokens + self.attention * depth_sum

    @staticmethod
    def of_flops(flops: Flops | None) -> Cost:
        """From the operations of a forward pass; backward is twice that for both parts, so the ratio stands.

        The head is counted at every token. Layers with a window are linear in the length: each token attends to a whole
        window. Without full attention, or where the operations are unknown, rows are balanced by their tokens.
        """
        if flops is None or flops.per_context == 0:
            return Cost(linear=1.0, attention=0.0)
        linear = flops.per_token + flops.per_term + sum(window * cost for window, cost in flops.windows)
        return Cost(linear=linear / flops.per_context)

    @staticmethod
    def of_config(config: Any) -> Cost:
        """Cost from a transformers configuration (attributes `hidden_size`, `num_hidden_layers`, ...)."""
        return Cost.of_flops(Flops.of_config(config))
