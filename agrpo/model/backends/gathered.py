"""Attention over keys and values gathered along each segment's path, with the kernels that take such sequences.

A segment's queries attend to the keys of its whole path, the causal mask aligned to the end of both, so one call with
the bounds of all segments covers the row. Shared keys are copied once per segment below them, never more than forwarding
the samples separately would hold (PACK-9). A sliding window counts along the path, for a path is contiguous (PACK-10).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn.functional import scaled_dot_product_attention

from agrpo.model.backends.choice import Case
from agrpo.model.plan import Paths, TreePlan


@functools.cache
def _parameters(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class Gathered:
    """Gather, call the kernel, and add the gradients of the copies; a subclass is one kernel."""

    def attend(self, query, key, value, plan: TreePlan, window, softcap, scale) -> torch.Tensor:
        """[1, H, N, D] queries, [1, Hkv, N, D] keys and values to [1, N, H, D]."""
        paths = plan.paths
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if paths.num_keys > len(query):  # else nothing is shared and a gather would copy each key to its own place
            key, value = _Gather.apply(key, paths.index), _Gather.apply(value, paths.index)
        return self.kernel(query, key, value, paths, plan.effective_window(window), softcap, scale)[None]

    def kernel(self, query, key, value, paths: Paths, window, softcap, scale) -> torch.Tensor:
        """[N, H, D] queries, [K, Hkv, D] keys and values of all paths to [N, H, D]."""
        raise NotImplementedError


class _Gather(torch.autograd.Function):
    """Rows of [N, H, D] by index; the backward pass adds the copies' gradients in float32 whatever the dtype."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=exact).index_add_(0, index, grad.to(exact))
        return total.to(grad.dtype), None


class Sdpa(Gathered):
    """PyTorch's scaled_dot_product_attention, one path after the other, on any device."""

    name = "sdpa"

    def lacks(self, case: Case) -> str | None:
        """Soft-capped scores."""
        return "it has no softcap for attention scores" if case.softcap is not None else None

    def kernel(self, query, key, value, paths: Paths, window, softcap, scale) -> torch.Tensor:
        outs = []
        for q0, q1, k0, k1 in paths.bounds:
            q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
            mask = None if window is None and q1 - q0 == k1 - k0 else _visible(q1 - q0, k1 - k0, window, q.device)
            out = scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys] true where the query, at the end of its path, sees the key."""
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


class Varlen(Gathered):
    """`torch.nn.attention.varlen.varlen_attn`, PyTorch's own kernel for sequences of different lengths."""

    name = "varlen"

    def lacks(self, case: Case) -> str | None:
        """A GPU, 16 bits, a head dimension that the kernel has, and no softcap."""
        if case.device != "cuda":
            return "it needs a GPU"
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return f"torch {torch.__version__} has no varlen_attn"
        if not case.is_half:
            return f"it needs bfloat16 or float16, not {_short(case.dtype)}"
        if case.capability is not None and case.capability < 8:
            return f"it needs compute capability 8.0, not {case.capability}"
        if case.capability is None and case.window is not None:
            return "it has no sliding window on AMD GPUs"
        if case.softcap is not None:
            return "it has no softcap for attention scores"
        return _odd_heads(case, 256)

    def kernel(self, query, key, value, paths: Paths, window, softcap, scale) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 has no such argument and takes grouped heads as they are; later releases want them announced.
        grouped = {"enable_gqa": True} if "enable_gqa" in _parameters(varlen_attn) else {}
        return varlen_attn(
            query, key, value, paths.query_starts, paths.key_starts, paths.longest_query, paths.longest_key,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), **grouped,
        )  # fmt: skip


@dataclass(frozen=True)
class Hub(Gathered):
    """A flash kernel of the `kernels` library, as far as that package is installed and has it for the device."""

    name: str
    repository: str
    version: int
    capabilities: tuple[float, float] | None  # NVIDIA GPUs from the first to below the second; None = AMD GPUs
    largest_head: int
    has_softcap: bool

    def lacks(self, case: Case) -> str | None:
        """The package, the device, the kernel's build for it, or a feature."""
        if case.device != "cuda":
            return "it needs a GPU"
        if (case.capability is None) != (self.capabilities is None):
            return f"it runs on {'AMD' if self.capabilities is None else 'NVIDIA'} GPUs only"
        if self.capabilities is not None and not self.capabilities[0] <= case.capability < self.capabilities[1]:
            return f"it needs compute capability {self.capabilities[0]} or newer, below {self.capabilities[1]}"
        if not case.is_half:
            return f"it needs bfloat16 or float16, not {_short(case.dtype)}"
        if case.softcap is not None and not self.has_softcap:
            return "it has no softcap for attention scores"
        lack = _odd_heads(case, self.largest_head)
        if lack is None and importlib.util.find_spec("kernels") is None:
            lack = "the package kernels is not installed"
        return lack or _load(self.repository, self.version)[1]

    def kernel(self, query, key, value, paths: Paths, window, softcap, scale) -> torch.Tensor:
        function = _load(self.repository, self.version)[0].flash_attn_varlen_func
        more = {"softcap": softcap} if softcap is not None else {}
        if window is not None:
            more["window_size"] = (window - 1, 0)
        # Names that differ between the kernels' generations are passed to those that have them.
        lengths = {"max_seqlen_q": paths.longest_query, "max_seqlen_k": paths.longest_key}
        more |= {name: value for name, value in lengths.items() if name in _parameters(function)}
        out = function(
            query, key, value, cu_seqlens_q=paths.query_starts, cu_seqlens_k=paths.key_starts,
            softmax_scale=scale, causal=True, **more,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out


HUB = (
    Hub("fa3", "kernels-community/flash-attn3", 1, (8.0, 10.0), largest_head=256, has_softcap=True),
    Hub("fa4", "kernels-community/flash-attn4", 0, (10.0, 12.0), largest_head=128, has_softcap=False),
    Hub("aiter", "kernels-community/aiter-flash-attn", 2, None, largest_head=256, has_softcap=False),
)


@functools.cache
def _load(repository: str, version: int) -> tuple[ModuleType | None, str | None]:
    """The kernel's module, or why there is none; asked once, for a hub that does not answer is slow to say so."""
    from kernels import get_kernel

    try:
        return get_kernel(repository, version=version), None
    except Exception as error:  # no build for this device, no network and not in the cache, a library too old
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"{repository} cannot be loaded: {line}"


def _odd_heads(case: Case, largest: int) -> str | None:
    if case.head_dim != case.value_dim:
        return f"it needs values as wide as keys, not {case.value_dim} against {case.head_dim}"
    if case.head_dim > largest or case.head_dim % 8:
        return f"it needs a head dimension that is a multiple of 8 up to {largest}, not {case.head_dim}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
