"""Attention over a prefix tree, registered with transformers; a rule chooses the back end, or the configuration does.

The model's decoder layers hand the row's `TreePlan` through as the keyword `tree_plan`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from agrpo.errors import ConfigError
from agrpo.model.backends.choice import Backend, Case, choose, require
from agrpo.model.backends.flex import Flex
from agrpo.model.backends.gathered import HUB, Sdpa, Varlen
from agrpo.model.backends.rectangles import Rectangles
from agrpo.model.plan import TreePlan

NAME = "agrpo_tree"  # the implementation that chooses; `implementation` gives those of one back end
FAMILIES = "docs/architecture.md, which models"
BACKENDS: dict[str, Backend] = {b.name: b for b in (Rectangles(), Sdpa(), Varlen(), Flex(), *HUB)}


def implementation(backend: str = "auto") -> str:
    """The name under which transformers knows tree attention with this back end."""
    return NAME if backend == "auto" else f"{NAME}_{backend}"


def register() -> None:
    """Make the names of `implementation` known to transformers; no mask is ever built for them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for backend in ("auto", *BACKENDS):
        AttentionInterface.register(implementation(backend), functools.partial(tree_attention, backend=backend))
        AttentionMaskInterface.register(implementation(backend), lambda *args, **kwargs: None)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_plan: TreePlan | None = None,
    s_aux: torch.Tensor | None = None,
    backend: str = "auto",
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """[1, H, N, D] queries and [1, Hkv, N, D] keys and values of one row to [1, N, H, D]; never with dropout.

    Raises ConfigError where the model does not pass the plan on, has a mask of its own, sees later tokens or uses attention
    sinks (COMPAT-10), and where the named back end cannot run the case.
    """
    if tree_plan is None:
        _refuse(module, "does not get the layout of a row from its model, so rows of several samples cannot be forwarded")
    if s_aux is not None:
        _refuse(module, "has attention sinks, which tree attention lacks")
    if attention_mask is not None:
        _refuse(module, "makes a mask of its own, which tree attention would ignore")
    if not getattr(module, "is_causal", True):
        _refuse(module, "sees later tokens, which a model that generates must not")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Rotary embeddings or query norms may leave q and k in float32 under autocast; the values have the compute dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    kind, capability = device_facts(query.device)
    window = tree_plan.effective_window(sliding_window)
    case = Case(
        kind, capability, value.dtype, query.shape[-1], value.shape[-1], softcap, window, round(tree_plan.copies, 1)
    )
    chosen = _chosen(backend, case)[0]
    return chosen.attend(query, key, value, tree_plan, window, softcap, scale), None


def _refuse(module: torch.nn.Module, reason: str) -> None:
    raise ConfigError(f"model.path: {type(module).__name__} {reason}; choose a model of another family: {FAMILIES}")


class Arrived(Exception):
    """The probe reached a layer that reads the row's plan."""


class Probe:
    """In the place of a row's plan: whoever reads anything of it raises `Arrived`."""

    def __getattr__(self, name: str) -> Any:
        raise Arrived


def refuse_decoder(decoder: torch.nn.Module) -> None:
    """Two tokens up to the first layer that reads the plan; raises ConfigError as `tree_attention` would for a row."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=next(decoder.parameters()).device)
    try:
        with torch.no_grad():
            decoder(input_ids=ids, position_ids=ids.cumsum(1), use_cache=False, tree_plan=Probe())
    except Arrived:
        return
    _refuse(decoder, "has no attention layer that could read the layout of a row")


def check(config: Any, backend: str, device: torch.device | str, dtype: torch.dtype) -> list[str]:
    """What the attention layers of a model will use and why, a line each; raises ConfigError as `tree_attention` would.

    `config` is the text configuration of transformers, `dtype` that of forward and backward.
    """
    kind, capability = device_facts(torch.device(device))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softcap = getattr(config, "attn_logit_softcapping", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    windows = {
        getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        for kind in kinds
        if kind != "linear_attention"
    }
    lines = []
    for window in sorted(windows, key=lambda w: w or 0):
        chosen, reason = _chosen(backend, Case(kind, capability, dtype, head_dim, head_dim, softcap, window))
        layers = "full attention" if window is None else f"sliding window of {window}"
        lines.append(f"{layers}: back end {chosen.name} ({reason})")
    return lines


@functools.lru_cache(maxsize=1024)
def _chosen(backend: str, case: Case) -> tuple[Backend, str]:
    if backend == "auto":
        return choose(case, BACKENDS)
    return require(BACKENDS[backend], case), "as model.attention_backend says"


@functools.cache
def device_facts(device: torch.device) -> tuple[str, float | None]:
    """Kind of device, and an NVIDIA GPU's compute capability."""
    if device.type != "cuda":
        return "cpu", None
    if torch.version.hip is not None:
        return "cuda", None
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", major + minor / 10
