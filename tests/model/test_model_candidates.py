"""Truncated sampling from the server to the loss: ratios of one at equal weights, exact centering on the candidate sets."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from model_build import make_row

from agrpo.env.stitch import stitch
from agrpo.loss.score_centering import ScoreCentering
from agrpo.metrics.window import Window
from agrpo.model import attention
from agrpo.model.candidates import Kept
from agrpo.model.head import head_terms
from agrpo.model.head_torch import Scaling
from agrpo.model.terms import DeviceRow, TokenTerms, token_terms
from agrpo.sampler.vllm import Vllm
from agrpo.serve.embedded import EmbeddedServer
from agrpo.types import Ragged, Rollout
from tests.standins import tiny_qwen3

TEMPERATURE, HEADS = 1.5, 3
TRUNCATIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 53, "top_p": 0.8},
    "min_p": {"top_k": 53, "min_p": 0.05},
    "all": {"top_k": 11, "top_p": 0.9, "min_p": 0.02},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("candidates"))


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    attention.register()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME).float()


@pytest.fixture(scope="module")
def server(folder):
    with EmbeddedServer(str(folder)) as server:
        yield server


def sampled_row(server, truncation):
    """Eight turns after one prompt, packed as the trainer gets them."""

    async def turns():
        sampler = Vllm(max_completion_length=13, num_sampler_logprobs=HEADS, temperature=TEMPERATURE, **truncation)
        client = await sampler.connect((server.url,), None, 42, lambda: 7, 60.0, 8, True, Window())
        async with client:
            prompt = np.array([3, 7, 11, 5, 2], np.int32)
            return await asyncio.gather(*(client.generate(prompt, (0, slot, 0)) for slot in range(8)))

    played = enumerate(asyncio.run(turns()))
    return make_row([s for slot, turn in played for s in stitch(Rollout((turn,), []), 1.0, 0, slot)])


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_at_equal_weights_every_ratio_is_one_and_heads_agree(name, server, model):
    """SAMP-2: without the candidate sets the ratios would be the mass that truncation keeps."""
    row = sampled_row(server, TRUNCATIONS[name])
    on_device = DeviceRow.of(row, "cpu")
    terms = token_terms(model, on_device, TEMPERATURE, want_head=True)
    np.testing.assert_allclose(terms.trainer_logprobs.detach(), row.sampler_logprobs, atol=2e-5)
    listed = np.isfinite(row.head_logprobs)
    heads = terms.head_trainer_logprobs.detach().numpy()
    np.testing.assert_allclose(heads[listed], row.head_logprobs[listed], atol=2e-5)
    whole = token_terms(model, dataclasses.replace(on_device, kept=None), TEMPERATURE, want_head=True)
    kept_mass = (whole.trainer_logprobs - terms.sampler_logprobs).exp()
    assert kept_mass.max() < 1 and kept_mass.mean() < 0.97
    torch.testing.assert_close(whole.entropy, terms.entropy)  # that of the whole vocabulary either way


SETS = [[3, 7, 20, 28], [0, 7, 8, 9], [1, 2, 4, 11]]  # of a vocabulary of 29


def expected_gradient(loss, num_heads: int, noise: float) -> float:
    """Largest entry of the gradient at the weight, summed over all samples o of each set times q(o), advantage 1."""
    random = torch.Generator().manual_seed(0)
    hidden, weight, logit_noise = (
        torch.randn(shape, generator=random).double() for shape in [(3, 11), (29, 11), (3, 29)]
    )
    weight.requires_grad_()
    members = torch.tensor(SETS)
    inside = torch.zeros(3, 29, dtype=torch.bool).scatter_(1, members, True)
    logits = ((hidden @ weight.T).detach() + noise * logit_noise).masked_fill(~inside, -torch.inf)
    log_q = torch.log_softmax(logits, -1).repeat_interleave(4, 0)  # one term per member of each set
    sampled, heads = members.flatten(), log_q.topk(num_heads).indices
    kept = Kept.of(Ragged.of([members for members in SETS for _ in members]), "cpu")
    trainer = head_terms(hidden.repeat_interleave(4, 0), weight, None, sampled, heads, Scaling(), kept)
    terms = TokenTerms(
        trainer_logprobs=trainer[0],
        sampler_logprobs=log_q.gather(1, sampled[:, None]).squeeze(1),
        advantages=torch.ones(12),
        head_ids=heads,
        head_trainer_logprobs=trainer[1],
        head_sampler_logprobs=log_q.gather(1, heads),
        entropy=trainer[2],
        sample_index=torch.zeros(12, dtype=torch.long),
        num_samples=1,
        versions=torch.zeros(12, dtype=torch.long),
        candidate_counts=torch.full((12,), 4),
    )
    (loss(terms) * terms.sampler_logprobs.exp()).sum().backward()
    return float(weight.grad.abs().max())


def test_centering_is_exact_on_the_sets():
    """SAMP-9 with LOSS-9 and LOSS-10: p and q renormalised on each position's own set; the tail is the rest of the set."""
    wide = {"clip_min": 0.0, "clip_max": 99.0}
    whole_set_other_weights = expected_gradient(ScoreCentering(**wide), num_heads=4, noise=0.5)
    part_of_the_set_equal_weights = expected_gradient(ScoreCentering(**wide), num_heads=2, noise=0.0)
    assert max(whole_set_other_weights, part_of_the_set_equal_weights) < 1e-6
    assert expected_gradient(ScoreCentering(**wide, centering_tail="none"), num_heads=2, noise=0.0) > 1e-2
    # A head that lists more than the set (its other entries have probability 0) is no less exact.
    assert expected_gradient(ScoreCentering(**wide), num_heads=7, noise=0.5) < 1e-6
