"""On a GPU only: a microbatch never waits for the device, so that the next one can be prepared meanwhile."""

import dataclasses

import pytest
import torch

from agrpo.loss.decoupled import Decoupled
from agrpo.loss.gspo import Gspo
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.packer.cost import Cost
from agrpo.packer.tree import Tree
from agrpo.sections import Model, Optimizer
from agrpo.train.loop import Trainer
from agrpo.train.parity import ParityProbe
from agrpo.train.ranks import Ranks, divide
from agrpo.train.shares import Sharing
from tests.bench.step import samples_of
from tests.standins import tiny_qwen3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("loss", [ScoreCentering(), Gspo(), Decoupled()], ids=lambda loss: type(loss).__name__)
def test_a_microbatch_does_not_wait_for_the_device(tmp_path, loss):
    ranks, section = Ranks(use_cpu=False, timeout_s=60), Model(path=str(tiny_qwen3(tmp_path)), precision="bf16")
    model = load_model(section, ranks.device)
    shard(model, section, None)
    updater = Updater(model, Optimizer(), None)
    parity = ParityProbe(ranks.device, is_truncated=False, warn=None, stop=None)
    trainer = Trainer(ranks, model, updater, loss, None, None, None, parity, 1.0, 1, 1)
    planner = Tree().planner(1, 8192, Cost(1.0), 1)
    small = model.config.vocab_size
    planner.rebuild(
        dataclasses.replace(s, token_ids=s.token_ids % small, head_ids=s.head_ids % small)
        for s in samples_of(3, 88, is_shared=True)
    )
    (work,) = divide(planner.flush(), Sharing())
    trainer._accumulate(work, work.rows[0], work.shares[0], None)  # first calls load kernels and make handles
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._accumulate(work, work.rows[0], work.shares[0], None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(torch.tensor(updater.step().grad_norm))
