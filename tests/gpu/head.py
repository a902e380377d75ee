"""`python -m tests.gpu.head`: the head on a GPU, one JSON line per case, exit 1 if one fails; about 30 s, no network.

kernels    Triton against torch on the same slices, for each kind of scaling; on a processor with TRITON_INTERPRET=1
whole      log-probs, entropy and gradients against float64 logits made whole, in float32 and bfloat16, with and without
           candidate sets, while any wait for the device is an error
speed      forward and backward at 4,096 terms, hidden 1,024, vocabulary 151,936 in bfloat16, beside plain logits; also
           with torch in place of Triton
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from agrpo.model import head, head_torch
from agrpo.model.candidates import Kept
from agrpo.model.head import head_terms
from agrpo.model.head_torch import Scaling
from agrpo.types import Ragged
from tests.bench.head_child import HEADS, HIDDEN, VOCABULARY, total

SCALINGS = {"plain": Scaling(), "temperature": Scaling(0.7, 0.25), "softcap": Scaling(1.3, 2.0, 30.0)}
TERMS, LIMITS = 4096, {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative; a GPU's float32 product may use TF32


def check_head(device: str) -> Iterator[dict[str, Any]]:
    """Every case that `device` can run: {"case", "ok", figures...}."""
    for name, scaling in SCALINGS.items():
        differences = compare_kernels(device, scaling)
        yield {"case": f"head_kernels_{name}", "ok": max(differences.values()) <= 1e-5, **differences}
    if device == "cpu":
        return
    for dtype in LIMITS:
        for keep in (0, 50):
            errors = compare_whole(device, dtype, keep)
            name = f"head_whole_{str(dtype).removeprefix('torch.')}{'_candidates' if keep else ''}"
            yield {"case": name, "ok": max(errors.values()) <= LIMITS[dtype], **errors}
    yield speed(device)


def compare_kernels(device: str, scaling: Scaling) -> dict[str, float]:
    """Largest difference of each result relative to its largest value, on slices of 2,500 of a vocabulary of 7,003."""
    from agrpo.model import head_triton

    torch.manual_seed(0)
    rows, vocabulary, width = 13, 7003, 2500
    product = 4 * torch.randn(rows, vocabulary, device=device)
    ids = torch.randint(0, vocabulary, (rows, HEADS + 1), device=device)
    ids[::2, 3] = ids[::2, 0]  # the target is often listed
    grad = torch.randn(ids.shape, device=device)
    results = []
    for kernels in (head_triton, head_torch):
        statistics = kernels.Statistics(ids, scaling, torch.float32)
        for first in range(0, vocabulary, width):
            statistics.add(product[:, first : first + width].contiguous(), first)
        logits, log_mass, entropy = statistics.result()
        derivative = kernels.Derivative(ids, grad, log_mass, scaling, torch.float32)
        tiles = [
            derivative.of(product[:, first : first + width].contiguous(), first).clone()
            for first in range(0, vocabulary, width)
        ]
        results.append((logits, log_mass, entropy, torch.cat(tiles, 1)))
    return _differences(("logits", "log_mass", "entropy", "gradient"), *results)


def compare_whole(device: str, dtype: torch.dtype, keep: int) -> dict[str, float]:
    """Of a case of 301 terms: each result against float64 logits made whole from the same inputs."""
    hidden, weight, targets, heads = _inputs(device, 301, dtype)
    kept, inside = None, None
    if keep:
        drawn = np.random.default_rng(0).integers(0, VOCABULARY, (len(targets), keep))
        listed = np.concatenate([drawn, targets.cpu().numpy()[:, None], heads.cpu().numpy()], 1)
        kept = Kept.of(Ragged.of(list(listed)), device)
        inside = torch.zeros(len(targets), VOCABULARY, dtype=torch.bool, device=device)
        inside.scatter_(1, torch.from_numpy(listed).to(device), True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = head_terms(hidden, weight, None, targets, heads, Scaling(0.9), kept)
        total(*ours).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T / 0.9
    full = torch.log_softmax(logits, -1)
    entropy = -(full.exp() * full).sum(-1).detach()
    logprobs = full if inside is None else torch.log_softmax(logits.masked_fill(~inside, -torch.inf), -1)
    theirs = (logprobs.gather(1, targets[:, None]).squeeze(1), logprobs.gather(1, heads), entropy)
    total(*theirs).backward()
    names = ("logprobs", "head_logprobs", "entropy", "grad_hidden", "grad_weight")
    return _differences(names, (*ours, hidden.grad, weight.grad), (*theirs, exact[0].grad, exact[1].grad))


def speed(device: str) -> dict[str, Any]:
    """Milliseconds and extra memory of our head, of the same with torch in place of Triton, and of plain logits."""

    def plain(hidden, weight, targets, heads):
        logprobs = torch.log_softmax(hidden @ weight.T, -1, dtype=torch.float32)
        entropy = -(logprobs.detach().exp().mul_(logprobs.detach())).sum(-1)
        return logprobs.gather(1, targets[:, None]).squeeze(1), logprobs.gather(1, heads), entropy

    def ours(*given):
        return head_terms(given[0], given[1], None, given[2], given[3], Scaling(), None)

    given = _inputs(device, TERMS, torch.bfloat16)
    figures = {name: _measure(way, given) for name, way in (("plain", plain), ("triton", ours))}
    chosen, head.kernels_of = head.kernels_of, lambda _: head_torch
    try:
        figures["torch"] = _measure(ours, given)
    finally:
        head.kernels_of = chosen
    flops = 4 * 2 * TERMS * HIDDEN * VOCABULARY  # the logits twice, two products for gradients
    return {
        "case": "head_speed",
        "ok": figures["triton"]["extra_gib"] < figures["plain"]["extra_gib"] / 8,
        "time_to_plain": round(figures["triton"]["ms"] / figures["plain"]["ms"], 3),
        "teraflops_per_s": round(flops / figures["triton"]["ms"] / 1e9, 1),
        **figures,
    }


def _inputs(device: str, terms: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(terms, HIDDEN, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, device=device) * HIDDEN**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (terms,), device=device)
    return hidden, weight, targets, torch.randint(0, VOCABULARY, (terms, HEADS), device=device)


def _measure(way: Callable, given: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Median time of five after two, and the highest memory above inputs and gradients."""
    times = []
    for _ in range(7):
        given[0].grad = given[1].grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        total(*way(*given)).backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        gradients = sum(x.numel() * x.element_size() for x in given[:2])
        extra = torch.cuda.max_memory_allocated() - before - gradients
    return {"ms": round(sorted(times[2:])[2], 2), "extra_gib": round(extra / 2**30, 3)}


def _differences(names: tuple[str, ...], ours: tuple, theirs: tuple) -> dict[str, float]:
    pairs = zip(names, ours, theirs, strict=True)
    return {n: float(f"{float((a.double() - b.double()).abs().max() / b.abs().max()):.2g}") for n, a, b in pairs}


def main() -> int:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    is_ok = True
    for row in check_head(device):
        print(json.dumps(row), flush=True)
        is_ok &= row["ok"]
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
