"""Rows on the server itself: does it answer, is it the right programme, model and tokenizer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from agrpo.config.model_folder import read_config
from agrpo.serve.check.ask import COMPLETIONS, INFO, Answer
from agrpo.serve.check.look import Look, Row
from agrpo.serve.flags import sends_adapters

# A text that tokenizers cut in different places.
TEXT = "What is 17 + 25?\n\tdef f(x): return x**2  # na\u00efve \u6570\u5b66 \U0001f642"
TOKENIZE, LARGEST, BEYOND = "tokenize", "largest id", "id beyond"
OLDEST, FAST = (0, 28, 0), (0, 32, 0)


def reachable(look: Look) -> Row:
    health = look.answers["/health"]
    if health.status != 200:
        found = health.error or f"GET /health answered {health.status}"
        return look.fail("reachable", found, look.command.line() if look.command.options else "")
    silent = [answer.error for answer in look.answers.values() if answer.error]
    if silent:
        return look.fail("reachable", "healthy, but " + "; ".join(silent))
    return look.ok("reachable", "healthy")


def version(look: Look) -> Row:
    text = _version(look)
    if not text:
        return look.skip("version", "not reported")
    if look.config.sampler.is_truncated and lacks_candidates(look):
        found = f"{text}: no candidate sets before 0.28, so top_k, top_p and min_p bias the ratios"
        return look.warn("version", found, "pip install -U vllm")
    if _is_before(text, FAST) and look.config.loss.wants_head:
        found = (
            f"{text}: before 0.32, {look.config.sampler.num_sampler_logprobs} log-probs cost 20 to 40 % of the speed"
        )
        return look.warn("version", found, "pip install -U vllm")
    return look.ok("version", text)


def lacks_candidates(look: Look) -> bool:
    """Whether the server is a vLLM from before candidate sets (SAMP-6)."""
    return _is_before(_version(look), OLDEST)


def _version(look: Look) -> str:
    return str(look.value("/version").get("version") or look.value(INFO).get("version") or "")


def _is_before(version: str, limit: tuple[int, int, int]) -> bool:
    """Whether a released version is an older one; of a name without numbers nothing is known."""
    return version[:1].isdigit() and tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < limit


def development_mode(look: Look) -> Row:
    """Pause, weight updates and the server's own facts exist in this mode only (SRV-5)."""
    paths = {"/is_paused": "/is_paused", "/server_info": INFO}
    missing = [name for name, path in paths.items() if not look.offers(path)]
    if not missing:
        return look.ok("development mode", "on")
    if any(look.answers[path].error for path in paths.values() if path in look.answers):
        return look.skip("development mode", f"{' and '.join(missing)} gave no answer in time")
    fix = look.command.words("VLLM_SERVER_DEV_MODE")
    if sends_adapters(look.config):  # LORA-8
        return look.warn("development mode", f"off: {' and '.join(missing)} missing, so only adapters can be sent", fix)
    return look.fail("development mode", f"off: {' and '.join(missing)} missing, so no weight can be sent", fix)


def model(look: Look) -> Row:
    """The model served is the one trained (SRV-9)."""
    config, base = look.config, look.base_model
    wanted, path = config.server.model_name, config.model.path
    fix = f"--model {shlex.quote(look.config.model.path)}"
    if not base:
        return look.fail("model", "/v1/models lists no model", fix)
    id_, root = str(base.get("id")), str(base.get("root") or base.get("id"))
    if getattr(config.server, "managed", True):
        wanted = wanted or path
    if wanted is not None and id_ != wanted and not _is_same(root, wanted):
        return look.fail(
            "model", f"serves {id_}, not server.model_name={wanted}", f"--served-model-name {shlex.quote(wanted)}"
        )
    if wanted is None and id_ != path and not _is_same(root, path):
        found = f"serves {id_}, trained is {path}; if they are the same, set server.model_name={id_}"
        return look.fail("model", found, fix)
    theirs, ours = read_config(root) if Path(root).is_dir() else None, read_config(path)
    different = _different(theirs, ours)
    if different:
        return look.fail("model", f"{root} has another {different} than {path}", fix)
    return look.ok("model", id_)


def _is_same(root: str, path: str) -> bool:
    return root == path or (
        Path(path).is_dir() and Path(root).expanduser().resolve() == Path(path).expanduser().resolve()
    )


def _different(theirs: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    """The first shape in which two model folders differ, in words."""
    if theirs is None or ours is None:
        return ""
    theirs, ours = theirs.get("text_config") or theirs, ours.get("text_config") or ours
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return next(
        (f"{key} ({theirs.get(key)} and {ours.get(key)})" for key in keys if theirs.get(key) != ours.get(key)), ""
    )


def tokenizer_questions(tokens: Any) -> dict[str, tuple[str, Any]]:
    """A text for the server's tokenizer to cut."""
    return {} if tokens is None else {TOKENIZE: ("/tokenize", {"prompt": TEXT, "add_special_tokens": False})}


def vocabulary_questions(look: Look, tokens: Any) -> dict[str, tuple[str, Any]]:
    """A completion after the largest id, and one after an id that must not exist; none where they could not be answered.

    /detokenize would not do: it decodes ids beyond the vocabulary without complaint.
    """
    if look.value(TOKENIZE).get("tokens") is None or look.value("/is_paused").get("is_paused"):
        return {}
    largest, model = largest_id(tokens, look.config), look.base_model.get("id")
    # Versions before 0.32 accept one id too many.
    asked = {LARGEST: largest, BEYOND: largest + 2}
    return {name: (COMPLETIONS, {"model": model, "prompt": [id_], "max_tokens": 1}) for name, id_ in asked.items()}


def tokenizer(look: Look, tokens: Any) -> Row:
    """Tokenizer and size of the vocabulary agree (SRV-9)."""
    if tokens is None:
        return look.skip("tokenizer", "this machine has no tokenizer.json of the model to compare with")
    path = look.config.model.tokenizer_path or look.config.model.path
    fix = f"--tokenizer {shlex.quote(path)}"
    reported = look.section("model_config").get("vocab_size")
    if reported is not None and read_config(look.config.model.path) and reported != _vocab_size(look.config):
        return look.fail("tokenizer", f"vocabulary of {reported} tokens, trained with {_vocab_size(look.config)}", fix)
    theirs = look.value(TOKENIZE).get("tokens")
    if theirs is None:
        known = f"vocabulary of {reported} tokens; " if reported is not None else ""
        return look.skip("tokenizer", f"{known}the server does not say how it cuts a text")
    # The file alone knows less than the loaded tokenizer; only a difference is worth loading it.
    if theirs != tokens.encode(TEXT, add_special_tokens=False).ids and theirs != _loaded_ids(look.config):
        return look.fail("tokenizer", f"cuts a text into other tokens than {path}", fix)
    size, largest, beyond = largest_id(tokens, look.config) + 1, look.answers.get(LARGEST), look.answers.get(BEYOND)
    if largest and _is_unknown(largest):
        return look.fail("tokenizer", f"has fewer than the {size} tokens of {path}", fix)
    if beyond and beyond.status == 200:
        return look.fail("tokenizer", f"has more than the {size} tokens of {path}", fix)
    # A busy server may not have answered in time: then the size is not known.
    is_same = largest and largest.status == 200 and beyond and _is_unknown(beyond)
    return look.ok("tokenizer", "same tokens for a text" + (f", same vocabulary of {size}" if is_same else ""))


def _is_unknown(answer: Answer) -> bool:
    return answer.status == 400 and b"vocabulary" in answer.body


def load_tokens(config: Any) -> Any:
    """The tokenizer file of the model (quick to read, no torch); None where this machine has none."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    path = config.model.tokenizer_path or config.model.path
    file = Path(path).expanduser() / "tokenizer.json"
    if not Path(path).expanduser().is_dir():
        cached = try_to_load_from_cache(path, "tokenizer.json") if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def largest_id(tokens: Any, config: Any) -> int:
    return max(max(tokens.get_vocab(with_added_tokens=True).values()), (_vocab_size(config) or 0) - 1)


def _vocab_size(config: Any) -> int | None:
    found = read_config(config.model.path) or {}
    return (found.get("text_config") or found).get("vocab_size")


def _loaded_ids(config: Any) -> list[int]:
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.path
    loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    return loaded(TEXT, add_special_tokens=False)["input_ids"]
