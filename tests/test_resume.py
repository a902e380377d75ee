"""A run that is interrupted and resumed ends with the weights of one that was not. What is refused: tests/faults."""

import json
import re
import signal

import msgspec
import numpy as np
import pytest
import torch

from agrpo.ledger import replay
from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.gloo import Gloo
from tests.fed_run import FedRun
from tests.standins import tiny_dataset, tiny_qwen3
from tests.test_restart import Run, assert_exactly_once
from tests.train.recorded_groups import recorded_group

STEPS = 7
COSINE = ("optimizer.lr_scheduler_type=cosine", "optimizer.warmup_steps=2", f"run.max_steps={STEPS}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tiny_qwen3(tmp_path_factory.mktemp("served") / "model"), receiver=Gloo.receiver) as server:
        yield server


@pytest.fixture(scope="module")
def parts(server, tmp_path_factory):
    """Overrides for model and data."""
    data = tiny_dataset(tmp_path_factory.mktemp("data") / "data.jsonl")
    return f"model.path={server.model_path}", f"data.path={data}"


def groups(number: int, size: tuple[int, int] | None = None) -> list:
    rng = np.random.default_rng(5)
    return [recorded_group(rng, g, size) for g in range(number)]


def run_to_end(folder, server, stream, *overrides, **more):
    run = FedRun(folder, server.url, stream, *overrides, **more)
    codes = run.end()
    assert set(codes) == {0}, run.log.read_text()
    return run


def test_interrupted_and_whole_runs_are_bit_equal(tmp_path, server, parts):
    """RES-10: weights, losses, gradient norms and rates; a group that was half trained and one that waited included."""
    overrides = (*parts, *COSINE, "packer.token_budget=190", "checkpoint.save_total_limit=2")
    stream = groups(40)
    whole = run_to_end(tmp_path / "whole", server, stream, *overrides)
    assert [p.name for p in sorted((whole.run_dir / "checkpoints").iterdir())] == ["step-000007"]
    first = FedRun(tmp_path / "cut", server.url, stream[:14], *overrides, "checkpoint.save_steps=1")
    first.await_step(3)
    assert first.stop() == [0], first.log.read_text()
    older, newer = sorted((first.run_dir / "checkpoints").iterdir())  # save_total_limit
    assert newer.name == f"step-{len(first.records()):06d}" and len(first.records()) < STEPS
    num_steps = len(first.records()) - 1
    # Back by one: what was saved later is of another course, which neither the limit nor run.resume=auto may take for this one.
    second = run_to_end(tmp_path / "cut", server, stream, *overrides, f"run.resume={older}")
    assert {p.name for p in older.parent.iterdir()} == {older.name, f"left-1-{newer.name}", "step-000007"}
    # The trainer may take a step of the groups that waited before the feed has connected again.
    assert f"step {num_steps}, version" in second.log.read_text() and second.feed.start_state.step >= num_steps
    assert int(re.search(r"resumed from .* (\d+) ready groups", second.log.read_text())[1]) > 0
    for one, two in zip(whole.records(), second.records(), strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "batch/trained_tokens_per_step"):
            assert one[name] == two[name], (one["step"], name)
    expected, found = whole.weights(), second.weights()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    state = {
        run: torch.load(run.run_dir / "checkpoints" / "step-000007" / "rng-0.pt", weights_only=True)["torch"]
        for run in (whole, second)
    }
    assert torch.equal(state[whole], state[second])
    counts = [{g: e["trained"] for g, e in replay(r.run_dir / "ledger.jsonl").items() if e["trained"]} for r in (whole, second)]
    assert counts[0] == counts[1]


def test_two_ranks_resumed_on_one(tmp_path, server, parts):
    """Every row holds one group, so two rows of two ranks are the two rows of one."""
    overrides = (*parts, *COSINE, "packer=sequence", "packer.token_budget=70")
    stream = groups(2 * STEPS + 2, size=(4, 6))
    one_rank = ("run.gradient_accumulation_steps=2",)
    whole = run_to_end(tmp_path / "whole", server, stream, *overrides, *one_rank)
    first = FedRun(tmp_path / "cut", server.url, stream[:9], *overrides, ranks=2)
    first.await_step(3)
    assert first.stop() == [0, 0], first.log.read_text()
    second = run_to_end(tmp_path / "cut", server, stream, *overrides, *one_rank, "run.resume=auto")
    assert 3 <= second.feed.start_state.step < STEPS
    expected, found = whole.weights(), second.weights()
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 1e-5
    losses = [[r["loss"] for r in run.records()] for run in (whole, second)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


LOOP = '''
import json
from pathlib import Path
from agrpo.rollout import RolloutLoop

class Counting(RolloutLoop):
    """Keeps which prompts it was shown; writes down what it gets back."""
    async def setup(self):
        self.shown = []

    def filter_prompt(self, row_index, row, epoch):
        self.shown.append(epoch * 1000 + row_index)
        return row_index % 7 != 3

    def state_dict(self):
        return {"shown": self.shown}

    def load_state_dict(self, state):
        self.shown = list(state["shown"])
        Path(__file__).with_name("loaded.json").write_text(json.dumps(state))
'''


def test_ctrl_c_saves_everything_and_a_resumed_run_goes_on_from_it(tmp_path, server):
    """A whole run: its own exit code, the state of the user's loop, the controller's cap, and every group once."""
    (tmp_path / "counting.py").write_text(LOOP)
    own = (
        "rollout.loop=counting.Counting", "rollout.concurrency.poll_interval=0.5", f"model.path={server.model_path}",
        "server=external", f"server.base_url={server.url}",
    )  # fmt: skip
    run = Run(tmp_path, "run.max_steps=100000", *own)
    run.await_step(4)
    run._await(lambda: any("rollout/concurrency_cap" in r for r in run.records()), "look at the server's load")
    run.popen.send_signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    assert "press Ctrl-C again to stop at once" in output
    checkpoint = max((run.out / "checkpoints").glob("step-*"))
    assert json.loads((run.out / "summary.json").read_text())["exit_reason"] == "stopped by a signal"
    kept = msgspec.msgpack.decode((checkpoint / "loop_state.msgpack").read_bytes())
    state = json.loads((checkpoint / "rollout_state.json").read_text())["ledger"]
    assert kept["shown"] and state["concurrency_cap"] >= 1 and state["step_tokens"]

    steps = int(checkpoint.name.removeprefix("step-")) + 3
    again = Run(tmp_path, f"run.max_steps={steps}", "run.resume=auto", *own)
    code, output = again.end()
    assert code == 0, output
    assert json.loads((tmp_path / "loaded.json").read_text()) == kept
    firsts = re.findall(r"at most (\d+) rollouts at first", (run.out / "logs" / "rollout.log").read_text())
    assert len(firsts) == 2 and int(firsts[1]) == state["concurrency_cap"]
    assert [r["step"] for r in again.records()] == list(range(1, steps + 1))
    assert_exactly_once(again)
