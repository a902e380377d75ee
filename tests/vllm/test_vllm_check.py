"""serve-check against real vLLM that was started wrongly: the right row says so, and the fix works when pasted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agrpo.sync.control import ServerControl
from agrpo.sync.proof import parse_answer
from tests.standins import tiny_qwen3
from tests.vllm.conftest import ENVIRONMENT, START_LIMIT_S, Server, free_port, is_healthy

pytestmark = pytest.mark.vllm

LORA = ["model=lora", "model.lora.r=11", "rollout.max_staleness=3"]


def overrides(model: str, url: str, *more: str) -> list[str]:
    return [
        "+recipe=quickstart", f"model.path={model}", "server=external", f"server.base_url={url}", "sync=gloo",
        "sampler.max_completion_length=64", "sampler.num_sampler_logprobs=23", *more,
    ]  # fmt: skip


def agrpo(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agrpo", command, *arguments], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2]
    )  # fmt: skip


def checked(model: str, url: str, *more: str) -> tuple[int, dict[str, dict]]:
    """Exit code and rows by name."""
    answer = agrpo("serve-check", *overrides(model, url, *more), "--json")
    assert answer.stdout, answer.stderr
    return answer.returncode, {row["name"]: row for row in json.loads(answer.stdout)["rows"]}


def paste(line: str, url: str, log: Path) -> Server:
    """Start a server as a shell would, and wait until it is healthy."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", "exec env " + line], stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )  # fmt: skip
    server = Server(url, "", log, process)
    deadline = time.monotonic() + START_LIMIT_S
    while not is_healthy(url):
        if not server.is_alive or time.monotonic() > deadline:
            server.stop()
            pytest.fail(f"{line}\n{server.tail()}")
        time.sleep(0.3)
    return server


@pytest.fixture(scope="module")
def wrong(vllm_python, tiny_model, tmp_path_factory):
    """Rows of two servers that are wrong in twelve ways: name -> row."""
    folder = tmp_path_factory.mktemp("wrong")
    rows = {}
    port = free_port()
    variables = " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items())
    line = (
        f"{variables} {vllm_python} -m vllm.entrypoints.openai.api_server --model {tiny_model} --host 127.0.0.1 --port {port} "
        "--enforce-eager --logprobs-mode raw_logprobs --max-model-len 64 --max-logprobs 5 --dtype bfloat16 --enable-lora "
        "--max-loras 2 --max-lora-rank 8"
    )
    server = paste(line, f"http://127.0.0.1:{port}", folder / "first.log")
    try:
        code, rows["first"] = checked(tiny_model, server.url, *LORA)
        assert code == 4
        code, rows["merged"] = checked(tiny_model, server.url)
        assert code == 4
        # Without --enable-scale-out the proof of arrival asks /v1/completions.
        sampling = {"max_tokens": 7, "logprobs": 4, "temperature": 1.0, "seed": 11}
        answer = parse_answer(ServerControl([server.url], 60).generate(server.url, [5, 6, 7], None, sampling), 4)
        assert answer.ids.shape == answer.sampler_logprobs.shape == (7, 5)
        assert (answer.ids[:, 0] == answer.output_ids).all()
    finally:
        server.stop()
    # The second is the printed line of `agrpo serve` for another model, without development mode.
    other = str(tiny_qwen3(folder / "other", seed=1, num_layers=1))
    printed = agrpo(
        "serve", "+recipe=quickstart", f"model.path={other}", "server=vllm", f"server.python={vllm_python}", "sync=gloo",
        f"server.arguments=[--port,'{port}']", "server.environment_variables={VLLM_SERVER_DEV_MODE:'0'}", "--print",
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    server = paste(printed.stdout.strip(), f"http://127.0.0.1:{port}", folder / "second.log")
    try:
        code, rows["second"] = checked(tiny_model, server.url)
        assert code == 4
    finally:
        server.stop()
    return rows


@pytest.mark.parametrize(
    ("server", "name", "status", "found", "fix"),
    [
        ("first", "log-probs mode", "fail", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("first", "max_model_len", "fail", "leaves no room", "--max-model-len"),
        ("first", "max_logprobs", "fail", "5, below sampler.num_sampler_logprobs + 1 = 24", "--max-logprobs 24"),
        ("first", "dtype", "warn", "serves bfloat16, the trainer computes in float32", "--dtype float32"),
        ("merged", "weight transfer", "fail", "no back end", "--weight-transfer-config"),
        ("first", "adapter slots", "fail", "rollout.max_staleness + 2 = 5", "--max-loras 5"),
        ("first", "adapter rank", "fail", "below model.lora.r=11", "--max-lora-rank 16"),
        ("first", "adapter loading", "fail", "no /v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("first", "token endpoint", "warn", "no /inference/v1/generate", "--enable-scale-out"),
        ("first", "keep-alive", "warn", "5 s", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE="),
        ("second", "development mode", "fail", "off", "VLLM_SERVER_DEV_MODE=1"),
        ("second", "model", "fail", "other", "--model"),
    ],
)
def test_the_right_row_tells_each_mistake_and_its_fix(wrong, server, name, status, found, fix):
    row = wrong[server][name]
    assert (row["status"], found in row["found"], fix in row["fix"]) == (status, True, True), row


def test_what_is_right_at_a_wrong_server_is_not_blamed(wrong):
    bad = {name for name, row in wrong["first"].items() if row["status"] in ("warn", "fail")}
    assert bad == {
        "log-probs mode", "max_model_len", "max_logprobs", "dtype", "weight transfer", "adapter slots", "adapter rank",
        "adapter loading", "token endpoint", "keep-alive",
    }  # fmt: skip


def test_every_printed_fix_pasted_makes_every_row_green(wrong, vllm_python, tiny_model, tmp_path):
    variables, flags, port = [], [], free_port()
    for rows in wrong.values():
        for row in rows.values():
            words = shlex.split(row["fix"])
            first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
            variables += [shlex.quote(word) for word in words[:first]]
            flags += [shlex.quote(word) for word in words[first:]]
    usual = " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items() if k != "VLLM_SERVER_DEV_MODE")
    line = (
        f"{usual} {' '.join(dict.fromkeys(variables))} {vllm_python} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 "
        f"--port {port} --enforce-eager --enable-lora {' '.join(flags)}"
    )
    server = paste(line, f"http://127.0.0.1:{port}", tmp_path / "log")
    try:
        code, rows = checked(tiny_model, server.url, *LORA)
        assert (code, {n: r for n, r in rows.items() if r["status"] != "ok"}) == (0, {})
        code, rows = checked(tiny_model, server.url, "--probe")
        assert (code, {n: r for n, r in rows.items() if r["status"] != "ok"}) == (0, {})
        assert {"tokenizer", "log-probs", "weight sync", "log-probs after sync", "resumed"} <= set(rows)
    finally:
        server.stop()
