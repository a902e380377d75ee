"""Gated DeltaNet layers over a prefix tree, in the hybrids of the Qwen3-Next and Qwen3.5 families (PACK-11).

`bind` gives each such layer a forward that takes the row's `TreePlan` as the keyword `tree_plan`, which the decoder
layers hand on as they do to attention. The layer keeps its class, its weights and their names.
"""

from __future__ import annotations

import logging
import types

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from agrpo.errors import ConfigError
from agrpo.model.delta_plan import DeltaPlan
from agrpo.model.delta_rule import kernel_for, kernel_rule, torch_rule, tree_convolution
from agrpo.model.plan import TreePlan

KIND = "linear_attention"
_log = logging.getLogger(__name__)


def bind(model: torch.nn.Module) -> None:
    """Let the model's linear layers forward tree rows; raises ConfigError for linear layers of another kind (COMPAT-11)."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    layers = [m for m in model.get_decoder().modules() if _projections(m) is not None]
    if len(layers) != sum(kind == KIND for kind in kinds):
        raise ConfigError(
            f"model.path: {type(model).__name__} has {KIND} layers that are not Gated DeltaNet as in Qwen3-Next and "
            "Qwen3.5, which cannot be trained"
        )
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)
    if layers:
        _log.info("%d Gated DeltaNet layers", len(layers))


def _forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, tree_plan: TreePlan | None = None, **kwargs: object
) -> torch.Tensor:
    """[1, N, D] of one row to [1, N, D]."""
    if tree_plan is None:
        raise ConfigError(f"model.path: {type(module).__name__} got no tree plan; forward rows through token_terms")
    plan = tree_plan.derived(DeltaPlan)
    mixed, gate, rate, step = _projections(module)(module, hidden_states)
    widths = [module.key_dim, module.key_dim, module.value_dim]
    convolved = tree_convolution(mixed[0], module.conv1d.weight.squeeze(1), module.conv1d.bias, plan)
    query, key, value = ACT2FN[module.activation](convolved).to(mixed.dtype).split(widths, -1)
    query, key = (x.unflatten(-1, (-1, module.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, module.head_v_dim))
    exact = torch.promote_types(value.dtype, torch.float32)  # exp of a half-precision A_log may overflow
    decay = -module.A_log.to(exact).exp() * F.softplus(step[0].to(exact) + module.dt_bias)
    kernel, parts = kernel_for(value.device.type), (query, key, value, decay, rate[0].sigmoid(), plan)
    out = torch_rule(*parts) if kernel is None else kernel_rule(*parts, kernel)
    out = module.norm(out.flatten(0, 1), gate.reshape(-1, module.head_v_dim)).reshape(1, len(value), -1)
    return module.out_proj(out)


def _projections(module: torch.nn.Module):
    """How this layer makes (query, key, value before the convolution; gate; rate; step); None for any other module."""
    if not all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_v_dim")):
        return None
    if hasattr(module, "in_proj_qkvz") and hasattr(module, "fix_query_key_value_ordering"):
        return _by_key_head
    if all(hasattr(module, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")):
        return _by_kind
    return None


def _by_key_head(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Qwen3-Next: two projections that interleave everything by key head."""
    query, key, value, gate, rate, step = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(x), module.in_proj_ba(x)
    )
    return torch.cat([part.flatten(2) for part in (query, key, value)], -1), gate, rate, step


def _by_kind(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Qwen3.5: a projection each."""
    return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
