"""`python -m agrpo.rollout RUN_DIR` as the supervisor starts it: configuration from disk, samples over the wire, exit codes."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time

import pytest
import tokenizers
import transformers
import yaml

from agrpo import wire
from agrpo.lifecycle import Runtime
from agrpo.types import ReadyGroup
from tests.stub_server import VOCABULARY, control, report, stub_server

REWARD = """
import os

def first_id(completion_ids, level, **_):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and "RANK" not in os.environ
    return [ids[0] / 1000 + at for ids, at in zip(completion_ids, level)]
"""


WORKFLOW = """
import numpy as np

from agrpo.env.workflow import ModelRequest, RolloutWorkflow


class Wrong(RolloutWorkflow):
    def __init__(self, tokenizer, gconfig):
        self.tokenizer, self.gconfig = tokenizer, gconfig

    async def arun_episode(self, engine, data):
        ids = self.tokenizer.apply_chat_template(data["prompt"], return_dict=False)
        answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
        return {**answer.to_tensors(reward=data["level"]), "logprobs": np.zeros((1, 3), np.float32)}
"""


def make_run(folder, url, port, key, **rollout):
    words = {"<eos>": 0, "<bot>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}<bot>"
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": [{"role": "user", "content": f"w{i} w7"}], "level": i} for i in range(2, 7)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "my_workflow.py").write_text(WORKFLOW)
    data = {"_target_": "agrpo.data.jsonl.Jsonl", "path": str(folder / "train.jsonl")}
    tree = {
        "run": {"output_dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "rollout": {"group_size": 3, **rollout},
        "data": data,
        "env": {"_target_": "agrpo.env.conversation.Conversation"},
        "sampler": {"_target_": "agrpo.sampler.vllm.Vllm", "max_completion_length": 7, "num_sampler_logprobs": 2},
        "scorer": {"_target_": "agrpo.scorer.functions.Functions", "functions": ["my_reward.first_id"]},
        "advantage": {"_target_": "agrpo.advantage.Grouped"},
        "packer": {"_target_": "agrpo.packer.tree.Tree"},
        "loss": {"_target_": "agrpo.loss.score_centering.ScoreCentering"},
        "sync": {"_target_": "agrpo.sync.disk.Disk"},
        "server": {"_target_": "agrpo.serve.external.External", "base_url": url},
        "logger": {"log_completions": True},
        "eval": {"heldout": {"_target_": "agrpo.eval.Evaluation", "data": data, "max_prompts": 2}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    Runtime((url,), "127.0.0.1", port, key, "run").save(folder)


class Trainer:
    def __init__(self, limit=10_000):
        self.key, self.ready, self.evals, self.changed = secrets.token_hex(16), [], [], threading.Event()
        start = wire.Start(0, 1, [], [], 0, 0, limit)
        self.listener = wire.Listener("127.0.0.1", 0, self.key, lambda: start, self.receive)

    def receive(self, message):
        if isinstance(message, ReadyGroup):
            self.ready.append(message)
            tokens = sum(g.raw_tokens for g in self.ready)
            self.listener.send(wire.Credit(tokens, tokens, 10_000))
        elif isinstance(message, wire.EvalResult):
            self.evals.append(message)

    def wait_for(self, count, process, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while len(self.ready) < count and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)


@pytest.fixture
def started(tmp_path, request):
    with stub_server(tokens=7, heads=2, bodies=11) as url:
        trainer = Trainer()
        make_run(tmp_path, url, trainer.listener.port, trainer.key, **getattr(request, "param", {}))
        environment = {**os.environ, "RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "agrpo.rollout", str(tmp_path)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield trainer, process, url, tmp_path
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            trainer.listener.close()


def exit_record(folder):
    return json.loads((folder / "state" / "rollout.exit.json").read_text())


def test_a_run_from_configuration_to_finish(started):
    trainer, process, url, folder = started
    trainer.wait_for(7, process)
    trainer.listener.send(wire.Finish())
    assert process.wait(20) == 0, process.stdout.read()
    group = trainer.ready[0]
    assert group.source_rewards["first_id"].tolist() == group.rewards.tolist()
    assert all(r > 1.9 for r in group.rewards)  # the row's own column reached the function
    assert group.samples[0].token_ids[:3].tolist() == [group.row_index + 2, 7, 1]
    assert report(url)["seen"][0]["sampling_params"]["logprobs"] == 3  # one more than is kept
    assert [e.name for e in trainer.evals] == ["heldout"] and trainer.evals[0].result["rollouts_count"] == 2
    assert exit_record(folder)["code"] == 0
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["group"] == group.group_id]
    assert [line["rewards"]["first_id"] for line in mine] == group.rewards.tolist()
    assert [line["advantage"] for line in mine] == [s.advantage for s in group.samples]
    assert mine[0]["completion"][0]["role"] == "assistant" and mine[0]["prompt"][0]["content"].endswith(" w7")


def test_a_hopeless_run_ends_with_the_servers_own_words(started):
    trainer, process, url, folder = started
    trainer.wait_for(2, process)
    control(url, faults=["400!"])
    assert process.wait(20) == 4
    assert "stub says 400" in exit_record(folder)["reason"] and "rejected" in exit_record(folder)["reason"]


def test_a_trainer_that_goes_away_ends_the_process(started):
    trainer, process, _, folder = started
    trainer.wait_for(2, process)
    trainer.listener.close()
    assert process.wait(20) == 1
    assert "closed the connection" in exit_record(folder)["reason"]


@pytest.mark.parametrize("started", [{"workflow": "my_workflow.Wrong", "workflow_kwargs": {}}], indirect=True)
def test_a_workflow_that_breaks_its_contract_ends_the_process_by_the_fields_name(started):
    _, process, _, folder = started
    assert process.wait(60) == 5
    reason = exit_record(folder)["reason"]
    assert "rollout.workflow: Wrong: logprobs must have the shape [1, 10] of input_ids, got [1, 3]" == reason
