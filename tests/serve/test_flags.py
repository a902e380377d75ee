"""The server's command: what each part of a configuration asks for, and what a user's own arguments replace."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from agrpo.config import check, compose
from agrpo.config.devices import Devices, Gpu
from agrpo.launch.plan import resolved
from agrpo.launch.serve import commands
from agrpo.serve.flags import lora_rank, merged
from tests.standins import QUICKSTART

GPUS = Devices(tuple(Gpu(str(i), "test GPU", 81920, 9.0) for i in range(4)), assumed=True)


def command(*overrides, devices=GPUS, python=None):
    """The command of a configuration on a machine with `devices`; nothing is started."""
    sync = "sync=nccl" if devices else "sync=gloo"
    tree = compose(
        ["+recipe=quickstart", "server=vllm", sync, *([f"server.python={python}"] if python else []), *overrides]
    )
    tree["run"]["use_cpu"] = False
    config, _ = check(tree, devices)
    return commands(resolved(config))[0]


@pytest.fixture(scope="module")
def pretender(tmp_path_factory):
    """A Python that claims to have vllm; as a server it says what it was given and ends with 7 on SIGTERM."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys\n"
        "if sys.argv[1] == '-c': sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(json.dumps([sys.argv, os.environ['VLLM_SERVER_DEV_MODE']]), flush=True)\n"
        "signal.pause()\n"
    )
    path.chmod(0o755)
    return str(path)


def words(found):
    return " ".join(found.argv)


def test_on_gpus_the_front_ends_are_several_and_the_copies_share_the_servers_gpus():
    found = command()
    assert found.argv[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert found.argv[4].endswith("quickstart/model")
    for part in (
        "--api-server-count 8",
        "--data-parallel-size 2",
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
    ):
        assert part in words(found)
    assert "--enforce-eager" not in found.argv
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert json.loads(found.words("--weight-transfer-config").split(" ", 1)[1].strip("'")) == {"backend": "nccl"}
    assert "--tensor-parallel-size 2" in words(command("server.tensor_parallel_size=2"))
    assert "--data-parallel-size" not in command("server.tensor_parallel_size=2").argv


def test_a_cpu_build_has_one_front_end_and_a_bounded_cache(pretender):
    found = command(devices=Devices(), python=pretender)
    assert found.argv[1:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert "--no-enable-chunked-prefill" in found.argv
    assert "--enforce-eager" in found.argv and "--api-server-count 1" in words(found)
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found.environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(max(1, os.cpu_count() // 2)))
    assert 1 <= int(found.environment["VLLM_CPU_KVCACHE_SPACE"]) <= 8
    assert found.environment["HF_HUB_OFFLINE"] == "1"  # the model is a folder
    assert found.environment["PYTHONPATH"].endswith("vllm_plugin") and os.pathsep not in found.environment["PYTHONPATH"]


def test_the_line_for_another_machine_says_nothing_of_this_ones_python_path(pretender, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/only/here")
    found = command(devices=Devices(), python=pretender)
    plugin = found.environment["PYTHONPATH"]
    assert "/only/here" not in found.line() and "/only/here" not in found.words("PYTHONPATH")
    # A process of this machine keeps what its user set; so does the shell that reads the line, of its own.
    assert found.here()["PYTHONPATH"] == f"{plugin}{os.pathsep}/only/here"
    variable = found.words("PYTHONPATH")
    for before, after in (("/there", f"{plugin}:/there"), ("", plugin)):
        shell = subprocess.run(["sh", "-c", f"{variable}; echo $PYTHONPATH"], env={"PYTHONPATH": before}, capture_output=True, text=True)
        assert shell.stdout.strip() == after
    # Without an entry of ours a child of the run must not find the trainer's packages either.
    assert command("sync=nccl").here()["PYTHONPATH"] == "/only/here" and "PYTHONPATH" not in command("sync=nccl").line()


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        (["model.precision=bf16"], "bfloat16"),
        (["model.precision=fp16"], "float16"),
        (["model.precision=no", "model.dtype=float32"], "float32"),
        (["model.precision=no", "model.dtype=auto"], json.loads((QUICKSTART / "config.json").read_text()).get("dtype")),
        (["model.precision=bf16", "server.dtype=float32"], "float32"),
    ],
)
def test_the_served_precision_is_the_one_the_trainer_computes_in(overrides, dtype):
    assert command(*overrides).words("--dtype") == f"--dtype {dtype}"


def test_what_the_loss_and_the_sampling_need():
    assert command("sampler.num_sampler_logprobs=37").words("--max-logprobs") == "--max-logprobs 38"  # and the sampled token
    assert command("sampler.num_sampler_logprobs=3").words("--max-logprobs") == "--max-logprobs 20"  # vLLM's own
    assert command("loss=grpo").words("--max-logprobs") == ""
    assert "--return-sampling-mask" not in command().argv
    truncated = command("sampler.top_k=11")
    assert "--return-sampling-mask" in truncated.argv and truncated.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_adapters_get_a_slot_per_version_and_the_next_allowed_rank():
    found = command("model=lora", "model.lora.r=33", "rollout.max_staleness=5")
    assert "--enable-lora --max-lora-rank 64 --max-loras 7" in words(found)
    assert found.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--weight-transfer-config" in found.argv  # LORA-4 keeps it
    assert "--enable-lora" not in command("model=lora", "sync.mode=merged").argv
    assert [lora_rank(r) for r in (1, 2, 8, 9, 257, 321)] == [1, 8, 8, 16, 320, 512]


def test_the_context_is_the_budget_or_a_prompt_and_a_completion_within_the_models():
    assert command("packer.token_budget=211").words("--max-model-len") == "--max-model-len 211"
    derived = ("packer.token_budget=null", "server.max_prompt_length=101", "sampler.max_completion_length=13")
    assert command(*derived).words("--max-model-len") == "--max-model-len 114"
    longest = json.loads((QUICKSTART / "config.json").read_text())["max_position_embeddings"]
    assert command("packer.token_budget=null").words("--max-model-len") == f"--max-model-len {longest}"
    assert command("server.max_model_len=4001").words("--max-model-len") == "--max-model-len 4001"


def test_a_users_argument_replaces_the_planned_one_in_every_spelling():
    planned = [("--dtype", "bfloat16"), ("--enable-scale-out",), ("--max-model-len", "512")]
    assert merged(planned, ["--max_model_len=97", "--no-enable-scale-out", "--seed", "3"]) == [
        ("--dtype", "bfloat16"), ("--max-model-len", "97"), ("--no-enable-scale-out",), ("--seed", "3"),
    ]  # fmt: skip
    found = command(
        "server.arguments=[--port,'8123','--api_server_count=1']", "server.environment_variables={A: '1 2'}"
    )
    assert found.url == "http://127.0.0.1:8123" and "vllm.entrypoints.openai.api_server" in found.argv
    assert found.argv[-4:] == ["--port", "8123", "--api-server-count", "1"]
    assert "A='1 2'" in found.line() and shlex.split(found.line())[-4:] == found.argv[-4:]


def test_each_address_of_an_external_server_gets_its_command():
    urls = 'server.base_url="http://127.0.0.1:8301,http://node7:8302"'
    tree = compose(["+recipe=quickstart", "server=external", urls, "server.model_name=mine", "sync=gloo"])
    config, _ = check(tree, Devices())
    found = commands(resolved(config))
    assert [c.url for c in found] == ["http://127.0.0.1:8301", "http://node7:8302"]
    assert "--host 127.0.0.1 --port 8301" in words(found[0]) and "--host 0.0.0.0 --port 8302" in words(found[1])
    assert "--served-model-name mine" in words(found[0])


def test_serve_becomes_the_server_with_its_signals_and_its_exit_code(pretender):
    arguments = [sys.executable, "-m", "agrpo", "serve", "+recipe=quickstart", "server=vllm", "sync=gloo"]
    arguments += [f"server.python={pretender}", "server.arguments=[--seed,'7']"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    argv, mode = json.loads(process.stdout.readline())
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and argv[-2:] == ["--seed", "7"] and mode == "1"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 7
    line = next(line for line in errors.splitlines() if "api_server" in line)
    # The line that was shown does the same when a shell reads it.
    pasted = subprocess.Popen(["sh", "-c", "exec env " + line], stdout=subprocess.PIPE, text=True)
    assert json.loads(pasted.stdout.readline()) == [argv, "1"]
    pasted.send_signal(signal.SIGTERM)
    assert pasted.wait(timeout=30) == 7


def test_a_server_that_only_a_run_starts_is_refused_in_one_line():
    answer = subprocess.run(
        [sys.executable, "-m", "agrpo", "serve", "+recipe=quickstart"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 3
    assert answer.stderr.splitlines() == [
        "server=embedded is started and stopped by agrpo train alone; choose server=vllm, or server=external for the line "
        "to run elsewhere"
    ]
