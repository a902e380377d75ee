"""FlexAttention over the row as it is: a block mask from the tree, no gathered copy.

A row is laid out depth first, so key j's segment lies on query i's path iff j <= i < end of j's subtree: two comparisons
instead of a walk. Sliding windows compare depths along the path (PACK-10), softcap changes the scores (COMPAT-10).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import numpy as np
import torch

from agrpo.model.backends.choice import Case
from agrpo.model.plan import TreePlan, on_device

BLOCK = 128  # tokens per side of a block of the mask, FlexAttention's own default


class Flex:
    """`torch.nn.attention.flex_attention`, compiled on a GPU at its first use and then for every length."""

    name = "flex"

    def lacks(self, case: Case) -> str | None:
        """A GPU, for its backward pass has no other device, and heads that fit the GPU's shared memory."""
        if case.device != "cuda":
            return "its backward pass needs a GPU"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        largest = 256 if case.is_half else 128
        if not 16 <= case.head_dim <= largest or case.value_dim > largest:
            return f"it needs a head dimension of 16 to {largest} in {str(case.dtype).removeprefix('torch.')}"
        return None

    def attend(self, query, key, value, plan: TreePlan, window, softcap, scale) -> torch.Tensor:
        """[1, H, N, D] queries, [1, Hkv, N, D] keys and values to [1, N, H, D]."""
        attention = _compiled() if query.is_cuda else _eager()
        out = attention(
            query, key, value,
            score_mod=None if softcap is None else _softcap(softcap),
            block_mask=block_mask(plan, plan.effective_window(window)),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)


def block_mask(plan: TreePlan, window: int | None):
    """The plan's BlockMask for an effective window, made once: [1, 1, N, N] with blocks of 128 tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    def make() -> BlockMask:
        partial, full = _blocks(plan, window)
        device, tokens = plan.depths.device, int(plan.ends[-1])
        return BlockMask.from_kv_blocks(
            *(on_device(x, device) for x in (*_listed(partial), *_listed(full))),
            BLOCK_SIZE=BLOCK, mask_mod=visible(plan, window), seq_lengths=(tokens, tokens),
        )  # fmt: skip

    return plan.kept(("flex", window), make)


def visible(plan: TreePlan, window: int | None) -> Callable:
    """Whether query i sees key j, as FlexAttention asks: (batch, head, i, j) to bool."""
    last = plan.kept(("last",), lambda: on_device(plan.last_queries, plan.depths.device))
    if window is None:
        return lambda batch, head, i, j: (j <= i) & (i < last[j])
    depths, hidden = plan.depths, plan.depths - window  # tensors, so that no number is compiled into the kernel
    return lambda batch, head, i, j: (j <= i) & (i < last[j]) & (depths[j] > hidden[i])


@functools.cache
def _softcap(softcap: float) -> Callable:
    """The score change, with the number in its text: a captured float becomes an input that the compiler cannot take."""
    cap = repr(float(softcap))
    return eval(f"lambda score, batch, head, i, j: {cap} * torch.tanh(score / {cap})", {"torch": torch})


def _blocks(plan: TreePlan, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[B, B] blocks that need the mask, and blocks that every query sees whole; all others are empty."""
    last, tokens = plan.last_queries, int(plan.ends[-1])
    firsts = np.arange(0, tokens, BLOCK)
    ends = np.minimum(firsts + BLOCK, tokens)
    query, key = np.arange(len(firsts))[:, None], np.arange(len(firsts))[None]
    touched = (key <= query) & (firsts[:, None] < np.maximum.reduceat(last, firsts)[None])
    full = (key < query) & (ends[:, None] <= np.minimum.reduceat(last, firsts)[None])
    full[-1] &= tokens % BLOCK == 0  # the last block may have no queries at its end
    if window is not None:
        depths = plan.host_depths
        low, high = np.minimum.reduceat(depths, firsts), np.maximum.reduceat(depths, firsts)
        touched &= low[:, None] - high[None] < window
        full &= high[:, None] - low[None] < window
    return touched & ~full, touched & full


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, B] bool to [1, 1, B] counts and [1, 1, B, B] key blocks of each query block, those that count first."""
    counts, columns = blocks.sum(1, dtype=np.int32), np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return counts[None, None], columns[None, None]


@functools.cache
def _compiled() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamic from the start: otherwise each new row length would be compiled anew, for many seconds.
    return torch.compile(flex_attention, dynamic=True)


def _eager() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention
