"""Adapters on the embedded server: names, folders and slots over many versions, what is refused, and what is left behind."""

import contextlib
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from agrpo.errors import ConfigError, ServerError
from agrpo.model.adapter import adapter_config, write_adapter
from agrpo.model.load import load_model
from agrpo.model.shard import shard
from agrpo.model.weights import adapter_tensors
from agrpo.sections import Lora, Model
from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.adapter import FOLDER, AdapterNames, AdapterSession, choose
from agrpo.sync.control import ServerControl
from agrpo.sync.proof import Proof
from agrpo.train.proof import prove
from tests.standins import tiny_qwen3

STALENESS, RANK = 2, 3
PROMPT = [5, 7, 11]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The base model's folder, and a trainer's model with an adapter on it."""
    path = tiny_qwen3(tmp_path_factory.mktemp("adapter") / "base")
    section = Model(path=str(path), precision="no", lora=Lora(enabled=True, r=RANK, alpha=6.0))
    model = load_model(section, "cpu")
    shard(model, section, None)
    return path, model


@pytest.fixture(scope="module")
def server(trained):
    with EmbeddedServer(trained[0], max_loras=STALENESS + 2) as server:
        yield server


def change(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def opened(model, urls, run_dir, run_id="first", **settings) -> AdapterSession:
    write = functools.partial(
        lambda config, folder, tensors: write_adapter(folder, config, tensors), adapter_config(model)
    )
    settings = {"rank": 0, "world_size": 1, "max_staleness": STALENESS, "verify_every": 1, **settings}
    return AdapterSession(ServerControl(urls, 30.0), AdapterNames.of(run_dir, run_id), run_dir, write, **settings)


def adapters_at(url: str) -> list[str]:
    entries = ServerControl([url], 10.0).request(url, "GET", "/v1/models")["data"]
    return sorted(e["id"] for e in entries if e["parent"])


def folders_of(run_dir) -> list[str]:
    return sorted(p.name for p in (run_dir / FOLDER).iterdir())


def test_ten_versions_take_no_more_slots_and_folders_than_the_window(server, trained, tmp_path):
    _, model = trained
    session = opened(model, [server.url], tmp_path)
    proof = Proof(session.server, model=None, prompt_ids=PROMPT, parity_limit=0.2, trainer_dtype="float32")
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for version in range(1, 11):
        change(model, version)
        times = session.send(adapter_tensors(model), version, lambda: None)
        kept = [session.names.of_version(v) for v in range(max(1, version - STALENESS), version + 1)]
        assert adapters_at(server.url) == sorted(kept)
        # One more folder than adapters, whose version has left just now, and nothing half written.
        old = [session.names.of_version(version - STALENESS - 1)] if version > STALENESS + 1 else []
        assert folders_of(tmp_path) == sorted(kept + old) and len(kept + old) <= STALENESS + 3
        assert times.pause_s == 0 and times.barrier_s + times.transfer_s <= times.total_s
        assert session.needs_proof
        assert prove(proof, model, version, torch.device("cpu"), session.names.of_version(version)) < 1e-5
        # Adapter weights in the server's dtype and nothing else (LORA-16).
        size = sum(f.stat().st_size for f in (tmp_path / FOLDER / session.names.of_version(version)).iterdir())
        assert 4 * number < size < 4 * number + 1_000_000
    assert server.service.engine.version in (None, "default")  # the server's own weights were never touched
    assert not server.service.engine.is_paused
    session.close()
    assert adapters_at(server.url) == [] and not (tmp_path / FOLDER).exists()


def test_an_older_version_answers_as_before_until_it_leaves(server, trained, tmp_path):
    _, model = trained
    session = opened(model, [server.url], tmp_path)

    def logprobs(version: int) -> np.ndarray:
        params = {"temperature": 1.0, "max_tokens": 5, "seed": 3, "logprobs": 0}
        choice = session.server.generate(server.url, PROMPT, session.names.of_version(version), params)
        return np.array([t["logprob"] for t in choice["logprobs"]["content"]])

    change(model, 1)
    session.send(adapter_tensors(model), 1, lambda: None)
    first = logprobs(1)
    for version in range(2, STALENESS + 2):
        change(model, version)
        session.send(adapter_tensors(model), version, lambda: None)
    assert np.array_equal(logprobs(1), first) and not np.allclose(logprobs(2), first)
    change(model, 99)
    session.send(adapter_tensors(model), STALENESS + 2, lambda: None)
    with pytest.raises(ServerError, match="v1` does not exist"):
        logprobs(1)
    session.close()


def test_leftovers_of_a_killed_start_go_and_no_name_comes_twice(server, trained, tmp_path):
    _, model = trained
    killed = opened(model, [server.url], tmp_path)
    killed.send(adapter_tensors(model), 4, lambda: None)
    other = opened(model, [server.url], tmp_path / "other")  # another run on the same server
    other.send(adapter_tensors(model), 4, lambda: None)
    resumed = opened(model, [server.url], tmp_path, run_id="second")
    resumed.send(adapter_tensors(model), 4, lambda: None)
    names = [other.names.of_version(4), resumed.names.of_version(4)]
    assert adapters_at(server.url) == sorted(names) and killed.names.of_version(4) not in names
    assert folders_of(tmp_path) == [resumed.names.of_version(4)]
    for session in (resumed, other):
        session.close()
    assert adapters_at(server.url) == []


def test_several_servers_and_one_that_is_restarted(server, trained, tmp_path):
    """The one that lost everything gets the whole window again, as it was."""
    path, model = trained
    with EmbeddedServer(path, max_loras=STALENESS + 2) as second:
        session = opened(model, [server.url, second.url], tmp_path)
        for version in (1, 2):
            change(model, version)
            session.send(adapter_tensors(model), version, lambda: None)
        assert adapters_at(second.url) == adapters_at(server.url) and len(adapters_at(server.url)) == 2
        second.service.adapters.clear()  # what a restart leaves
        session.reset()
        assert not session.needs_proof
        session.send(adapter_tensors(model), 2, lambda: None)
        assert adapters_at(second.url) == adapters_at(server.url) and session.needs_proof
        # Trained on since version 2: under that name the servers keep what they have, which nothing now equals.
        change(model, 3)
        second.service.adapters.clear()
        session.reset()
        session.send(adapter_tensors(model), 2, lambda: None)
        assert len(adapters_at(second.url)) == 2 and not session.needs_proof
        session.send(adapter_tensors(model), 3, lambda: None)
        assert session.needs_proof
        session.close()


def test_a_folder_that_the_server_cannot_read_is_named(server, trained, tmp_path):
    _, model = trained

    def nowhere(folder, tensors):
        """Leaves the folder empty, which is what a server on another machine sees."""

    session = opened(model, [server.url], tmp_path)
    session.write = nowhere
    with pytest.raises(ServerError, match="must be on a file system that trainer and server share") as caught:
        session.send(adapter_tensors(model), 1, lambda: None)
    assert caught.value.exit_code == 4
    assert not server.service.engine.is_paused and adapters_at(server.url) == []


def test_an_adapter_that_cannot_be_written_fails_the_sync_on_all_ranks(server, trained, tmp_path):
    """The library that writes it has errors of its own, also where the disk is full."""
    _, model = trained
    session = opened(model, [server.url], tmp_path)
    session.write = lambda folder, tensors: save_file(tensors, folder / "nowhere" / "adapter_model.safetensors")
    with pytest.raises(ServerError, match=r"adapter sync of version 1 failed: SafetensorError.*goes on with those it has"):
        session.send(adapter_tensors(model), 1, lambda: None)


LORA = Lora(enabled=True, r=8)


@contextlib.contextmanager
def served(lora_config, parallel=1, missing=()):
    """A server that only describes itself: what it serves, and which endpoints it lacks."""
    info = {"vllm_config": {"lora_config": lora_config, "parallel_config": {"data_parallel_size": parallel}}}

    class Described(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_info, path = self.path.startswith("/server_info"), self.path.partition("?")[0]
            self.send_response(404 if path in missing else 200 if is_info else 405)
            self.end_headers()
            self.wfile.write(json.dumps(info).encode() if is_info else b"")

        def log_message(self, *_):
            """Nothing on the console."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Described) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield ServerControl([f"http://127.0.0.1:{server.server_port}"], 10.0)
        server.shutdown()


GOOD = {"max_lora_rank": 8, "max_loras": 6}


def test_the_choice_and_its_reason(server):
    with served(GOOD) as good:
        assert choose(good, "auto", LORA, None, 4).sends_adapter
        assert choose(good, "auto", Lora(enabled=True, r=4), None, 4).sends_adapter  # LORA-5
        assert not choose(good, "auto", Lora(), None, 4).sends_adapter
        assert choose(good, "merged", LORA, None, 4).reason == "sync.mode=merged"
    assert choose(ServerControl([server.url], 10.0), "lora", LORA, None, STALENESS).sends_adapter


@pytest.mark.parametrize(
    "description, merged_only, text",
    [
        ({"lora_config": None}, None, "--enable-lora"),
        ({"lora_config": GOOD, "parallel": 2}, None, "2 data-parallel engines"),
        ({"lora_config": GOOD, "missing": ("/server_info", "/v1/load_lora_adapter")}, None, "VLLM_SERVER_DEV_MODE=1"),
        ({"lora_config": GOOD}, "model.lora.options.use_dora", "use_dora"),
    ],
)
def test_what_prevents_an_adapter_falls_back_and_is_refused_where_adapters_are_asked_for(description, merged_only, text):
    with served(**description) as control:
        choice = choose(control, "auto", LORA, merged_only, 4)
        assert not choice.sends_adapter and text in choice.reason
        with pytest.raises((ServerError, ConfigError), match=text):
            choose(control, "lora", LORA, merged_only, 4)


@pytest.mark.parametrize("mode", ["auto", "lora"])
@pytest.mark.parametrize(
    "description, rank, text",
    [
        ({"lora_config": GOOD}, 9, "--max-lora-rank 16"),
        ({"lora_config": {**GOOD, "max_loras": 5}}, 8, "--max-loras 6"),
        ({"lora_config": GOOD, "missing": ("/v1/load_lora_adapter",)}, 8, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_limits_of_a_server_are_refused_with_the_number_to_use(description, rank, text, mode):
    with served(**description) as control, pytest.raises(ServerError, match=text):
        choose(control, mode, Lora(enabled=True, r=rank), None, 4)


def test_a_server_without_weight_transfer_is_a_warning(caplog):
    with served(GOOD, missing=("/start_weight_update",)) as control:
        assert choose(control, "lora", LORA, None, 4).sends_adapter
    assert "no weight transfer" in caplog.text
    with served(GOOD, missing=("/server_info",)) as control:  # no development mode
        assert choose(control, "auto", LORA, None, 4).sends_adapter
    assert "--max-loras" in caplog.text


def test_two_ranks_choose_send_and_fail_alike(server, trained, tmp_path):
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "adapter_rank.py"), str(trained[0]), server.url, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output = rank.communicate(timeout=240)[0].decode()
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["gap"] < 1e-5
    assert "version 2 failed" in first["failure"] and "goes on" in first["failure"]
    assert first["rank"].startswith("ServerError") and "--max-lora-rank 512" in first["rank"]
    assert first["kind"].startswith("ConfigError") and first["fallback"] == ["", "Session"]
    assert adapters_at(server.url) == []


def test_the_files_are_those_of_peft(server, trained, tmp_path):
    peft = pytest.importorskip("peft")
    path, model = trained
    session = opened(model, [server.url], tmp_path)
    session.send(adapter_tensors(model), 1, lambda: None)
    folder = tmp_path / FOLDER / session.names.of_version(1)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == RANK
    from transformers import AutoModelForCausalLM

    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folder)
    state = peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter_tensors(model))
    session.close()
