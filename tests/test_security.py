"""What a stranger, a downloaded file or a text of the model could do, and what of a secret can be read: each tried."""

import ast
import asyncio
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

import agrpo
from agrpo.config import check, compose, load, public, save
from agrpo.config.devices import Devices
from agrpo.errors import ConfigError
from agrpo.launch.run_folder import prepare
from tests.standins import tiny_dataset, tiny_qwen3

ROOT = Path(agrpo.__file__).parents[1]
SOURCES = [*(ROOT / "agrpo").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
# A socket pair between a process and the worker it started itself; nobody else can write to it.
PICKLE = {"agrpo/scorer/pool.py", "agrpo/scorer/functions.py", "agrpo/scorer/worker.py"}
PICKLE |= {"agrpo/model/shards.py"}  # reads an index that can name nothing but descriptions of tensors
WRITTEN_FLOAT = {("agrpo/model/backends/flex.py", "eval")}  # evaluates nothing but a float that it wrote itself
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "pickle.loads", "pickle.load"}
UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SECRET = "sk-very-secret-7919"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls_of(path: Path):
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_nothing_that_runs_what_it_reads_is_used():
    """No pickle but between a process and its own worker, no eval, no shell, and weights are loaded as weights."""
    found = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
        }
        if imported & UNSAFE_IMPORTS and name not in PICKLE:
            found.append(f"{name} imports {imported & UNSAFE_IMPORTS}")
        for call in calls_of(path):
            called, options = dotted(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
            where = f"{name}:{call.lineno}: {called}"
            is_known = (name, called) in WRITTEN_FLOAT or (called.startswith("pickle.") and name in PICKLE)
            if called in UNSAFE_CALLS and not is_known:
                found.append(where)
            if options.get("shell") == "True":
                found.append(f"{where} with a shell")
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append(f"{where} without weights_only=True")
            if options.get("trust_remote_code") == "True":
                found.append(f"{where} trusts remote code")
    assert found == []


def test_no_deadline_depends_on_a_clock_that_can_be_set():
    """`time.time` tells people when something was; what is awaited is measured by the monotonic clock."""
    shown = {"agrpo/lifecycle.py", "agrpo/rollout/loop.py", "agrpo/rollout/judge.py", "agrpo/train/measure.py", "agrpo/config/runner.py"}
    shown |= {"agrpo/serve/service.py", "agrpo/serve/answers.py", "agrpo/env/proxy/session.py", "agrpo/launch/server.py"}
    used = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and dotted(node) in ("time.time", "datetime.now", "datetime.datetime.now")
    }
    assert used <= shown, f"use time.monotonic: {sorted(used - shown)}"


def test_code_that_ships_with_a_model_is_not_run_unless_asked_for(tmp_path):
    from agrpo.model.load import load_model
    from agrpo.model.tokenizer import load_tokenizer
    from agrpo.sections import Model

    folder, mark = tiny_qwen3(tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model.trust_remote_code must be true"):
        load_model(Model(path=str(folder), precision="no"), "cpu")
    try:
        load_tokenizer(Model(path=str(folder)))
    except Exception:
        pass  # a tokenizer of its own is refused too, in the library's words
    assert not mark.exists()


@pytest.mark.parametrize("file", ["rng-0.pt", "shards/.metadata"])
def test_a_checkpoint_cannot_run_anything_when_it_is_loaded(tmp_path, file):
    """A random state, or an index of shards, that is a pickle with a call in it, as one from a stranger could be."""
    import torch

    from agrpo.model import checkpoint
    from agrpo.model.load import load_model
    from agrpo.model.optim import Updater
    from agrpo.sections import Model, Optimizer

    model = load_model(Model(path=str(tiny_qwen3(tmp_path / "model")), precision="no"), "cpu")
    updater, folder, mark = Updater(model, Optimizer(), None), tmp_path / "step-000001", tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    checkpoint.save(folder, model, updater, {})
    if file == "rng-0.pt":
        torch.save({"python": Trap()}, folder / file)
    else:
        (folder / file).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BaseException, match="weights_only|Weights only|its index names posix.mkdir"):
        checkpoint.load(folder, model, updater)
    assert not mark.exists()


def configuration(tmp_path, *overrides):
    (tmp_path / "flow.py").write_text(
        "class Flow:\n    def __init__(self, api_key=None, nested=None):\n        pass\n\n"
        "    async def arun_episode(self, engine, data):\n        return None\n"
    )
    settings = [
        f"model.path={tiny_qwen3(tmp_path / 'model')}", "data=jsonl", f"data.path={tiny_dataset(tmp_path / 'data.jsonl')}",
        "server=embedded", "sync=gloo", "run.use_cpu=true", "model.precision=no", f"run.output_dir={tmp_path / 'run'}",
        "scorer.functions=[agrpo.scorer.rewards.accuracy_reward]", *overrides,
    ]  # fmt: skip
    return settings, check(compose(settings), Devices())[0]


def test_secrets_are_in_no_file_that_others_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = [
        f"+rollout.loop_config.api_key={SECRET}", f"+rollout.loop_config.inner.password={SECRET}", "+rollout.loop_config.token_budget=7",
        f"checkpoint.hub.token={SECRET}",
    ]  # fmt: skip
    _, config = configuration(tmp_path)
    settings = [o for o in own if "hub" not in o]
    import dataclasses

    loop_config = {"api_key": SECRET, "inner": {"password": SECRET}, "token_budget": 7}
    hub = dataclasses.replace(config.checkpoint.hub, token=SECRET)
    config = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, loop_config=loop_config),
        checkpoint=dataclasses.replace(config.checkpoint, hub=hub),
    )
    run_dir = tmp_path / "run"
    from agrpo.launch.plan import Ports

    prepare(config, own, Ports.free()).close()
    assert public(config, own) == ["+rollout.loop_config.token_budget=7"] and settings
    readable = [p for p in run_dir.rglob("*") if p.is_file() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    assert {p.name for p in readable} >= {"config.yaml", "versions.json"}
    for path in readable:
        assert SECRET not in path.read_text(), path
    assert "***" in (run_dir / "config.yaml").read_text()
    assert load(run_dir).rollout.loop_config == loop_config
    private = {p.name for p in run_dir.rglob("*") if p.is_file()} - {p.name for p in readable}
    assert private == {"runtime.json", "secrets.json"}
    save(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, loop_config={})), run_dir, [])
    assert not (run_dir / "state" / "secrets.json").exists()


def test_secrets_are_known_by_name_option_or_place_and_nothing_else_is(tmp_path):
    from agrpo.config import secrets

    told = {
        "headers": {"x-api-key": SECRET, "Authorization": SECRET, "cookie": SECRET, "accept": "json"}, "openaiApiKey": SECRET, "db_pwd": SECRET,
        "secret_key": SECRET, "arguments": ["--hf-token", SECRET, f"--api-key={SECRET}", "--max-tokens", "7"],
        "base_url": f"http://me:{SECRET}@node7:8000", "plain_url": "http://node7:8000/a@b", "monkey": "a", "token_budget": "7", "tokenizer": "t",
    }  # fmt: skip
    tree = json.loads(json.dumps(told))
    hidden = secrets.hide(tree)
    assert SECRET not in json.dumps(tree) and len(hidden) == 9
    plain = ("plain_url", "monkey", "token_budget", "tokenizer")
    assert {k: tree[k] for k in plain} == {k: told[k] for k in plain} and tree["headers"]["accept"] == "json"
    assert tree["arguments"] == ["--hf-token", "***", "--api-key=***", "--max-tokens", "7"]
    secrets.save(hidden, tmp_path)
    secrets.restore(tree, tmp_path)
    assert tree == told


def test_the_plan_shows_no_secret(tmp_path):
    settings, _ = configuration(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    arguments = [*settings, "rollout.workflow=flow.Flow", f"+rollout.workflow_kwargs={{api_key: {SECRET}}}", "loss=grpo"]
    arguments += ["checkpoint.hub.push=end", "checkpoint.hub.model_id=me/mine", f"checkpoint.hub.token={SECRET}"]
    done = subprocess.run(
        [sys.executable, "-m", "agrpo", "train", *arguments, "--dry-run"],
        env={**environment, "HF_TOKEN": SECRET + "x"}, cwd=tmp_path, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr and "agrpo.rollout" in done.stdout


def test_the_proxy_of_agents_wants_the_key_of_a_rollout():
    from agrpo.env.proxy import Proxy
    from agrpo.sampler.vllm import Vllm

    async def ask() -> list[int]:
        proxy = Proxy(None, Vllm(), 401)
        await proxy.start()
        assert proxy.url.startswith("http://127.0.0.1:")
        try:
            async with aiohttp.ClientSession() as http:
                codes = []
                for headers in ({}, {"Authorization": "Bearer guess"}):
                    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                        async with http.post(proxy.url + path, json={"model": "m", "messages": []}, headers=headers) as answer:
                            codes.append(answer.status)
                return codes
        finally:
            await proxy.close()

    assert set(asyncio.run(ask())) == {401}


def test_a_running_run_listens_on_loopback_only_and_logs_no_secret(tmp_path):
    """All processes of a run with two trainer ranks, their meeting point and the transfer of weights included."""
    from tests.fed_run import started_run

    (tmp_path / "mine.py").write_text("from agrpo.rollout import RolloutLoop\n\n\nclass Mine(RolloutLoop):\n    pass\n")
    own = ("rollout.loop=mine.Mine", "+rollout.loop_config.api_key=" + SECRET)
    with started_run(tmp_path, "run.num_processes=2", "run.max_steps=100000", *own) as run:
        run.await_step(3)
        listening = set()
        for process in psutil.Process(run.popen.pid).children(recursive=True):
            try:
                found = process.net_connections("inet")
            except psutil.Error:
                continue
            listening |= {(process.name(), c.laddr.ip) for c in found if c.status == psutil.CONN_LISTEN}
        assert len(listening) >= 1 and {ip for _, ip in listening} <= {"127.0.0.1", "::1"}, listening
        for path in (tmp_path / "run").rglob("*"):
            if path.is_file() and path.suffix in (".log", ".json", ".jsonl", ".yaml") and path.name != "secrets.json":
                assert SECRET not in path.read_text(errors="replace"), path
