"""What the embedded server reports about its tokens, against a plain forward and against numpy."""

import numpy as np
import pytest
import torch
from serving import EOS, assert_logprobs, call, generate, prompt_of, together

from agrpo.serve.embedded import EmbeddedServer
from agrpo.serve.sampling import SamplingParams, draw, uniforms


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logprobs_and_head_equal_a_plain_forward(kind, folders, plain):
    lengths, temperature = [3, 11, 23, 7, 5, 23, 3], 0.7
    prompts = [prompt_of(i, n) for i, n in enumerate(lengths)]
    prompts[5] = prompts[2]  # siblings share their prompt's computation
    with EmbeddedServer(folders[kind]) as server:
        choices = together(
            [
                lambda i=i, p=p: generate(server.url, p, temperature=temperature, max_tokens=31 + i, logprobs=5, seed=i)
                for i, p in enumerate(prompts)
            ]
        )
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_logprobs(choice, plain(kind, prompt + choice["token_ids"]), len(prompt), temperature)
    assert choices[2]["token_ids"] != choices[5]["token_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 11, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 7},
        {"top_p": 0.9},
        {"min_p": 0.05, "top_k": 53},
        {"top_k": 1},
    ],
)
def test_sampling_mask_and_renormalised_logprobs(settings, qwen, plain):
    prompt = prompt_of(3, 13)
    choice = generate(
        qwen.url, prompt, temperature=1.3, max_tokens=29, logprobs=5, seed=17, ignore_eos=True, **settings
    )
    logits = plain("qwen3", prompt + choice["token_ids"]).double().numpy()
    assert len(choice["sampling_mask"]) == len(choice["token_ids"]) == 29
    for i, token in enumerate(choice["token_ids"]):
        expected = numpy_candidates(logits[len(prompt) + i - 1] / 1.3, **settings)
        assert choice["sampling_mask"][i] == list(expected)
        entry = choice["logprobs"]["content"][i]
        assert entry["logprob"] == pytest.approx(expected[token], abs=1e-5)
        head = sorted(entry["top_logprobs"], key=lambda e: e["rank"])
        head = [e for e in head if e["rank"] <= 5]
        assert [e["token_id"] for e in head] == list(expected)[:5]
        assert [e["logprob"] for e in head] == pytest.approx(list(expected.values())[:5], abs=1e-5)


def numpy_candidates(scaled, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Ranked candidates and their renormalised log-probabilities, re-derived one rule at a time."""
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept = [i for i in np.argsort(-scaled) if p[i] >= min_p * p.max()]
    kept = kept[: top_k or None]
    total, nucleus, mass = sum(p[i] for i in kept), [], 0.0
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(int(i))
        mass += p[i] / total
    total = sum(p[i] for i in nucleus)
    return {i: float(np.log(p[i] / total)) for i in nucleus}


def test_no_mask_without_truncation_and_no_head_without_logprobs(qwen):
    choice = generate(qwen.url, prompt_of(1, 5), max_tokens=3, seed=1)
    assert choice["sampling_mask"] is None
    assert all(len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])


def test_an_answer_depends_on_its_seed_and_not_on_its_neighbours(qwen):
    def ask(seed):
        return generate(qwen.url, prompt_of(7, 11), max_tokens=61, logprobs=2, seed=seed, ignore_eos=True)

    alone = ask(2**63 - 25)
    busy = together(
        [lambda: ask(2**63 - 25)]
        + [
            lambda i=i: generate(qwen.url, prompt_of(i, 3 + i), max_tokens=40 + i, top_k=i % 3, seed=i)
            for i in range(23)
        ]
        + [lambda: ask(2**63 - 25)]
    )
    assert busy[0]["token_ids"] == busy[-1]["token_ids"] == alone["token_ids"]
    logprobs = [[e["logprob"] for e in c["logprobs"]["content"]] for c in (alone, busy[0])]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert ask(2**63 - 24)["token_ids"] != alone["token_ids"]


def test_unseeded_requests_differ(qwen):
    choices = together([lambda: generate(qwen.url, prompt_of(7, 11), max_tokens=23, ignore_eos=True)] * 2)
    assert choices[0]["token_ids"] != choices[1]["token_ids"]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=5, top_p=0.9), SamplingParams(temperature=2.0)]
)
def test_draws_follow_the_distribution(params):
    """Chi-square over 40,000 seeds; 24.3 is the 99.9 % point of 7 degrees of freedom or fewer."""
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, -0.4, 0.9])
    n = 40_000
    rows = [SamplingParams(params.temperature, params.top_k, params.top_p, seed=seed * 7919) for seed in range(n)]
    draws = draw(logits.expand(n, -1), rows, [3] * n)
    counts = np.bincount(draws.token_ids, minlength=7)
    expected = numpy_candidates(logits.double().numpy() / params.temperature, params.top_k, params.top_p)
    assert set(np.nonzero(counts)[0]) == set(expected)
    chi_square = sum((counts[i] - n * np.exp(lp)) ** 2 / (n * np.exp(lp)) for i, lp in expected.items())
    assert chi_square < 24.3


def test_wide_rows_are_inverted_exactly():
    """A vocabulary wide enough for two levels gives what a running sum in numpy gives, zeros and tails included."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(211, 10_007, generator=generator) * 4
    logits[:, ::3] = -torch.inf
    logits[7, 1:] = -torch.inf
    logits[7, 0] = 0
    logits[11, :-1] = -torch.inf
    logits[11, -1] = 0
    rows = [SamplingParams(seed=i, num_logprobs=i % 2 * 3) for i in range(211)]
    draws = draw(logits, rows, [5] * 211)
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().double().numpy().cumsum(axis=1)
    targets = uniforms(np.arange(211, dtype=np.uint64), np.full(211, 5)) * cumulative[:, -1]
    expected = [int(np.searchsorted(c, t, side="right")) for c, t in zip(cumulative, targets, strict=True)]
    assert draws.token_ids == expected and expected[7] == 0 and expected[11] == 10_006
    ranks = [int((lp > lp[t]).sum()) + 1 for lp, t in zip(logprobs, expected, strict=True)]
    assert draws.ranks == ranks


def test_uniforms_are_uniform_over_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(101, dtype=np.uint64), np.arange(997))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == len(values)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - len(values) / 20) ** 2 / (len(values) / 20)).sum() < 43.8  # 99.9 % point, 19 degrees
    along = uniforms(np.full(997, 3, np.uint64), np.arange(997))
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.1


def test_temperature_zero_takes_the_most_likely_token(qwen, plain):
    prompt = prompt_of(2, 7)
    choice = generate(qwen.url, prompt, temperature=0, max_tokens=11, ignore_eos=True, top_k=3)
    logits = plain("qwen3", prompt + choice["token_ids"])
    assert choice["token_ids"] == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_eos_ends_the_turn_and_is_part_of_it(qwen):
    choices = together(
        [lambda s=s: generate(qwen.url, prompt_of(5, 5), temperature=3.0, max_tokens=600, seed=s) for s in range(5)]
    )
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][-1] == EOS and EOS not in choice["token_ids"][:-1]


def test_limits_of_length(qwen):
    assert generate(qwen.url, [7, 8, 9], max_tokens=3, seed=1, ignore_eos=True)["finish_reason"] == "length"
    clipped = generate(qwen.url, prompt_of(1, 690), max_tokens=50, seed=1, ignore_eos=True)
    assert len(clipped["token_ids"]) == 11 and clipped["finish_reason"] == "length"
    unlimited = generate(qwen.url, prompt_of(1, 690), seed=1, ignore_eos=True)
    assert unlimited["token_ids"] == clipped["token_ids"]


def test_completions_report_the_same_tokens(qwen):
    prompt = prompt_of(9, 7)
    expected = generate(qwen.url, prompt, max_tokens=13, logprobs=3, seed=29, ignore_eos=True)
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 13, "logprobs": 3, "seed": 29, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    status, answer = call(qwen.url, "/v1/completions", body)
    choice = answer["choices"][0]
    assert status == 200 and choice["token_ids"] == expected["token_ids"]
    content = expected["logprobs"]["content"]
    assert choice["logprobs"]["token_logprobs"] == [e["logprob"] for e in content]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    for listed, entry in zip(choice["logprobs"]["top_logprobs"], content, strict=True):
        assert listed == {f"token_id:{e['token_id']}": e["logprob"] for e in entry["top_logprobs"]}
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 13, "total_tokens": 20}
