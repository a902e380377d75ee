"""The client against the embedded server: what a Turn says equals a plain forward of the same model."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agrpo.metrics.window import Window
from agrpo.sampler.vllm import Vllm
from agrpo.serve.embedded import EmbeddedServer

PROMPT = np.array([3, 7, 11, 5, 2], np.int32)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=89,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=211,
        initializer_range=0.3,
        eos_token_id=5,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    with EmbeddedServer(str(folder)) as server:
        yield server


def sample(server, num_turns=5, centering=True, seed=42, asked=None, **settings):
    async def run():
        sampler = Vllm(**{"max_completion_length": 13, "num_sampler_logprobs": 3, "temperature": 1.5, **settings})
        client = await sampler.connect((server.url,), None, seed, lambda: 7, 60.0, 8, centering, Window())
        async with client:
            turns = (client.generate(PROMPT, (0, slot, 0), temperature=asked) for slot in range(num_turns))
            return await asyncio.gather(*turns)

    return asyncio.run(run())


def plain_logprobs(model, turn, temperature=1.5):
    """[T, V] log-softmax at each generated position."""
    ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.output_ids]))[None].long()
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1)


def test_log_probs_and_heads_equal_a_plain_forward(server, model):
    for turn in sample(server):
        logprobs = plain_logprobs(model, turn)
        chosen = logprobs[range(len(turn.output_ids)), turn.output_ids.tolist()]
        np.testing.assert_allclose(turn.sampler_logprobs, chosen, atol=1e-4)
        np.testing.assert_allclose(turn.head_logprobs, logprobs.topk(3).values, atol=1e-4)
        np.testing.assert_allclose(
            turn.head_logprobs, logprobs.gather(1, torch.tensor(turn.head_ids).long()), atol=1e-4
        )


def test_truncated_sampling_is_normalised_over_the_candidate_set(server, model):
    for turn in sample(server, top_k=4):
        logprobs = plain_logprobs(model, turn)
        for i, token in enumerate(turn.output_ids.tolist()):
            kept = turn.candidates[i].tolist()
            assert sorted(kept) == sorted(logprobs[i].topk(4).indices.tolist()) and token in kept
            expected = logprobs[i, token] - torch.logsumexp(logprobs[i, kept], 0)
            assert abs(turn.sampler_logprobs[i] - float(expected)) < 1e-4


def test_the_most_likely_token_can_be_asked_for_whatever_truncation_the_run_samples_with(server, model):
    for turn in sample(server, num_turns=2, asked=0.0, top_k=4):
        assert turn.output_ids.tolist() == plain_logprobs(model, turn).argmax(-1).tolist()
        assert turn.candidates is None


def test_the_same_seed_gives_the_same_turns_and_another_slot_another(server):
    first, again = sample(server), sample(server, centering=False)
    assert [t.output_ids.tolist() for t in first] == [t.output_ids.tolist() for t in again]
    assert again[0].head_ids.shape == (len(again[0].output_ids), 0)
    assert len({tuple(t.output_ids.tolist()) for t in first}) > 1


def test_the_load_of_the_server_is_read(server):
    async def poll():
        async with await Vllm().connect((server.url,), None, 42, lambda: 1, 60.0, 8, True, Window()) as client:
            assert client.max_model_len > 0 and (await client.server_info())["vllm_config"]
            return await client.poll_load()

    load = asyncio.run(poll())
    assert load.kv_cache_tokens > 0 and load.num_waiting == 0 and not load.paused
