"""A training step in a process of its own: `python memory_step.py KIND` prints its real peak and the estimate, in bytes."""

import gc
import json
import sys

import numpy as np
import torch
import transformers as hf

from agrpo.loss.grpo import Grpo
from agrpo.model import attention
from agrpo.model.load import prepare
from agrpo.model.memory import estimate
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, sequence_row, token_terms
from agrpo.sections import Lora, Model, Optimizer
from tests.memory import status_bytes

SHAPE = dict(vocab_size=8191, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
             num_key_value_heads=2, head_dim=64, tie_word_embeddings=False)  # fmt: skip
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=512)
PLAIN = dict(path="-", precision="no", gradient_checkpointing=False)
CASES = {
    "plain": (Model(**PLAIN), 1999, {}),
    "checkpointed": (Model(path="-", precision="no", gradient_checkpointing=True), 2999, {}),
    "bf16": (Model(path="-", precision="bf16", gradient_checkpointing=False), 799, {}),
    "adapter": (Model(**PLAIN, lora=Lora(enabled=True, r=8)), 1999, {}),
    "experts": (Model(**PLAIN), 1499, EXPERTS),
}


def step(section: Model, tokens: int, shape: dict) -> int:
    """Makes a model and trains one row; returns how many parameters the model had before an adapter."""
    torch.manual_seed(0)
    attention.register()
    name = "Qwen3Moe" if "num_experts" in shape else "Qwen3"
    config = getattr(hf, f"{name}Config")(**shape, attn_implementation=attention.NAME)
    model = getattr(hf, f"{name}ForCausalLM")(config)
    num_parameters = model.num_parameters()
    shard(prepare(model, section), section, None)
    updater, loss = Updater(model, Optimizer(name="adamw_torch"), None), Grpo()
    for count in (7, tokens):  # the first makes the moments
        row = DeviceRow.of(sequence_row(np.arange(count) % shape["vocab_size"]), "cpu")
        updater.backward(loss(token_terms(model, row, 1.0, want_head=False)).sum() / tokens)
        updater.step()
    return num_parameters


def main(kind: str) -> None:
    torch.set_num_threads(1)
    section, tokens, more = CASES[kind]
    shape = {**SHAPE, **more}
    # What libraries and first calls cost is not the model's: a step of a few tokens of a tiny model comes before.
    step(section, 7, {**shape, "vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1})
    gc.collect()
    before = status_bytes("VmHWM")
    num_parameters = step(section, tokens, shape)
    expected = estimate(section, shape, num_parameters=num_parameters, num_ranks=1, row_tokens=tokens, device="cpu")
    print(
        json.dumps({"real": status_bytes("VmHWM") - before, "expected": expected.peak, "state": expected.state + expected.gradients})
    )


if __name__ == "__main__":
    main(sys.argv[1])
    gc.freeze()  # the end looks through everything otherwise, which takes longer than a test's own work
