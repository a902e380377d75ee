"""Objects from the tree: a class of the user's, containers and unions, the size of a model."""

import dataclasses

import pytest

from agrpo.config import build
from agrpo.config.build import read_section
from agrpo.config.model_shape import shape_of
from agrpo.errors import ConfigError
from agrpo.schema import setting


def test_size_of_a_model_from_its_config_and_from_its_name(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 5,'
        ' "vocab_size": 11, "intermediate_size": 7, "tie_word_embeddings": true}'
    )
    # per layer: q, o 8 x 10 each, k, v 8 x 5 each, three 8 x 7, two norms of 8; embedding 11 x 8; last norm
    assert shape_of(str(tmp_path)).num_parameters == 3 * (2 * 80 + 2 * 40 + 3 * 56 + 16) + 88 + 8
    assert shape_of("nobody/Some-Model-0.6B").num_parameters == 600_000_000
    assert shape_of("nobody/SmolThing-135M-Instruct").num_parameters == 135_000_000
    assert shape_of("nobody/plain") is None


def test_a_users_own_component_is_built_from_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine:\n"
        "    scale: float = 1.0\n"
        "    def __call__(self, terms): return terms\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build({"_target_": "my_losses.Mine", "scale": "2e-1"}, "loss").scale == 0.2
    with pytest.raises(ConfigError, match="loss.scales is not a key; did you mean loss.scale?"):
        build({"_target_": "my_losses.Mine", "scales": 1}, "loss")


def test_containers_and_unions_are_checked():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Example:
        ids: list[int] = setting(factory=list)
        names: dict[str, float] = setting(factory=dict)
        pair: tuple[float, float] | None = setting(None)
        modules: str | list[str] = setting("all")

    def found(**node):
        return read_section(node, Example, "x")[1]

    assert found(ids=[1, 2.0], names={"a": "1e3"}, pair=[0, 1], modules=["a"]) == []
    assert found(ids=[1, "b"]) == ["x.ids[1] must be an integer, got 'b'"]
    assert found(names={"a": None}) == ["x.names.a must be a number, got null"]
    assert found(pair=[1]) and found(modules={"a": 1})
