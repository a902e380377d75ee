"""Every row of the server's check, right and wrong, against a server that says what vLLM says about itself."""

import functools
import json
import re
import subprocess
import sys
import time

import pytest
from facts_server import SILENT, facts_server

from agrpo.config import check, compose
from agrpo.config.devices import Devices
from agrpo.errors import ServerError
from agrpo.launch.check import check_at_start
from agrpo.launch.plan import resolved
from agrpo.launch.prompts import long_prompts
from agrpo.launch.serve import commands
from agrpo.serve.check import place, run_checks
from agrpo.serve.embedded import EmbeddedServer
from tests.standins import QUICKSTART

LORA = ("model=lora", "model.lora.r=11", "rollout.max_staleness=3")


@functools.cache
def configuration(*overrides):
    tree = compose(["+recipe=quickstart", "server=external", "sync=gloo", *overrides])
    return resolved(check(tree, Devices())[0])


@pytest.fixture
def server():
    with facts_server() as facts:
        yield facts


def rows_of(server, *overrides, run_dir=None, prompts=None, limit_s=10.0):
    config = configuration(*overrides)
    found = run_checks(config, [server.url], commands(config), run_dir, prompts, limit_s)
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def test_a_right_server_is_green_in_every_row_and_quickly(server):
    began = time.monotonic()
    rows = rows_of(server)
    assert time.monotonic() - began < 30
    assert {name: row for name, row in rows.items() if row.status != "ok"} == {}
    assert len(rows) == 17 and "same vocabulary of 303" in rows["tokenizer"].found


def change(server, section, **values):
    server.info["vllm_config"][section] = {**(server.info["vllm_config"][section] or {}), **values}


def served(server, **values):
    change(server, "lora_config", **{"max_loras": 5, "max_lora_rank": 16, **values})
    server.answers["/v1/load_lora_adapter"] = (405, None)


# row, what is wrong with the server, the configuration, the row's state, words of what was found, the fix
CASES = [
    ("version", lambda s: s.answers.update({"/version": (200, {"version": "0.31.2"})}), (), "warn", "20 to 40 %", "pip install"),
    ("version", lambda s: s.answers.update({"/version": (200, {"version": "0.27.1"})}), ("sampler.top_k=7",), "warn", "no candidate sets", "pip install"),
    ("token endpoint", lambda s: (s.answers.pop("/inference/v1/generate"), s.answers.update({"/version": (200, {"version": "0.27.1"})})), ("sampler.top_k=7",), "warn", "is used", "--enable-scale-out"),
    ("version", lambda s: s.answers.update({"/version": (200, {"version": "0.31.2"})}), ("loss=grpo",), "ok", "0.31.2", ""),
    ("development mode", lambda s: s.answers.pop("/server_info"), (), "fail", "/server_info missing", "VLLM_SERVER_DEV_MODE=1"),
    ("development mode", lambda s: s.answers.pop("/server_info"), LORA, "warn", "only adapters", "VLLM_SERVER_DEV_MODE=1"),
    ("model", lambda s: s.entry.update(id="else", root="else"), (), "fail", "server.model_name=else", f"--model {QUICKSTART}"),
    ("model", lambda s: s.entry.update(id="mine"), ("server.model_name=mine",), "ok", "mine", ""),
    ("model", lambda s: None, ("server.model_name=mine",), "fail", "not server.model_name=mine", "--served-model-name mine"),
    ("model", lambda s: s.answers.update({"/v1/models": (200, {"data": []})}), (), "fail", "lists no model", "--model"),
    ("tokenizer", lambda s: change(s, "model_config", vocab_size=9999), (), "fail", "vocabulary of 9999 tokens, trained with 303", "--tokenizer"),
    ("tokenizer", lambda s: setattr(s, "num_tokens", 100), (), "fail", "fewer", "--tokenizer"),
    ("tokenizer", lambda s: setattr(s, "num_tokens", 9999), (), "fail", "more", "--tokenizer"),
    ("tokenizer", lambda s: setattr(s, "shift", 1), (), "fail", "other tokens", "--tokenizer"),
    ("dtype", lambda s: change(s, "model_config", dtype="torch.bfloat16"), (), "warn", "serves bfloat16, the trainer computes in float32", "--dtype float32"),
    ("max_model_len", lambda s: s.entry.update(max_model_len=8), (), "fail", "leaves no room", "--max-model-len"),
    ("max_model_len", lambda s: s.entry.update(max_model_len=None), (), "fail", "does not say", "--max-model-len"),
    ("max_model_len", lambda s: s.entry.update(max_model_len=977), ("packer.token_budget=512",), "warn", "longer samples are dropped", "--max-model-len 512"),
    ("log-probs mode", lambda s: change(s, "model_config", logprobs_mode="raw_logprobs"), (), "fail", "raw_logprobs", "--logprobs-mode processed_logprobs"),
    ("log-probs mode", lambda s: s.info["vllm_config"].pop("model_config"), (), "warn", "not reported", "--logprobs-mode processed_logprobs"),
    ("max_logprobs", lambda s: change(s, "model_config", max_logprobs=5), (), "fail", "5, below sampler.num_sampler_logprobs + 1 = 9", "--max-logprobs 20"),
    ("max_logprobs", lambda s: change(s, "model_config", max_logprobs=5), ("loss=grpo",), "ok", "needed are 0", ""),
    ("max_logprobs", lambda s: change(s, "model_config", max_logprobs=-1), (), "ok", "no limit", ""),
    ("token endpoint", lambda s: s.answers.update({"/inference/v1/generate": (403, {})}), (), "warn", "/v1/completions is used", "--enable-scale-out"),
    ("token endpoint", lambda s: s.answers.pop("/inference/v1/generate"), ("sampler.top_k=7",), "fail", "candidate sets need", "--enable-scale-out"),
    ("sampling mask", lambda s: None, ("sampler.top_k=7",), "fail", "off", "VLLM_USE_V2_MODEL_RUNNER=1 --return-sampling-mask"),
    ("sampling mask", lambda s: change(s, "model_config", return_sampling_mask=True), ("sampler.top_k=7",), "ok", "are returned", ""),
    ("weight transfer", lambda s: s.answers.pop("/start_weight_update"), (), "fail", "no /start_weight_update", "VLLM_SERVER_DEV_MODE=1"),
    ("weight transfer", lambda s: s.answers.pop("/start_weight_update"), LORA, "warn", "adapters only", "VLLM_SERVER_DEV_MODE=1"),
    ("weight transfer", lambda s: s.info["vllm_config"].update(weight_transfer_config=None), (), "fail", "no back end, needed is gloo", """--weight-transfer-config '{"backend": "gloo"}'"""),
    ("weight transfer", lambda s: change(s, "weight_transfer_config", backend="nccl"), (), "fail", "nccl back end, needed is gloo", "PYTHONPATH="),
    ("weight transfer", lambda s: s.answers.pop("/collective_rpc"), ("sync=disk",), "fail", "no /collective_rpc", "VLLM_SERVER_DEV_MODE=1"),
    ("adapters", lambda s: None, LORA, "warn", "merged weights are sent instead", "--enable-lora"),
    ("adapters", lambda s: None, (*LORA, "sync.mode=lora"), "fail", "and sync.mode=lora", "--enable-lora"),
    ("adapter slots", lambda s: served(s, max_loras=4), LORA, "fail", "rollout.max_staleness + 2 = 5", "--max-loras 5"),
    ("adapter rank", lambda s: served(s, max_lora_rank=8), LORA, "fail", "below model.lora.r=11", "--max-lora-rank 16"),
    ("adapter rank", served, LORA, "ok", "at most 16", ""),
    ("adapter loading", lambda s: (served(s), s.answers.pop("/v1/load_lora_adapter")), LORA, "fail", "no /v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("engines", lambda s: change(s, "parallel_config", data_parallel_size=2), LORA, "warn", "adapters reach one only", "--data-parallel-size 1"),
    ("engines", lambda s: change(s, "parallel_config", data_parallel_size=2), (), "ok", "2", ""),
    ("API servers", lambda s: change(s, "parallel_config", _api_process_count=1), (), "warn", "halves the speed", "--api-server-count 8"),
    ("API servers", lambda s: change(s, "parallel_config", _api_process_count=1), ("loss=grpo",), "ok", "1", ""),
    ("keep-alive", lambda s: s.info["vllm_env"].update(VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5), (), "warn", "5 s", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120"),
    ("metrics endpoint", lambda s: s.answers.pop("/metrics"), (), "warn", "rollout.max_concurrent_rollouts=", ""),
    ("paused", lambda s: s.answers.update({"/is_paused": (200, {"is_paused": True})}), (), "warn", "resumes it after its first sync", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[4]}")
def test_a_wrong_answer_is_told_in_its_own_row_with_its_fix(server, case):
    name, spoil, overrides, status, found, fix = case
    spoil(server)
    row = rows_of(server, *overrides)[name]
    assert (row.status, found in row.found, fix in row.fix) == (status, True, True), row
    assert bool(row.fix) == bool(fix)


def test_a_silent_path_is_named_and_hides_no_other_row(server):
    server.answers["/metrics"] = server.answers["/version"] = (SILENT, None)
    began = time.monotonic()
    rows = rows_of(server, limit_s=0.7)
    assert time.monotonic() - began < 30
    assert rows["reachable"].status == "fail"
    assert re.search(
        r"GET /version: no answer within 0.7 s; GET /metrics: no answer within 0.7 s", rows["reachable"].found
    )
    assert rows["log-probs mode"].status == "ok"


def test_the_slow_first_look_at_the_servers_facts_is_taken_again(server):
    server.answers["/server_info"] = (1.3, server.info)
    assert rows_of(server, limit_s=0.9)["log-probs mode"].status == "ok"


def test_facts_that_never_come_do_not_look_like_a_missing_development_mode(server):
    server.answers["/server_info"] = (SILENT, None)
    rows = rows_of(server, limit_s=0.3)
    assert (rows["reachable"].status, rows["development mode"].status) == ("fail", "skip")
    assert "no answer within 1.8 s" in rows["reachable"].found


def test_a_server_that_is_not_there_has_one_row_with_the_command_that_starts_it(server):
    server.url = "http://127.0.0.1:9"
    rows = rows_of(server)
    assert list(rows) == ["reachable"] and "GET /health" in rows["reachable"].found
    assert "--weight-transfer-config" in rows["reachable"].fix


def test_another_shape_of_the_model_at_another_path_is_told(server, tmp_path):
    shape = json.loads((QUICKSTART / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 97}))
    server.entry.update(id="mine", root=str(tmp_path))
    row = rows_of(server, "server.model_name=mine")["model"]
    assert row.status == "fail" and "another num_hidden_layers (97 and" in row.found


def test_prompts_that_leave_no_room_are_counted(server, tmp_path):
    contents = ["17 + 25 = ", *["3 + 4 = "] * 6, "17 + 25 = " * 97]
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in contents]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = (f"data.path={tmp_path / 'rows.jsonl'}", "sampler.max_completion_length=64")
    prompts = long_prompts(configuration(*overrides))
    row = rows_of(server, *overrides, prompts=prompts)["max_model_len"]
    assert row.status == "warn" and "1 of 8 prompts leave no room for a completion of 64" in row.found
    needed = int(row.fix.split()[-1])
    server.entry["max_model_len"] = needed
    assert prompts(needed - 64).num_affected == 0 and prompts(5).num_affected == 8


def test_a_shared_folder_is_looked_for_in_the_servers_own_file_system(server, tmp_path):
    row = rows_of(server, "sync=disk", run_dir=tmp_path)["shared folder"]
    assert row.status == "ok" and list(tmp_path.iterdir()) == []
    assert "shared folder" not in rows_of(server, run_dir=tmp_path)


def test_a_server_elsewhere_is_asked_by_its_adapter_endpoint(server, tmp_path, monkeypatch):
    monkeypatch.setattr(place, "server_process", lambda url: None)  # as on another machine
    served(server)
    row = rows_of(server, *LORA, run_dir=tmp_path)["shared folder"]
    assert row.status == "fail" and "run.output_dir=FOLDER" in row.fix
    server.lora_answer = (400, {"error": {"message": "LoRA rank 65536 is greater than max_lora_rank 16."}})
    assert rows_of(server, *LORA, run_dir=tmp_path)["shared folder"].status == "ok"
    assert rows_of(server, "sync=disk", run_dir=tmp_path)["shared folder"].status == "warn"


def test_a_gpu_that_both_use_is_found_by_its_programmes():
    gpus = [["0", "GPU-a"], ["1", "GPU-b"]]
    programs = [["123", "GPU-a"], ["7", "GPU-b"], ["[N/A]", "GPU-b"]]
    assert place.shared_gpus(gpus, programs, ["0"], {123, 124}) == ["0"]
    assert place.shared_gpus(gpus, programs, ["GPU-a", "1"], {123}) == ["GPU-a"]
    assert place.shared_gpus(gpus, programs, ["1"], {123}) == []


def test_a_run_ends_with_the_failed_rows_and_notes_the_warnings(server, tmp_path):
    change(server, "model_config", logprobs_mode="raw_logprobs", max_logprobs=5, dtype="torch.bfloat16")
    config, notes = configuration(f"server.base_url={server.url}"), []
    with pytest.raises(ServerError) as caught:
        check_at_start(config, [server.url], tmp_path, notes.append)
    assert caught.value.exit_code == 4
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "log-probs mode",
        "max_logprobs",
    ]
    assert "fix: --logprobs-mode processed_logprobs" in str(caught.value)
    assert [note.split(";")[0] for note in notes] == [
        "warning: dtype: serves bfloat16, the trainer computes in float32"
    ]


def test_the_embedded_server_of_a_run_passes_within_a_second(tmp_path):
    tree = compose(["+recipe=quickstart", "sync=gloo"])
    config = resolved(check(tree, Devices())[0])
    with EmbeddedServer(QUICKSTART, dtype="float32") as embedded:
        began, notes = time.monotonic(), []
        check_at_start(config, [embedded.url], tmp_path, notes.append)
        assert time.monotonic() - began < 5 and notes == []  # 0.1 s where nothing else runs


def serve_check(*arguments):
    command = [sys.executable, "-m", "agrpo", "serve-check", "+recipe=quickstart", "server=external", "sync=gloo"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_prints_one_line_per_row_and_the_command_and_ends_with_4(server):
    change(server, "model_config", logprobs_mode="raw_logprobs")
    answer = serve_check(f"server.base_url={server.url}")
    assert answer.returncode == 4
    assert (
        "fail  log-probs mode: raw_logprobs, needed is processed_logprobs; fix: --logprobs-mode processed_logprobs"
        in answer.stdout
    )
    assert re.search(r"^VLLM_SERVER_DEV_MODE=1 .*--logprobs-mode processed_logprobs", answer.stdout, re.M)
    assert answer.stderr.splitlines() == ["failed: log-probs mode"]


def test_the_command_prints_json_for_programmes(server):
    answer = serve_check(f"server.base_url={server.url}", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["ok"] and {row["status"] for row in found["rows"]} == {"ok"} and len(found["commands"]) == 1
    assert set(found["rows"][0]) == {"url", "name", "status", "found", "fix"}


def test_the_probe_compares_the_model_and_sends_the_weights_once():
    with EmbeddedServer(QUICKSTART, receiver="agrpo.sync.gloo.GlooReceiver", dtype="float32") as embedded:
        answer = serve_check(f"server.base_url={embedded.url}", "--probe", "--json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        rows = {row["name"]: row["status"] for row in json.loads(answer.stdout)["rows"]}
        names = ("log-probs", "weight sync", "log-probs after sync", "resumed")
        assert {name: rows[name] for name in names} == dict.fromkeys(names, "ok")
        assert embedded.service.engine.version == "0" and not embedded.service.engine.is_paused
