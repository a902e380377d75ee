"""A training step in a process of its own: `python memory_step.py KIND` prints its real peak and the estimate, in bytes."""

import gc
import json
import sys

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agrpo.loss.grpo import Grpo
from agrpo.model import attention
from agrpo.model.load import prepare
from agrpo.model.memory import estimate
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, sequence_row, token_terms
from agrpo.sections import Model, Optimizer
from tests.memory import status_bytes

SHAPE = dict(vocab_size=8191, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
             num_key_value_heads=2, head_dim=64, tie_word_embeddings=False)  # fmt: skip
CASES = {
    "plain": (Model(path="-", precision="no", gradient_checkpointing=False), 1999),
    "checkpointed": (Model(path="-", precision="no", gradient_checkpointing=True), 2999),
}


def step(section: Model, tokens: int) -> None:
    torch.manual_seed(0)
    attention.register()
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, attn_implementation=attention.NAME))
    shard(prepare(model, section), section, None)
    updater, loss = Updater(model, Optimizer(name="adamw_torch"), None), Grpo()
    for count in (7, tokens):  # the first makes the moments
        row = DeviceRow.of(sequence_row(np.arange(count) % SHAPE["vocab_size"]), "cpu")
        updater.backward(loss(token_terms(model, row, 1.0, want_head=False)).sum() / tokens)
        updater.step()


def main(kind: str) -> None:
    torch.set_num_threads(1)
    section, tokens = CASES[kind]
    # What libraries and first calls cost is not the model's: a step of a few tokens of a tiny model comes before.
    size = dict(SHAPE)
    SHAPE.update(vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=1)
    step(section, 7)
    SHAPE.update(size)
    gc.collect()
    before = status_bytes("VmHWM")
    step(section, tokens)
    num_parameters = 2 * 8191 * 384 + 6 * (384 * 64 * 16 + 3 * 384 * 1024)
    expected = estimate(section, SHAPE, num_parameters=num_parameters, num_ranks=1, row_tokens=tokens, device="cpu")
    print(
        json.dumps({"real": status_bytes("VmHWM") - before, "expected": expected.peak, "state": expected.state + expected.gradients})
    )


if __name__ == "__main__":
    main(sys.argv[1])
