"""What a row costs: the estimate by which rows are balanced (PACK-19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    def of_model(
        *,
        hidden_size: int,
        num_layers: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        num_attention_layers: int | None = None,
        window: int | None = None,
    ) -> Cost:
        """Cost from the shape of a decoder with gated MLPs, in floating point operations of the forward pass.

        Per token and layer: q and o projections 2 * 2 * hidden * heads * head_dim, k and v 2 * 2 * hidden * kv_heads *
        head_dim, MLP 3 * 2 * hidden * intermediate; once per token the head, 2 * hidden * vocabulary. Per context token
        and layer with full attention: scores and weighted values, 2 * 2 * heads * head_dim. Backward is twice the
        forward for both, so the ratio stands. Example, Qwen3-1.7B: 3.4e9 per token, 2.3e5 per context token.

        `num_attention_layers` layers have full attention (default: all). The others are linear in the length: with a
        `window` each of their tokens attends to that many tokens; without, they count by their projections alone.
        """
        full = num_layers if num_attention_layers is None else num_attention_layers
        width = num_heads * head_dim
        projections = 4 * hidden_size * (width + num_kv_heads * head_dim)
        linear = num_layers * (projections + 6 * hidden_size * intermediate_size) + 2 * hidden_size * vocab_size
        linear += (num_layers - full) * 4 * width * (window or 0)
        if full == 0:
            return Cost(linear=1.0, attention=0.0)
        return Cost(linear=linear / (full * 4 * width))

    @staticmethod
    def of_config(config: Any) -> Cost:
        """Cost from a transformers text configuration (attributes `hidden_size`, `num_hidden_layers`, ...)."""
        config = getattr(config, "text_config", None) or config
        heads = config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return Cost.of_model(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            intermediate_size=_active_intermediate_size(config),
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            num_attention_layers=sum(k == "full_attention" for k in kinds),
            window=getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None,
        )


def _active_intermediate_size(config: Any) -> int:
    """MLP width that one token meets: that of its experts in a mixture of experts."""
    experts, width = getattr(config, "num_experts_per_tok", None), getattr(config, "moe_intermediate_size", None)
    if not experts or not width:
        return config.intermediate_size
    return experts * width + (getattr(config, "shared_expert_intermediate_size", None) or 0)
