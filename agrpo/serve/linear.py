"""Gated DeltaNet layers over flat tokens of many requests, by transformers' own layers and their caching path.

Each request keeps what such a layer remembers of it: the last inputs of the convolution and the recurrent state.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from agrpo.serve.attention import StepLayout
    from agrpo.serve.request import Request

KIND = "linear_attention"


@dataclass(slots=True)
class StateSpan:
    """Tokens `start`..`end` of a step: a new context that several requests share, or one token of each request."""

    start: int
    end: int
    requests: list[Request]
    is_new: bool


def linear_layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The layers that this module can run: those with the parts of the Qwen3-Next and Qwen3.5 families' layers."""
    parts = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "layer_idx")
    return [(name, m) for name, m in model.named_modules() if all(hasattr(m, part) for part in parts)]


def bind(model: torch.nn.Module) -> None:
    for _, layer in linear_layers(model):
        layer.forward = types.MethodType(_spanned(type(layer).forward), layer)


class _States:
    """One layer's part of the interface of transformers' `Cache`, over the rows of one call."""

    def __init__(self, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None):
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, inputs: torch.Tensor, layer_idx: int, conv_kernel_size: int) -> torch.Tensor:
        """Inputs [n, D, T] of new contexts; what precedes them is zero."""
        inputs = F.pad(inputs, (max(0, conv_kernel_size - inputs.shape[-1]), 0))
        self.conv = inputs[..., -conv_kernel_size:].clone()
        return inputs

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int) -> None:
        self.recurrent = state


def _spanned(forward):
    def run(module: torch.nn.Module, hidden_states: torch.Tensor, layout: StepLayout, **kwargs: object) -> torch.Tensor:
        """[1, N, D] to [1, N, D]."""
        out = torch.empty_like(hidden_states)
        for span in layout.states:
            tokens = hidden_states[:, span.start : span.end]
            run_span = _run_new if span.is_new else _run_next
            out[:, span.start : span.end] = run_span(module, forward, tokens, span.requests)
        return out

    return run


def _run_new(module, forward, tokens: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    states = _States()
    out = forward(module, tokens, cache=states)
    for request in requests:
        request.states[module.layer_idx] = (states.conv, states.recurrent)
    return out


def _run_next(module, forward, tokens: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    held = [request.states[module.layer_idx] for request in requests]
    states = _States(*(torch.cat(parts) for parts in zip(*held, strict=True)))
    out = forward(module, tokens.transpose(0, 1), cache=states)
    for request, conv, recurrent in zip(requests, states.conv.split(1), states.recurrent.split(1), strict=True):
        request.states[module.layer_idx] = (conv, recurrent)
    return out.transpose(0, 1)
