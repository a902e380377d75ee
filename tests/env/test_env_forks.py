"""Random conversations through templates that fork: every generated token is trained once, in the context it was sampled in.

The model is the quickstart's, its log-probs are computed when a token is "sampled"; those of every sample forwarded
alone must be equal.
"""

import asyncio
import dataclasses

import numpy as np
import pytest
from env_chat import FORGETFUL_TEMPLATE, MODEL, TOOL_TEMPLATE, call, make_tokenizer, make_turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agrpo.env.conversation import Conversation
from agrpo.env.stitch import chains, stitch
from agrpo.sampler.vllm import Vllm
from agrpo.types import Prompt

torch = pytest.importorskip("torch")
TEMPLATES = {
    "keeps": TOOL_TEMPLATE,
    "forgets": FORGETFUL_TEMPLATE,
    "trims": TOOL_TEMPLATE.replace("(message.content or '')", "(message.content or '') | trim"),
    "by position": TOOL_TEMPLATE.replace(
        "(message.content or '')", "((message.content or '') if loop.revindex < 4 else '-')"
    ),
}
parts = st.sampled_from(["Hm. ", " so\n", "é", "7 + 5", "", "  "])
answers = st.tuples(
    parts, st.lists(st.sampled_from([("multiply", 2), ("multiply", "x"), ("lost", 1)]), max_size=2), parts
)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    # More positions than the model was trained on; the numbers need no meaning, only equality.
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(template) for name, template in TEMPLATES.items()}


def logprobs(model, token_ids):
    """[L] float32: log-probability of each token given those before it; 0 for the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(token_ids, dtype=torch.long)[None], use_cache=False).logits[0]
    picked = logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:], dtype=torch.long)[:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


def said(tokenizer, answer, splits):
    """Token ids of an answer, cut into single bytes at random places: as sampled, not as text is tokenised."""
    before, calls, after = answer
    text = before + "\n".join(call(name, a=a, b=3) for name, a in calls) + ("" if calls else after)
    pieces = [text[i:j] for i, j in zip([0, *splits], [*splits, len(text)], strict=True)] if splits else [text]
    ids = [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    script=st.lists(st.tuples(answers, st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=4),
    advantage=st.floats(-2, 2, width=16),
)
def test_every_generated_token_is_in_one_sample_with_its_own_context(model, tokenizers, name, script, advantage):
    tokenizer = tokenizers[name]
    limits = Vllm(require_prefix_template=False)
    player = Conversation(tools=["env_samples.multiply"]).open(tokenizer, limits, 10_007, frozenset())
    remaining = iter([*script, (("End.", [], ""), [])])

    async def generate(prompt_ids, key):
        answer, splits = next(remaining)
        output = said(tokenizer, answer, sorted(set(splits)))
        whole = np.concatenate([prompt_ids, output])
        turn = make_turn(prompt_ids, output, logprobs(model, whole)[len(prompt_ids) :])
        return dataclasses.replace(turn, versions=np.full(len(output), key[2], np.int32))

    async def play():
        rollout = await player.play(Prompt(0, 0, [{"role": "user", "content": "Go on."}], {}), generate, 11, 3)
        await player.close()
        return rollout

    rollout = asyncio.run(play())
    samples = stitch(rollout, advantage, 11, 3)
    assert len(samples) == len(chains(rollout.turns))
    trained = np.concatenate([s.token_ids[s.loss_mask] for s in samples])
    assert np.array_equal(trained, np.concatenate([t.output_ids for t in rollout.turns]))
    assert np.concatenate([s.versions[s.loss_mask] for s in samples]).tolist() == [
        n for n, t in enumerate(rollout.turns) for _ in t.output_ids
    ]
    for sample in samples:
        assert (sample.advantage, sample.group_id, sample.rollout_index) == (advantage, 11, 3)
        alone = logprobs(model, sample.token_ids)
        np.testing.assert_allclose(alone[sample.loss_mask], sample.sampler_logprobs[sample.loss_mask], atol=1e-4)


def test_the_templates_of_the_fuzz_do_fork(tokenizers):
    """The forgetful one forks at every turn after the first, the one that keeps never for text as it is tokenised."""
    found = {}
    for name, tokenizer in tokenizers.items():
        limits = Vllm(require_prefix_template=False)
        player = Conversation(tools=["env_samples.multiply"]).open(tokenizer, limits, 10_007, frozenset())
        remaining = iter([(("Hm.\n", [("multiply", 2)], ""), [])] * 3 + [(("End.", [], ""), [])])

        async def generate(prompt_ids, key, tokenizer=tokenizer, remaining=remaining):
            return make_turn(prompt_ids, said(tokenizer, *next(remaining)))

        prompt = Prompt(0, 0, [{"role": "user", "content": "Go on."}], {})
        found[name] = len(stitch(asyncio.run(player.play(prompt, generate, 0, 0)), 1.0, 0, 0))
    assert found == {"keeps": 1, "forgets": 4, "trims": 1, "by position": 3}
