"""kill -9 of the server while a run goes on: it is started again, gets the run's weights, and the run ends as if nothing
had happened; nothing that it said in between is trained."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from agrpo import wire
from agrpo.ledger import replay
from agrpo.metrics.names import undeclared
from agrpo.serve.embedded import EmbeddedServer
from agrpo.serve.engine import UNLABELLED
from agrpo.sync.gloo import Gloo
from tests.standins import tiny_dataset, tiny_qwen3

ROOT = Path(__file__).parents[1]
SYNC = '''
"""`Gloo` whose server is killed in the middle of the transfer of version 3, once."""
import json, os, signal
from agrpo.sync.gloo import Gloo as Plain

class Gloo(Plain):
    def open(self, server, run_dir, device, rank, world_size):
        session = super().open(server, run_dir, device, rank, world_size)
        if session.transport is not None:
            send, start, version = session.transport.send, session.transport.start, [0]
            def start_too(number):
                version[0] = number
                start(number)
            def send_and_kill(*tensor):
                mark = run_dir / "killed"
                if version[0] == 3 and not mark.exists():
                    mark.touch()
                    os.kill(json.loads((run_dir / "state" / "server.alive.json").read_text())["pid"], signal.SIGKILL)
                send(*tensor)
            session.transport.start, session.transport.send = start_too, send_and_kill
        return session
'''


class Run:
    """`agrpo train` on a tiny model, watched from outside; one group of four samples makes about half a step."""

    def __init__(self, folder: Path, *overrides: str, num_rows: int = 300):
        self.folder, self.out = folder, folder / "run"
        if not (folder / "model").exists():
            tiny_qwen3(folder / "model")
        tiny_dataset(folder / "data.jsonl", num_rows=num_rows)
        (folder / "restart_rewards.py").write_text(
            "def odd(completion_ids, **columns):\n    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]\n"
        )
        command = [
            sys.executable, "-m", "agrpo", "train", f"model.path={folder}/model", "data=jsonl",
            f"data.path={folder}/data.jsonl", "scorer.functions=[restart_rewards.odd]", "server=embedded", "sync=gloo",
            "sampler.max_completion_length=5", "packer.token_budget=256", "run.use_cpu=true", "model.precision=no",
            "rollout.max_staleness=2", "rollout.group_size=4", "optimizer.learning_rate=1e-3",
            "rollout.progress_timeout=20", f"run.output_dir={self.out}", *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        self.popen = subprocess.Popen(
            command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.popen.stdout.readline, "")), daemon=True
        )
        self._reader.start()

    def await_step(self, step: int) -> None:
        self._await(lambda: any(f"step {step}/" in line for line in self.lines), f"step {step}")

    def await_line(self, text: str, count: int = 1) -> None:
        self._await(lambda: sum(text in line for line in self.lines) >= count, f"{count} times {text!r}")

    def _await(self, condition, what: str, limit_s: float = 300) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.popen.poll() is None and time.monotonic() < deadline, f"no {what}: {''.join(self.lines)}"
            time.sleep(0.02)

    def kill_server(self) -> None:
        os.kill(json.loads((self.out / "state" / "server.alive.json").read_text())["pid"], signal.SIGKILL)

    def end(self, limit_s: float = 240) -> tuple[int, str]:
        code = self.popen.wait(limit_s)
        self._reader.join(10)
        return code, "".join(self.lines)

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


def assert_exactly_once(run: Run) -> None:
    """Every group up to the last is resolved or waits in the checkpoint, with none of its samples used twice."""
    groups = replay(run.out / "ledger.jsonl")
    checkpoint = max((run.out / "checkpoints").glob("step-*"))
    waiting = {g.group_id: len(g.samples) for g in wire.frames((checkpoint / "ready_groups.bin").read_bytes())}
    first_open = min(set(range(max(groups) + 2)) - set(groups))
    assert max(groups) - first_open < 32, "groups were lost"  # some are open when a run ends
    for group_id, group in groups.items():
        if group["ready"]:
            assert group["trained"] + group["dropped"] + waiting.get(group_id, 0) == group["ready"], (group_id, group)
        else:
            assert group["reasons"] and not group["trained"]


def assert_went_on(
    run: Run, num_steps: int, num_restarts: int, limit_s: float = 240, tolerance: float = 1e-4
) -> list[dict]:
    """Ended well, every step once, the weights proven after each restart, and nothing trained that they did not make."""
    code, output = run.end(limit_s)
    assert code == 0, output
    records = run.records()
    assert [r["step"] for r in records] == list(range(1, num_steps + 1))
    assert undeclared({name for record in records for name in record}) == []
    assert sum(r.get("server/restart_count", 0) for r in records) == num_restarts
    proofs = [r["perf/weight_sync_parity"] for r in records if "perf/weight_sync_parity" in r]
    # The first sync and one after each restart; a record holds the largest of its window.
    assert len(proofs) == 1 + num_restarts and max(proofs) < tolerance
    # Tokens of a server without the run's weights would differ by far more: a learning rate of 1e-3 moves them quickly.
    fresh = [r for r in records if r["sample/staleness_max"] == 0]
    assert all(r["sampling/sampling_logp_difference/max"] < tolerance for r in fresh)
    assert_exactly_once(run)
    return records


def test_a_server_killed_in_a_sync_and_once_more(tmp_path):
    """Two trainer ranks: all of them wait for the server, and all of them send again."""
    (tmp_path / "restart_sync.py").write_text(SYNC)
    run = Run(tmp_path, "run.num_processes=2", "sync._target_=restart_sync.Gloo", "run.max_steps=24")
    run.await_line("has the weights of version")
    assert (run.out / "killed").exists()
    run.await_step(random.Random().randrange(6, 12))
    run.kill_server()
    assert_went_on(run, 24, 2)
    text = "".join(run.lines)
    assert "restarting (1 of 5)" in text and "restarting (2 of 5)" in text and "healthy again" in text
    log = (run.out / "logs" / "trainer0.log").read_text()
    assert "weight sync of version 3 failed at transfer" in log and "the sync is repeated" in log


def test_a_server_of_somebody_else_found_paused_and_started_again(tmp_path):
    """SRV-14: what a dead trainer left paused is resumed by the first full sync. Weights that are lost are sent again."""
    model = tiny_qwen3(tmp_path / "model")
    with EmbeddedServer(model, receiver=Gloo.receiver) as server:
        server.service.engine.call(lambda: server.service.engine.pause("keep", True)).result(10)
        run = Run(tmp_path, "server=external", f"server.base_url={server.url}", "run.max_steps=12")
        run.await_step(3)
        engine = server.service.engine

        def start_anew() -> None:
            """What a start leaves: the weights of the folder under the first label, and no connection."""
            engine.weights.disconnect()
            engine.reload_weights(str(model))
            engine.set_version(UNLABELLED)

        engine.call(start_anew).result(10)
        assert_went_on(run, 12, 1)
        assert not engine.is_paused
