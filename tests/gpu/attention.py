"""`python -m tests.gpu.attention [--tiny]`: attention back ends on a GPU, correctness and speed, one JSON line each.

check   each back end that runs here against float64 rectangles on the CPU, output and gradients: small random trees,
        with and without a sliding window and softcap, float32 and bfloat16. Largest difference / largest value.
speed   each back end alone, forward and backward, bfloat16, 16 query and 8 key heads of 128: rows of 4 groups of 8
        samples of 512 + 123 tokens, shared and unrolled, and deep trees whose paths hold 4, 8 and 16 times the row's
        tokens, which is what the rule of `agrpo/model/backends/choice.py` asks about.

`--tiny` is the same on any machine at a size for seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from agrpo.model.attention import BACKENDS, device_facts
from agrpo.model.backends.choice import Case
from agrpo.model.backends.rectangles import Rectangles
from agrpo.model.plan import TreePlan
from tests.bench.attention import plan_of, shared_plan, unshared_plan
from tests.gpu.parts import run_parts

TREES = {
    "group": ([61, 31, 37, 29], [-1, 0, 0, 0]),
    "nested": ([300, 223, 17, 131, 41, 97, 5], [-1, 0, 1, 1, 0, -1, 5]),
    "plain": ([127, 89], [-1, -1]),
}
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # float32: GPUs may multiply it with shortened mantissas


def main(arguments: list[str]) -> int:
    tiny = "--tiny" in arguments
    return run_parts({"check": lambda: check(tiny), "speed": lambda: speed(tiny)}, budget_s=120.0)


def here() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def check(tiny: bool) -> Iterator[dict[str, Any]]:
    """A line per back end and dtype: the largest relative difference over trees, windows and softcaps."""
    width = 16 if tiny else 64
    for name, backend in BACKENDS.items():
        for dtype in (torch.float32, torch.bfloat16):
            worst, count, lacks = 0.0, 0, set()
            for tree in (TREES["group"], TREES["plain"]) if tiny else TREES.values():
                for window, softcap in ((None, None), (37, None), (None, 15.0), (37, 15.0)):
                    plan = plan_of(*tree, here())
                    lack = backend.lacks(_case(dtype, width, softcap, plan.effective_window(window)))
                    if lack is not None:
                        lacks.add(lack)
                        continue
                    worst, count = max(worst, _difference(backend, tree, width, dtype, window, softcap)), count + 1
            row = {"backend": name, "dtype": str(dtype), "cases": count, "lacks": sorted(lacks)}
            yield row if count == 0 else {**row, "difference": float(f"{worst:.2g}"), "ok": worst <= LIMITS[dtype]}


def speed(tiny: bool) -> Iterator[dict[str, Any]]:
    """A line per row and back end: milliseconds of forward and backward, the best of several."""
    device, width = here(), 16 if tiny else 128
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    plans = {"shared": shared_plan(device, 1 if tiny else 4), "unrolled": unshared_plan(device, 1 if tiny else 4)}
    for copies in (4,) if tiny else (4, 8, 16):
        plans[f"deep_{copies}"] = _deep(copies, 16 if tiny else 512, device)
    for title, plan in plans.items():
        for name, backend in BACKENDS.items():
            lack = backend.lacks(_case(dtype, width, None, None))
            if lack is not None:
                continue
            inputs = _inputs(int(plan.ends[-1]), width, dtype, device, heads=2 if tiny else 16)
            times = [_time(backend, inputs, plan) for _ in range(2 if tiny else 6)]  # the first compiles and warms up
            row = {"row": title, "tokens": int(plan.ends[-1]), "copies": round(plan.copies, 2), "backend": name}
            yield {**row, "forward_backward_ms": round(min(times[1:]), 3)}


def _case(dtype: torch.dtype, width: int, softcap: float | None, window: int | None) -> Case:
    return Case(*device_facts(here()), dtype, width, width, softcap, window)


def _deep(copies: int, length: int, device: torch.device) -> TreePlan:
    """A chain of 2 * copies - 1 segments: the path of the i-th holds i of them, on average `copies`."""
    count = 2 * copies - 1
    return plan_of([length] * count, list(range(-1, count - 1)), device)


def _inputs(tokens: int, width: int, dtype: torch.dtype, device: torch.device, heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, h, width) for h in (heads, heads // 2, heads // 2)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.transpose(1, 2).detach().requires_grad_() for x in drawn]


def _difference(backend, tree, width: int, dtype: torch.dtype, window: int | None, softcap: float | None) -> float:
    results = []
    for device, chosen, exact in ((torch.device("cpu"), Rectangles(), torch.float64), (here(), backend, dtype)):
        plan = plan_of(*tree, device)
        inputs = [
            x.detach().to(exact).requires_grad_() for x in _inputs(int(plan.ends[-1]), width, dtype, device, heads=4)
        ]
        out = chosen.attend(*inputs, plan, plan.effective_window(window), softcap, width**-0.5)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
        grads = torch.autograd.grad((out * weight).sum(), inputs)
        results.append([x.detach().double().cpu() for x in (out, *grads)])
    return max(float((got - want).abs().max() / want.abs().max()) for want, got in zip(*results, strict=True))


def _time(backend, inputs: list[torch.Tensor], plan: TreePlan) -> float:
    """Milliseconds of forward and backward; the first of a shape also compiles."""
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    wait()
    started = time.perf_counter()
    torch.autograd.grad(backend.attend(*inputs, plan, None, None, inputs[0].shape[-1] ** -0.5).sum(), inputs)
    wait()
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
