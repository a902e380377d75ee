"""Rotary embeddings whose frequencies depend on the length: one set for a whole run, as a server has them.

transformers chooses anew for each forward, by the largest position in it. In a row of several samples that is another
sample's length, and vLLM chooses once, by the longest context that it serves.
"""

from __future__ import annotations

from typing import Any

import torch

from agrpo.errors import ConfigError

_FIXED = "fixed"  # neither of the kinds that transformers chooses frequencies for in forward


def fix_rope(model: torch.nn.Module, context: int) -> None:
    """Frequencies for contexts of up to `context` tokens in every later forward; raises ConfigError where that is impossible.

    `longrope`: the long factors if the context exceeds the original one, else the short ones. `dynamic`: those of the
    model's own context, beyond which no server goes.
    """
    for module in model.get_decoder().modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, kinds, None, context)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fix(module, kind, layer, context) for layer, kind in kinds.items()}


def _fix(module: Any, kind: str, layer: str | None, context: int) -> str:
    if kind != "longrope":
        return _FIXED if "dynamic" in kind else kind
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
    original = parameters["original_max_position_embeddings"]
    if context <= original:
        return _FIXED
    if hasattr(module, "rope_init_fn"):
        # PhiMoE computes the frequencies anew in each forward, and always the short ones.
        raise ConfigError(
            f"server.max_model_len must be at most {original} with this model, whose trainer lacks the frequencies of longer "
            f"contexts, got {context}"
        )
    name = "inv_freq" if layer is None else f"{layer}_inv_freq"
    buffer = getattr(module, name)
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=original + 1, layer_type=layer)
    buffer.copy_(frequencies)
    return _FIXED
