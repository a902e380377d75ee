"""`python -m tests.gpu.sync_nccl`: weight sync from a GPU, one JSON line per case, exit 1 if one fails.

    nccl_embedded   two GPUs                            sender on the first, embedded server on the second
    nccl_vllm       two GPUs and AGRPO_VLLM_PYTHON      vLLM as it is installed there, on the second GPU
    gloo_embedded   one GPU                             both on it, through the host's memory
    gloo_vllm       one GPU and AGRPO_VLLM_PYTHON       vLLM with the plug-in, on the last GPU

AGRPO_VLLM_PYTHON is the Python of an environment with vLLM 0.32 or newer for GPUs. A case that lacks something says what
and counts as neither passed nor failed. Each case syncs three versions of a tied Qwen3 of 0.3 billion parameters in
bfloat16, proves each, and gives the transfer's rate and the highest memory of the sender above the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from agrpo.sync.control import ServerControl
from agrpo.sync.gloo import Gloo
from agrpo.sync.nccl import Nccl
from agrpo.sync.proof import Proof

BUCKET_MB, VERSIONS, LIMIT = 256, 3, 0.05  # nats; both sides compute in bfloat16
CASES = {
    "nccl_embedded": (Nccl, "embedded", 2),
    "nccl_vllm": (Nccl, "vllm", 2),
    "gloo_embedded": (Gloo, "embedded", 1),
    "gloo_vllm": (Gloo, "vllm", 1),
}


def main() -> int:
    count = torch.cuda.device_count()
    python = os.environ.get("AGRPO_VLLM_PYTHON")
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    print(json.dumps({"torch": torch.__version__, "gpus": names, "vllm_python": python}), flush=True)
    is_ok = True
    for case, (mechanism, kind, num_gpus) in CASES.items():
        lacks = [f"{num_gpus} GPUs visible, there are {count}"] if count < num_gpus else []
        lacks += ["AGRPO_VLLM_PYTHON set"] if kind == "vllm" and not python else []
        if lacks:
            print(json.dumps({"case": case, "needs": lacks}), flush=True)
            continue
        try:
            row = {"ok": True, **_run(mechanism(bucket_mb=BUCKET_MB), kind, count - 1)}
        except Exception as error:
            traceback.print_exc()
            row, is_ok = {"ok": False, "error": f"{type(error).__name__}: {error}"}, False
        print(json.dumps({"case": case, **row}), flush=True)
    return 0 if is_ok else 1


def _run(component, kind: str, server_gpu: int) -> dict:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "model"
        model = _model(path).to("cuda:0", torch.bfloat16).eval()
        open_server = {"embedded": _embedded, "vllm": _vllm}[kind]
        url = stack.enter_context(open_server(path, component, server_gpu))
        control = ServerControl([url], 300.0)
        name = str(path) if kind == "vllm" else None
        proof = Proof(control, model=name, prompt_ids=[7, 11, 13], parity_limit=LIMIT, trainer_dtype="bfloat16")
        sender = component.open(control, Path(folder), torch.device("cuda:0"), 0, 1)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        gaps, rates, extra = [], [], 0
        for version in range(1, VERSIONS + 1):
            _change(model, version)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(0)
            torch.cuda.reset_peak_memory_stats(0)
            times = sender.send(model.named_parameters(), version, lambda: None)
            extra = max(extra, torch.cuda.max_memory_allocated(0) - before)
            gaps.append(proof.check(_scorer(model), version))
            rates.append(num_bytes / times.transfer_s / 1e9)
        sender.close()
    return {
        "gigabytes": round(num_bytes / 1e9, 3),
        "gigabytes_per_s": [round(rate, 2) for rate in rates],
        "mean_abs_logprob_difference": [float(f"{gap:.3g}") for gap in gaps],
        "extra_memory_buckets": round(extra / (BUCKET_MB << 20), 2),
    }


def _model(path: Path):
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from tests.standins import QUICKSTART

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def _change(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def _scorer(model):
    def score(token_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            tokens = torch.tensor(token_ids[None].astype(np.int64), device="cuda:0")
            logits = model(tokens).logits[0, -len(ids) - 1 : -1].double()
        chosen = torch.tensor(ids.astype(np.int64), device="cuda:0")
        return torch.log_softmax(logits, -1).gather(1, chosen).cpu().numpy()

    return score


@contextlib.contextmanager
def _embedded(path: Path, component, gpu: int):
    from agrpo.serve.embedded import EmbeddedServer

    with EmbeddedServer(
        path, component.receiver, device=f"cuda:{gpu}", dtype="bfloat16", kv_cache_tokens=8192
    ) as server:
        yield server.url


@contextlib.contextmanager
def _vllm(path: Path, component, gpu: int):
    from tests.vllm.conftest import start

    arguments = ["--weight-transfer-config", json.dumps({"backend": component.backend}), "--dtype", "bfloat16"]
    arguments += ["--max-model-len", "1024", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    arguments += ["--gpu-memory-utilization", "0.3", "--enforce-eager"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    variables |= component.server_environment()
    server = start(os.environ["AGRPO_VLLM_PYTHON"], str(path), arguments, variables, path.parent / "vllm.log")
    try:
        yield server.url
    except BaseException:
        print(server.tail(), file=sys.stderr)
        raise
    finally:
        server.stop()
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
