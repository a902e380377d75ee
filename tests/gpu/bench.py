"""`python -m tests.gpu.bench [--tiny]`: the trainer's figures on one GPU, at most 5 minutes, one JSON line each.

    facts      versions and device
    check      attention back ends against the CPU reference (tests/gpu/attention.py)
    step       Qwen3-0.6B- and Qwen3-1.7B-shaped models with random weights: forward, backward and AdamW in bfloat16,
               gradient checkpointing on, score centering with 8 head tokens; groups of 8 samples of 512 + 123 tokens in
               one row, sequence-packed (packing ratio 1.0) and as a tree (3.4). Tokens per second count the samples'
               tokens, MFU the work of what is forwarded, without recomputing, against the GPU's dense bfloat16 peak.
    attention  attention alone, each back end (tests/gpu/attention.py)
    head       the fused head alone (tests/gpu/head.py)

Needs torch, transformers and numpy, and the repository root as the working directory or on PYTHONPATH; no network, nothing
else of agrpo's dependencies. `--tiny` runs the same parts on any machine at a size for seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import attention as tree_attention
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.packer.flops import Flops, Training
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree
from agrpo.train.meter import peak_flops
from agrpo.types import Row
from tests.bench.step import row_of, samples_of
from tests.gpu.attention import check, here, speed
from tests.gpu.parts import run_parts

BUDGET_S = 270.0
SHAPES = {
    "qwen3-0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28),
    "qwen3-1.7b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28),
}
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1)


def main(arguments: list[str]) -> int:
    tiny = "--tiny" in arguments
    started, shapes = time.monotonic(), {"tiny": TINY} if tiny else SHAPES
    parts = {
        "facts": facts,
        "check": lambda: check(tiny),
        **{f"step_{name}": lambda shape=shape: step(shape, tiny) for name, shape in shapes.items()},
        "attention": lambda: speed(tiny),
        "head": lambda: head(BUDGET_S - (time.monotonic() - started)),
    }
    return run_parts(parts, BUDGET_S)


def facts() -> Iterator[dict[str, Any]]:
    """Versions, the device, and what the rule would choose there."""
    import transformers

    device = here()
    yield {"torch": torch.__version__, "transformers": transformers.__version__, "device": _name(device)}
    for line in tree_attention.check(_config(SHAPES["qwen3-0.6b"], 151_936), "auto", device, torch.bfloat16):
        yield {"choice": line}


def step(shape: dict[str, int], tiny: bool) -> Iterator[dict[str, Any]]:
    """A line per packing: tokens per second, MFU, memory; then whether the host waited for the GPU inside a microbatch."""
    device, vocabulary = here(), 1024 if tiny else 151_936
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = _model(shape, vocabulary, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    samples = [s for g in range(1 if tiny else 4) for s in samples_of(8, 512, is_shared=True, group=g)]
    raw, seconds = sum(len(s.token_ids) for s in samples), {}
    work, peak = Training(Flops.of_config(model.config)), peak_flops(_name(device), "bf16")
    for title, packer in (("sequence", Sequence()), ("tree", Tree())):
        row = row_of(packer, samples)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = [_train_step(model, optimizer, row, device) for _ in range(2 if tiny else 6)]
        seconds[title] = min(times[1:] if tiny else times[2:])
        memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        yield {
            "packing": title, "packing_ratio": round(raw / row.num_tokens, 2), "step_s": round(seconds[title], 4),
            "sample_tokens_per_s": round(raw / seconds[title]), "forwarded_tokens": row.num_tokens,
            "mfu": None if peak is None else round(work.of(row) / seconds[title] / peak, 4),
            "peak_memory_gb": None if memory is None else round(memory, 2),
            "first_step_s": round(times[0], 2),
        }  # fmt: skip
    yield {"tree_over_sequence": round(seconds["sequence"] / seconds["tree"], 3)}
    if device.type == "cuda":
        yield _waits(model, row_of(Tree(), samples), device)


def head(left_s: float) -> Iterator[dict[str, Any]]:
    """The head's own script in a process of its own, its lines passed through; on a CPU by Triton's interpreter."""
    environment = os.environ | ({} if here().type == "cuda" else {"TRITON_INTERPRET": "1"})
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.head"], timeout=max(20.0, left_s), check=False, env=environment
    )
    yield {"exit_code": done.returncode, "ok": done.returncode == 0}


def _train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, row: Row, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    _backward(model, row, device)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    wait()
    return time.perf_counter() - started


def _backward(model: torch.nn.Module, row: Row, device: torch.device) -> None:
    terms = token_terms(model, DeviceRow.of(row, device), temperature=1.0, want_head=True)
    (ScoreCentering()(terms).sum() / row.num_trained_tokens).backward()


def _waits(model: torch.nn.Module, row: Row, device: torch.device) -> dict[str, Any]:
    """One microbatch in which torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        _backward(model, row, device)
    except RuntimeError as error:
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return {"host_waits_in_microbatch": str(error).splitlines()[0], "at": frames[-4:], "ok": False}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.zero_grad(set_to_none=True)
    return {"host_waits_in_microbatch": None, "ok": True}


def _config(shape: dict[str, int], vocabulary: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
        head_dim=16 if shape is TINY else 128, attn_implementation=tree_attention.NAME, **shape,
    )  # fmt: skip


def _model(shape: dict[str, int], vocabulary: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import Qwen3ForCausalLM

    tree_attention.register()
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(_config(shape, vocabulary)).to(dtype).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
