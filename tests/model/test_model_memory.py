"""The memory estimate against the peak of a real training step, and its rules by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agrpo.model import head
from agrpo.model.memory import SLICE_LOGITS, estimate
from agrpo.sections import Fsdp, Lora, Model

TOLERANCE = 0.25
TEXT = {"hidden_size": 4, "num_hidden_layers": 3, "vocab_size": 11, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 3, "intermediate_size": 7}  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "bf16", "adapter", "experts"])
def test_the_estimate_is_within_a_quarter_of_a_real_steps_peak(kind):
    """On CPU: weights, gradients, two moments and the activations of one row, in a process of its own."""
    here = Path(__file__)
    environment = {**os.environ, "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"}
    # Freed memory goes back at once, so that the peak is what was held together.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(here.with_name("memory_step.py")), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["expected"] == pytest.approx(found["real"], rel=TOLERANCE), found
    assert found["expected"] > 1.2 * found["state"], "activations are part of the test"


def test_parts_by_hand():
    """1,000 parameters, 5 tokens: embeddings and head 2 * 11 * 4; a layer holds 6 * 4 + 4 * (6 + 3 + 7) = 88 values."""
    plain = estimate(
        Model(path="-", precision="no", gradient_checkpointing=False),
        TEXT,
        num_parameters=1000,
        num_ranks=1,
        row_tokens=5,
    )
    assert (plain.weights, plain.gradients, plain.optimizer, plain.compute_copy) == (4000, 4000, 8000, 0)
    assert plain.activations == 5 * 4 * 3 * 88
    assert plain.logits == 3 * 4 * 5 * 11 + 4 * 11 * 4
    assert SLICE_LOGITS == head.SLICE_LOGITS
    checkpointed = estimate(Model(path="-"), TEXT, num_parameters=1000, num_ranks=1, row_tokens=5)
    assert checkpointed.activations == 5 * 2 * (3 * 4 + 88 + 8 * 4)
    assert checkpointed.compute_copy == 2000
    half = estimate(Model(path="-"), TEXT, num_parameters=1000, num_ranks=2, row_tokens=5, optimizer="sgd", bucket_mb=1)
    assert (half.weights, half.gradients, half.optimizer, half.compute_copy) == (2000, 2000, 0, 0)
    assert half.gathered == 2 * (88 + 2 * (1000 - 88) / 3) + 6 * (1000 - 88) / 3
    assert half.sync == 4000 + 4 * 44
    assert half.peak == 2000 + half.activations + half.logits + half.gathered
    several = estimate(Model(path="-"), TEXT, num_parameters=1000, num_ranks=1, row_tokens=5, num_microbatches=2)
    assert several.peak == checkpointed.peak + several.gradients


def test_an_adapter_trains_few_and_an_unknown_shape_gives_no_activations():
    section = Model(path="-", dtype="bfloat16", lora=Lora(enabled=True, r=2), fsdp=Fsdp(enabled=False))
    adapter = estimate(section, TEXT, num_parameters=1000, num_ranks=1, row_tokens=5)
    # Per layer: q 4 + 6, o 6 + 4, k and v 4 + 3 each, MLP 3 * (4 + 7) = 67 values per unit of rank.
    assert adapter.weights == 2000 + adapter.gradients
    assert adapter.gradients == 2 * 3 * 2 * 67
    unknown = estimate(Model(path="-"), None, num_parameters=1000, num_ranks=1, row_tokens=5)
    assert (unknown.activations, unknown.logits, unknown.gathered) == (0, 0, 0)


@pytest.mark.parametrize("options, num_shards, num_whole", [
    ({}, 8, 2), ({"replicate": 2}, 4, 2), ({"replicate": 8}, 1, 2), ({"reshard_after_forward": False}, 8, 3), ({"prefetch": 0}, 8, 1),
])  # fmt: skip
def test_the_ranks_of_one_copy_share_it_and_hold_so_many_layers_whole(options, num_shards, num_whole):
    """Of 1,000 parameters 88 are embeddings and head, the others three layers; float32 shards, bfloat16 in forward."""
    section = Model(path="-", fsdp=Fsdp(options=options))
    found = estimate(section, TEXT, num_parameters=1000, num_ranks=8, row_tokens=5)
    layer = (1000 - 88) / 3
    assert (found.weights, found.gradients, found.optimizer) == (4000 / num_shards, 4000 / num_shards, 8000 / num_shards)
    assert found.gathered == pytest.approx(2 * (88 + num_whole * layer) + 6 * layer)


def test_shards_in_main_memory_leave_the_gpu_what_a_step_makes():
    section = Model(path="-", fsdp=Fsdp(options={"cpu_offload": True}))
    given = dict(num_parameters=1000, num_ranks=2, row_tokens=5)
    gpu, cpu = (estimate(section, TEXT, **given, device=device) for device in ("cuda", "cpu"))
    assert (gpu.weights, gpu.gradients, gpu.optimizer, gpu.host) == (0, 0, 0, 2000 + 2000 + 4000)
    assert gpu.peak == gpu.activations + gpu.logits + gpu.gathered
    assert (cpu.weights, cpu.host) == (2000, 0), "the ranks' device is main memory itself"


def test_towers_that_text_does_not_pass_are_held_but_not_trained():
    given = dict(num_parameters=1000, num_frozen=400, num_ranks=1, row_tokens=5)
    found = estimate(Model(path="-"), TEXT, **given)
    assert (found.weights, found.compute_copy, found.gradients, found.optimizer) == (4000, 1200, 2400, 4800)
    sharded = estimate(Model(path="-", dtype="bfloat16", fsdp=Fsdp(enabled=True)), TEXT, **given)
    assert sharded.weights == 2 * 400 + 4 * 600


def test_a_mixtures_tokens_pass_some_experts_and_an_adapter_leaves_experts_out():
    """As Mixtral: two of five experts as wide as intermediate_size, 6 * 4 + 4 * (6 + 3 + 2 * 7) values per layer and token."""
    text = {**TEXT, "num_local_experts": 5, "num_experts_per_tok": 2}
    plain = Model(path="-", precision="no", gradient_checkpointing=False)
    assert estimate(plain, text, num_parameters=1000, num_ranks=1, row_tokens=5).activations == 5 * 4 * 3 * 116
    adapter = Model(path="-", precision="no", lora=Lora(enabled=True, r=2))
    assert estimate(adapter, text, num_parameters=1000, num_ranks=1, row_tokens=5).gradients == 4 * 3 * 2 * 34
