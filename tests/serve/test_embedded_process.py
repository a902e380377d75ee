"""The embedded server as a process of a run, and its settings."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from serving import call, generate, wait_until

from agrpo.config import compose, read, save
from agrpo.launch.processes import free_ports
from agrpo.lifecycle import Runtime
from agrpo.serve.embedded import Embedded, EmbeddedServer

ROOT = Path(__file__).parents[2]


def test_a_run_starts_and_ends_it(folders, tmp_path):
    """Config and port come from the run directory; its signs of life and its end are there too."""
    tree = compose(
        ["+recipe=quickstart", f"model.path={folders['qwen3']}", "server=embedded", "server.max_model_len=127"]
    )
    config = read(tree)
    save(config, tmp_path, [])
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    Runtime((url,), "127.0.0.1", 1, "00", "test").save(tmp_path)
    planned = config.server.planned(tmp_path, config, port, 0)
    argv, environment = planned.argv, {**os.environ, **planned.environment, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)

    def is_serving():
        alive = tmp_path / "state" / "server.alive.json"
        return alive.is_file() and json.loads(alive.read_text())["phase"] == "serving"

    wait_until(is_serving, seconds=60)
    wait_until(lambda: is_healthy(url))
    assert call(url, "/v1/models")[1]["data"][0]["max_model_len"] == 127
    assert call(url, "/v1/models")[1]["data"][0]["id"] == folders["qwen3"]
    assert len(generate(url, [7, 8, 9], max_tokens=5, seed=1, ignore_eos=True)["token_ids"]) == 5
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert json.loads((tmp_path / "state" / "server.exit.json").read_text())["reason"] == "finished"


def is_healthy(url):
    try:
        return call(url, "/health")[0] == 200
    except OSError:
        return False


def test_importing_the_component_loads_no_torch():
    code = "import sys, agrpo.serve.embedded as m; m.Embedded(); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "[]"


def test_yaml_lists_every_setting_with_its_default():
    node = yaml.safe_load((ROOT / "conf" / "server" / "embedded.yaml").read_text())
    assert node.pop("_target_") == "agrpo.serve.embedded.Embedded"
    assert node == {f.name: getattr(Embedded(), f.name) for f in dataclasses.fields(Embedded)}


def test_problems_name_key_and_limit():
    config = SimpleNamespace(
        sampler=SimpleNamespace(num_sampler_logprobs=40, max_completion_length=64),
        loss=SimpleNamespace(wants_head=True),
        sync=SimpleNamespace(receiver="gloo"),
        model=SimpleNamespace(lora=SimpleNamespace(enabled=False)),
    )
    lines = Embedded(max_model_len=64, kv_cache_tokens=63).problems(config)
    assert [line.split(" ")[0] for line in lines] == [
        "sampler.num_sampler_logprobs", "sampler.max_completion_length", "server.kv_cache_tokens", "sync.receiver",
    ]  # fmt: skip
    config.loss.wants_head, config.sync.receiver = False, ""
    assert Embedded(max_model_len=65).problems(config) == []


@pytest.mark.parametrize(
    "settings, text",
    [({"max_model_len": 702}, "at most 701"), ({"kv_cache_tokens": 700}, "at least max_model_len = 701, got 700")],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings, text, folders):
    from agrpo.errors import ConfigError

    with pytest.raises(ConfigError, match=text), EmbeddedServer(folders["qwen3"], **settings):
        pass


def test_a_port_in_use_and_a_folder_without_weights_are_named(folders, tmp_path, qwen):
    from agrpo.errors import ConfigError, ServerError
    from agrpo.serve.embedded import serve

    with pytest.raises(ServerError, match="cannot listen on 127.0.0.1"):
        serve(folders["qwen3"], port=int(qwen.url.rsplit(":", 1)[1]))
    (tmp_path / "config.json").write_text((Path(folders["qwen3"]) / "config.json").read_text())
    with pytest.raises(ConfigError, match="model.path: the server cannot load"):
        serve(str(tmp_path))


def test_a_model_with_other_layers_is_refused(tmp_path):
    from agrpo.errors import ConfigError

    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama4_text", "num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"]}
        )
    )
    with pytest.raises(ConfigError, match="chunked_attention.*server=vllm"), EmbeddedServer(tmp_path):
        pass
