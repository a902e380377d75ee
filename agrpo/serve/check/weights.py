"""Rows on how weights reach the server: transfer, adapters, engines."""

from __future__ import annotations

from agrpo.serve.check.ask import CALL, LOAD_ADAPTER, UPDATE
from agrpo.serve.check.look import Look, Row
from agrpo.serve.flags import lora_rank, lora_slots, sends_adapters

UNKNOWN = "not reported without development mode"


def transfer(look: Look) -> Row:
    """The server can receive what `sync` sends (SRV-5, LORA-8)."""
    name, backend = "weight transfer", look.config.sync.backend
    words = look.command.words("PYTHONPATH", "--weight-transfer-config")
    path = UPDATE if backend else CALL
    if not look.offers(path):
        fix = " ".join(filter(None, [look.command.words("VLLM_SERVER_DEV_MODE"), words if backend else ""]))
        if sends_adapters(look.config):
            return look.warn(name, f"no {path}: adapters only, without a way back to merged weights", fix)
        return look.fail(name, f"no {path}", fix)
    if not backend:
        return look.ok(name, "the server reloads from a folder")
    if "weight_transfer_config" not in look.info:
        return look.ok(name, f"{path}, back end not reported")
    served = (look.info["weight_transfer_config"] or {}).get("backend")
    if served != backend:
        return look.fail(name, f"{served or 'no'} back end, needed is {backend}", words)
    return look.ok(name, served)


def adapters(look: Look) -> Row | None:
    """The server serves adapters, where they are to be sent (LORA-3)."""
    if not sends_adapters(look.config):
        return None
    if look.info and not look.info.get("lora_config"):
        return _fallback(look, "adapters", "not served", look.command.words("--enable-lora"))
    return look.ok("adapters", "served") if look.info else look.skip("adapters", UNKNOWN)


def adapter_slots(look: Look) -> Row | None:
    lora, needed = look.section("lora_config"), lora_slots(look.config)
    if not sends_adapters(look.config) or not lora:
        return None
    if lora["max_loras"] < needed:
        found = f"{lora['max_loras']}, needed are rollout.max_staleness + 2 = {needed}"
        return look.fail("adapter slots", found, f"--max-loras {needed}")  # LORA-6
    return look.ok("adapter slots", f"{lora['max_loras']}, needed are {needed}")


def adapter_rank(look: Look) -> Row | None:
    lora, rank = look.section("lora_config"), look.config.model.lora.r
    if not sends_adapters(look.config) or not lora:
        return None
    if lora["max_lora_rank"] < rank:
        found = f"at most {lora['max_lora_rank']}, below model.lora.r={rank}"
        return look.fail("adapter rank", found, f"--max-lora-rank {lora_rank(rank)}")  # LORA-5
    return look.ok("adapter rank", f"at most {lora['max_lora_rank']}, needed is {rank}")


def adapter_loading(look: Look) -> Row | None:
    """Adapters can be loaded while the server runs (LORA-7)."""
    if not sends_adapters(look.config) or (look.info and not look.info.get("lora_config")):
        return None
    if look.offers(LOAD_ADAPTER):
        return look.ok("adapter loading", LOAD_ADAPTER)
    return look.fail("adapter loading", f"no {LOAD_ADAPTER}", look.command.words("VLLM_ALLOW_RUNTIME_LORA_UPDATING"))


def parallel(look: Look) -> Row:
    """Engines behind one address, and the processes that take part in a transfer."""
    section = look.section("parallel_config")
    world, engines = look.value("/get_world_size").get("world_size"), section.get("data_parallel_size")
    if engines is None:
        return look.skip("engines", UNKNOWN)
    if engines > 1 and sends_adapters(look.config):
        return _fallback(look, "engines", f"{engines}, and adapters reach one only", "--data-parallel-size 1")
    return look.ok("engines", f"{engines}, of {world or 'unknown'} process(es) together")


def _fallback(look: Look, name: str, found: str, fix: str) -> Row:
    """A hindrance to adapters: merged weights are sent instead, unless the configuration rules that out."""
    if look.config.sync.mode == "lora":
        return look.fail(name, f"{found}, and sync.mode=lora", fix)
    return look.warn(name, f"{found}: merged weights are sent instead", fix)
