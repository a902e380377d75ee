"""One step of one rank: several updates with the policy of the start, and shares that no division into rows changes."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from agrpo.loss.decoupled import Decoupled
from agrpo.loss.gspo import Gspo
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.packer.cost import Cost
from agrpo.packer.tree import Tree
from agrpo.sections import Model, Optimizer
from agrpo.train.loop import Trainer
from agrpo.train.parity import ParityProbe
from agrpo.train.proximal import Recomputed
from agrpo.train.ranks import Ranks, divide
from agrpo.train.shares import Sharing
from agrpo.types import Microbatch, Row, Sample, Step
from tests.standins import tiny_qwen3


@dataclass
class Watched:
    """A loss that remembers the terms it was given."""

    loss: Decoupled
    seen: list = field(default_factory=list)
    wants_head = False

    def __call__(self, terms):
        self.seen.append(terms)
        return self.loss(terms)

    def statistics(self, terms):
        return self.loss.statistics(terms)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


def make_trainer(folder, loss, proximal=None) -> Trainer:
    ranks, section = Ranks(use_cpu=True, timeout_s=60), Model(path=str(folder), precision="no", gradient_checkpointing=False)
    model = load_model(section, ranks.device)
    shard(model, section, None)
    updater = Updater(model, Optimizer(learning_rate=1e-2, max_grad_norm=0.0), None)
    parity = ParityProbe(ranks.device, is_truncated=False, warn=None, stop=None)
    trainer = Trainer(ranks, model, updater, loss, None, None, None, parity, 1.0, 7, 1)
    trainer.is_synced = True
    return trainer if proximal is None else dataclasses.replace(trainer, proximal=proximal)


def make_samples() -> list[Sample]:
    """Two prompts with answers of 3, 5 and 2, 7 tokens."""
    rng, samples = np.random.default_rng(1), []
    for index, length in enumerate((3, 5, 2, 7)):
        tokens = np.concatenate([[5 + index // 2, 9, 11], rng.integers(3, 40, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= 3
        samples.append(
            Sample(
                token_ids=tokens,
                loss_mask=mask,
                sampler_logprobs=np.where(mask, -4.0, 0).astype(np.float32),
                versions=np.where(mask, 6, -1).astype(np.int32),
                advantage=float(index) - 1.5,
                head_ids=np.zeros((length, 0), np.int32),
                head_logprobs=np.zeros((length, 0), np.float32),
                candidates=None,
                group_id=index // 2,
                rollout_index=index % 2,
            )
        )
    return samples


def row_of(samples: list[Sample]) -> Row:
    planner = Tree().planner(1, 64, Cost(1.0), 1)
    planner.rebuild(samples)
    return planner.flush().microbatches[0].rows[0]


def test_the_second_update_of_a_step_is_clipped_around_the_policy_of_its_start(folder):
    loss = Watched(Decoupled(updates_per_step=2))
    trainer, samples = make_trainer(folder, loss, Recomputed(1.0)), make_samples()
    rows = [row_of(samples[:2]), row_of(samples[2:])]
    with torch.no_grad():
        start = token_terms(trainer.model, DeviceRow.of(rows[1], "cpu"), 1.0, want_head=False).trainer_logprobs
    (work,) = divide(Step(1, tuple(Microbatch((r,)) for r in rows)), Sharing.of(loss.loss, 64))
    trainer.step(work)
    first, second = loss.seen
    assert first.proximal_logprobs is None and first.version == 7
    torch.testing.assert_close(second.proximal_logprobs, start, rtol=0, atol=0)
    assert second.version == 8  # the weights have changed since the last sync
    assert float((second.trainer_logprobs.detach() - start).abs().max()) > 1e-3
    assert trainer.window.to_wire()["grad_norm"][1] == 2
    assert not trainer.is_synced


@pytest.mark.parametrize("num_updates", [1, 2, 4])
def test_the_loss_of_a_step_is_the_mean_of_its_updates(folder, num_updates):
    """Every term is 1, so the loss is 1 however many updates share the step."""

    class One(Decoupled):
        def __call__(self, terms):
            return torch.ones_like(terms.trainer_logprobs) + 0 * terms.trainer_logprobs

    trainer = make_trainer(folder, One(updates_per_step=num_updates))
    rows = [row_of([sample]) for sample in make_samples()]
    (work,) = divide(Step(1, tuple(Microbatch((r,)) for r in rows)), Sharing(num_updates=num_updates))
    trainer.step(work)
    trainer.figures.record(trainer.window, 1)
    assert trainer.window.record(1)["loss"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_rows_and_microbatches_do_not_change_a_steps_gradient(folder, aggregation):
    """LOSS-19, for every aggregation and a loss of whole samples: one row of all samples, or one per microbatch."""
    samples, sharing, found = make_samples(), Sharing(aggregation, length=5), []
    loss = Gspo(epsilon=0.9, epsilon_high=9.0)
    for parts in ([samples], [[s] for s in samples], [samples[::2], samples[1::2]]):
        trainer = make_trainer(folder, loss)
        step = Step(1, tuple(Microbatch((row_of(part),)) for part in parts))
        (work,) = divide(step, sharing)
        for row, shares in zip(work.rows, work.shares, strict=True):
            trainer._accumulate(work, row, shares, None)
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 1e-5
