"""The complete example of docs/extending.md works as it is written: a user's own loss and reward, without registration."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


def write_examples(folder: Path) -> None:
    for name, text in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.S):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(folder: Path, code: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *code], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=60,
    )  # fmt: skip


def test_the_example_loss_is_chosen_by_name(tmp_path):
    write_examples(tmp_path)
    command = ["-m", "agrpo", "train", "+recipe=quickstart", "--config-dir", "conf", "loss=capped"]
    done = run(tmp_path, [*command, "loss.epsilon_high=0.5", "--dry-run"])
    assert done.returncode == 0, done.stdout
    refused = run(tmp_path, [*command, "loss.epsilon_high=-1"])
    assert refused.returncode == 3
    assert "loss.epsilon_high must be > 0, got -1" in refused.stdout


def test_the_example_loss_by_hand(tmp_path, monkeypatch):
    import torch

    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    from my_losses import Capped

    trainer = torch.tensor([-1.0, -0.5], requires_grad=True)
    terms = SimpleNamespace(
        trainer_logprobs=trainer, sampler_logprobs=torch.tensor([-1.0, -1.5]), advantages=torch.tensor([2.0, 1.0])
    )
    loss = Capped(epsilon_high=0.5)(terms)
    # Ratios 1 and e, the second capped at 1.5: -1 * 2 * -1 and -1.5 * 1 * -0.5.
    assert loss.tolist() == pytest.approx([2.0, 0.75])
    loss.sum().backward()
    assert trainer.grad.tolist() == pytest.approx([-2.0, -1.5])
    assert Capped(epsilon_high=0.5).statistics(terms)["clipped_high"].tolist() == [False, True]


def test_the_example_reward(tmp_path, monkeypatch):
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    from my_rewards import exact

    completions = [[{"role": "assistant", "content": text}] for text in (" 85 ", "86")]
    assert exact(completions=completions, answer=["85", "85"]) == [1.0, 0.0]
