"""Gated DeltaNet over a prefix tree, against the recurrence written out token by token along each path."""

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_build import group, make_model
from test_model_packed import _check

from agrpo.config.model_shape import shape_of
from agrpo.errors import ConfigError
from agrpo.model import attention, delta
from agrpo.model.delta_plan import DeltaPlan, _chunk_size
from agrpo.model.delta_rule import kernel_rule, torch_rule, tree_convolution
from agrpo.model.plan import TreePlan

NAMES = ("query", "key", "value", "decay", "rate")


def _plan(lengths, parents) -> TreePlan:
    """Segments of these lengths in this order, which must be depth first."""
    ends = np.cumsum(lengths)
    starts, depths = ends - lengths, np.zeros(ends[-1], np.int64)
    for s, parent in enumerate(parents):
        before = depths[ends[parent] - 1] + 1 if parent >= 0 else 0
        depths[starts[s] : ends[s]] = before + np.arange(lengths[s])
    return TreePlan.of(starts, ends, np.asarray(parents), torch.from_numpy(depths))


def _path(plan: TreePlan, token: int) -> list[int]:
    segment = int(np.flatnonzero((plan.starts <= token) & (token < plan.ends))[0])
    path = list(range(plan.starts[segment], token + 1))
    while plan.parents[segment] >= 0:
        segment = plan.parents[segment]
        path = [*range(plan.starts[segment], plan.ends[segment]), *path]
    return path


def _inputs(num_tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two key heads of 5 that serve four value heads of 3."""
    make = torch.Generator().manual_seed(seed)
    shapes = {"query": (2, 5), "key": (2, 5), "value": (4, 3), "decay": (4,), "rate": (4,)}
    drawn = {n: torch.randn(num_tokens, *shape, generator=make, dtype=torch.float64) for n, shape in shapes.items()}
    drawn["decay"], drawn["rate"] = -drawn["decay"].abs() / 3, drawn["rate"].sigmoid()
    return {name: drawn[name].requires_grad_() for name in NAMES}


def _recurrence(query, key, value, decay, rate, state=None):
    """[T, ...] of one sequence: S decays, then learns value - S key, then answers query; the output and the last S."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[1] // key.shape[1], 1) for x in (query, key))
    state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1]) if state is None else state
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        missing = (v - torch.einsum("hk,hkv->hv", k, state)) * b[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, missing)
        outs.append(torch.einsum("hk,hkv->hv", q, state) * k.shape[-1] ** -0.5)
    return torch.stack(outs), state


def _varlen_recurrence(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """The recurrence behind the signature of flash-linear-attention's `chunk_gated_delta_rule`, which needs a GPU."""
    assert use_qk_l2norm_in_kernel
    outs, states, bounds = [], [], cu_seqlens.tolist()
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        start = None if initial_state is None else initial_state[i]
        out, state = _recurrence(*(x[0, first:last] for x in (q, k, v, g, beta)), start)
        outs.append(out)
        states.append(state)
    return torch.cat(outs)[None], torch.stack(states) if output_final_state else None


def _same(plan: TreePlan, rule) -> None:
    inputs, others = _inputs(len(plan.depths)), _inputs(len(plan.depths))
    got = rule(*inputs.values(), plan.derived(DeltaPlan))
    expected = []
    for start, end in zip(plan.starts, plan.ends, strict=True):
        path = _path(plan, int(end) - 1)
        expected.append(_recurrence(*(x[path] for x in others.values()))[0][int(start - end) :])
    expected = torch.cat(expected)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    got = torch.autograd.grad((got * weight).sum(), list(inputs.values()))
    reference = torch.autograd.grad((expected * weight).sum(), list(others.values()))
    for name, one, other in zip(NAMES, got, reference, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8, msg=name)


RULES = [torch_rule, lambda *inputs: kernel_rule(*inputs, _varlen_recurrence)]


@pytest.mark.parametrize("rule", RULES, ids=["torch", "kernel"])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ([7], [-1]),
        ([5, 3, 11, 2, 7, 1], [-1, 0, 1, 1, 0, -1]),
        ([17, 19, 3, 5, 23, 2], [-1, 0, 0, -1, 3, 3]),
    ],
)
def test_rule_follows_each_path(rule, lengths, parents):
    _same(_plan(lengths, parents), rule)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_rule_on_random_forests(data):
    lengths = data.draw(st.lists(st.integers(1, 19), min_size=1, max_size=5))
    parents, path = [-1], [0]
    for s in range(1, len(lengths)):
        keep = data.draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(s)
    _same(_plan(lengths, parents), torch_rule)


@pytest.mark.parametrize("rule", RULES, ids=["torch", "kernel"])
def test_states_outlive_many_chunks(rule):
    """150 tokens with branches of 70 and 75, and a tree of 64: chunks of 32 in eight waves."""
    plan = _plan([150, 70, 75, 64], [-1, 0, 0, -1])
    assert _chunk_size(plan.ends - plan.starts) == 32
    assert plan.derived(DeltaPlan).chunks.waves == (2, 2, 1, 1, 1, 2, 2, 2)
    inputs = _inputs(len(plan.depths))
    with torch.no_grad():
        got = rule(*inputs.values(), plan.derived(DeltaPlan))
        for end in plan.ends:
            path = _path(plan, int(end) - 1)
            expected, _ = _recurrence(*(x[path] for x in inputs.values()))
            torch.testing.assert_close(got[path], expected, atol=1e-9, rtol=1e-9)


def test_convolution_reads_predecessors_on_the_path():
    plan = _plan([2, 3, 1, 2], [-1, 0, 0, -1])
    x, weight = torch.randn(8, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    got = tree_convolution(x, weight, bias, plan.derived(DeltaPlan))
    for token in range(8):
        recent = _path(plan, token)[-4:]
        expected = (x[recent] * weight[:, 4 - len(recent) :].T).sum(0) + bias
        torch.testing.assert_close(got[token], expected)


def test_a_token_in_a_chunk_of_its_own_and_large_segments_choose_the_chunk():
    assert _chunk_size(np.array([640, 320])) == 64
    assert _chunk_size(np.array([7, 3, 5])) == 16


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_packed_hybrid_equals_each_sample_alone_over_several_chunks(family):
    _check(family, [*group(1, [70, 90, 33], prompt=130), *group(2, [5, 3], prompt=65, group_id=1)])


def test_linear_layers_of_another_kind_are_refused():
    attention.register()
    config = hf.OlmoHybridConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=4, layer_types=["linear_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="linear_attention layers that are not Gated DeltaNet"):
        delta.bind(hf.OlmoHybridForCausalLM(config))


def test_a_layer_without_a_plan_says_so():
    model = make_model("qwen3_5")
    with pytest.raises(ConfigError, match="got no tree plan"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_moe"])
def test_parameters_are_estimated_from_the_config(tmp_path, family):
    """The dry run's figure: without norms inside layers and the like, hence within 3 % at this tiny size."""
    model = make_model(family, "eager")
    model.config.save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)).num_parameters == pytest.approx(model.num_parameters(), rel=0.03)
