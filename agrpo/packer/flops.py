"""Floating point operations of a decoder, from its transformers configuration alone: what rows cost, what MFU counts.

A product of [1, a] and [a, b] is 2 a b operations. Forward, per layer of one token:

    attention   q, o: 2 * 2 * hidden * heads * head_dim (q twice where it is gated); k, v: 2 * 2 * hidden * kv_heads * head_dim
                per context token attended to: scores and weighted values, 2 * 2 * heads * head_dim
    delta rule  projections, convolution, and per value head 2 * 3 * key_dim * value_dim for decay, update and read
    MLP         3 * 2 * hidden * intermediate; in a mixture that of the experts a token meets, and the router

and once per position with a loss term the head, 2 * hidden * vocabulary. Backward is twice the forward where weights are
trained, once where they are frozen, and for attention itself always twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from agrpo.types import Row


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one forward pass."""

    per_token: float  # the decoder's matrix products
    per_term: float  # the head, at each position with a loss term
    per_context: float  # per context token of a token, all layers with full attention
    windows: tuple[tuple[int, float], ...] = ()  # (window, the same for the layers that see at most so many tokens)

    @staticmethod
    def of_config(config: Any) -> Flops | None:
        """From a transformers configuration, or the mapping in its config.json; None where it does not say enough, or for attention of another kind."""
        read = _Reader(config)
        needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        widths = read("intermediate_size") or read("moe_intermediate_size")
        if read("kv_lora_rank") or not widths or not all(read(key) for key in needed):
            return None
        hidden, heads = read("hidden_size"), read("num_attention_heads")
        head_dim = read("head_dim") or hidden // heads
        width, kv_width = heads * head_dim, (read("num_key_value_heads") or heads) * head_dim
        projections = 2 * hidden * (width * (3 if read.is_gated else 2) + 2 * kv_width)
        kinds = read.kinds
        num_linear = kinds.count("linear_attention")
        per_token = (len(kinds) - num_linear) * projections + num_linear * _delta_rule(read)
        per_token += sum(_mlp(read, layer) for layer in range(len(kinds)))
        num_windowed = kinds.count("sliding_attention")
        return Flops(
            per_token=float(per_token),
            per_term=2.0 * hidden * read("vocab_size"),
            per_context=4.0 * width * kinds.count("full_attention"),
            windows=((read("sliding_window"), 4.0 * width * num_windowed),) if num_windowed else (),
        )

    def attention_of(self, row: Row) -> float:
        """Attention over the tokens that each token of the row really attends to: its path, or the window of it."""
        contexts = row.position_ids.astype(np.int64) + 1
        total = self.per_context * float(contexts.sum())
        return total + sum(cost * float(np.minimum(contexts, window).sum()) for window, cost in self.windows)

    def products_of(self, row: Row) -> float:
        """Matrix products of the row, the head included."""
        return self.per_token * row.num_tokens + self.per_term * row.num_trained_tokens


@dataclass(frozen=True, slots=True)
class Training:
    """Operations of one forward and backward pass of a row."""

    forward: Flops
    has_frozen_weights: bool = False  # an adapter is trained: no weight gradients of the model itself
    is_recomputed: bool = False  # gradient checkpointing: the decoder's forward runs once more

    def of(self, row: Row) -> float:
        """What the model needs, however it is computed: the numerator of MFU."""
        attention, products = self.forward.attention_of(row), self.forward.products_of(row)
        return 3 * attention + (2 if self.has_frozen_weights else 3) * products

    def executed(self, row: Row) -> float:
        """What is computed, with the recomputed activations and the head's logits, which backward makes again."""
        head = self.forward.per_term * row.num_trained_tokens
        again = self.forward.attention_of(row) + self.forward.products_of(row) - head if self.is_recomputed else 0.0
        return self.of(row) + again + head


class _Reader:
    """Values of a configuration object or mapping, of its text model where it has one; absent is None."""

    def __init__(self, config: Any):
        self._config = config
        self._config = self("text_config") or config

    def __call__(self, key: str) -> Any:
        config = self._config
        return config.get(key) if isinstance(config, dict) else getattr(config, key, None)

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer; a window without a list is that of all layers."""
        listed = self("layer_types")
        if listed:
            return list(listed)
        is_windowed = self("sliding_window") and self("use_sliding_window") is not False
        return ["sliding_attention" if is_windowed else "full_attention"] * self("num_hidden_layers")

    @property
    def is_gated(self) -> bool:
        """Attention whose output is gated by a second half of the query projection."""
        return bool(self("attn_output_gate")) or "linear_attention" in self.kinds and self("linear_num_value_heads")


def _delta_rule(read: _Reader) -> float:
    heads = read("linear_num_value_heads")
    if not heads:
        # Another kind of recurrence: as the projections of attention.
        hidden, width = read("hidden_size"), read("num_attention_heads") * (read("head_dim") or 0)
        return 8.0 * hidden * (width or hidden)
    key_dim, value_dim = read("linear_key_head_dim"), read("linear_value_head_dim")
    keys, values = read("linear_num_key_heads") * key_dim, heads * value_dim
    hidden = read("hidden_size")
    projections = 2 * hidden * (2 * keys + 3 * values + 2 * heads)
    convolution = 2 * (read("linear_conv_kernel_dim") or 4) * (2 * keys + values)
    return projections + convolution + 6.0 * heads * key_dim * value_dim


def _mlp(read: _Reader, layer: int) -> float:
    hidden = read("hidden_size")
    met = _first(read, "num_experts_per_tok", "moe_k")
    num_experts = _first(read, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    num_dense = _first(read, "first_k_dense_replace", "moe_layer_start_index") or 0
    is_dense = layer in (read("mlp_only_layers") or ()) or layer < num_dense
    if not met or is_dense or (layer + 1) % (read("decoder_sparse_step") or 1):
        return 6.0 * hidden * (read("intermediate_size") or 0)
    width = read("moe_intermediate_size") or read("intermediate_size")
    gated = read("shared_expert_intermediate_size") or 0  # has a gate of one column
    shared = gated or (_first(read, "n_shared_experts", "moe_num_shared_experts") or 0) * width
    return 6.0 * hidden * (met * width + shared) + 2.0 * hidden * ((num_experts or 0) + bool(gated))


def _first(read: _Reader, *keys: str) -> Any:
    return next((read(k) for k in keys if read(k)), None)
