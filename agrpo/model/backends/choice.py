"""Which attention back end a layer of a row uses: what each one lacks, and the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from agrpo.errors import ConfigError
from agrpo.model.plan import TreePlan

# Gathered keys and values are as many as those of this many rows: above it the copies, written once and read twice in
# the forward pass and summed in float32 in the backward pass, are estimated to cost more than FlexAttention's masks.
# An estimate from bytes; `tests/gpu/bench.py` measures both sides.
MANY_COPIES = 8.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a choice depends on."""

    device: str  # "cpu" or "cuda"
    capability: float | None  # compute capability of an NVIDIA GPU; None on CPUs and on AMD GPUs
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: float | None = None
    window: int | None = None
    copies: float = 1.0  # keys gathered along the paths of a row, per token of the row

    @property
    def is_half(self) -> bool:
        """Whether the inputs have 16 bits, which all flash kernels ask for."""
        return self.dtype in (torch.bfloat16, torch.float16)


class Backend(Protocol):
    """One way to compute attention over a tree row."""

    name: str

    def lacks(self, case: Case) -> str | None:
        """What stands in the way of using it for this case, None if nothing does."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: TreePlan,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> torch.Tensor:
        """[1, H, N, D] queries, [1, Hkv, N, D] keys and values to [1, N, H, D], with gradient."""


def order(case: Case) -> tuple[str, ...]:
    """Names from the best to the one that always works (MODEL-5)."""
    if case.device == "cpu":
        return ("torch",)
    if case.capability is None:
        return ("aiter", "varlen", "flex", "torch")
    gathered = ("fa4" if case.capability >= 10 else "fa3", "varlen")
    return ("flex", *gathered, "torch") if case.copies > MANY_COPIES else (*gathered, "flex", "torch")


def choose(case: Case, backends: Mapping[str, Backend]) -> tuple[Backend, str]:
    """The first back end of the order that lacks nothing, and what the ones before it lack."""
    reasons = []
    for name in order(case):
        lack = backends[name].lacks(case)
        if lack is None:
            return backends[name], "; ".join(reasons) or f"the first choice for {case.device}"
        reasons.append(f"{name}: {lack}")
    raise AssertionError("the last back end of every order lacks nothing")


def require(backend: Backend, case: Case) -> Backend:
    """The back end that the configuration names; raises ConfigError where it cannot run the case."""
    lack = backend.lacks(case)
    if lack is not None:
        raise ConfigError(f"model.attention_backend={backend.name} cannot run this model here: {lack}; use auto")
    return backend
