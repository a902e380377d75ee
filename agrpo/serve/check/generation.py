"""Rows on generation: lengths, precision, log-probs, candidate sets, speed, load."""

from __future__ import annotations

from agrpo.serve.check.ask import TOKENS
from agrpo.serve.check.identity import lacks_candidates
from agrpo.serve.check.look import Look, Row
from agrpo.serve.flags import API_SERVERS, VLLM_MAX_LOGPROBS, trainer_dtype

UNKNOWN = "not reported without development mode"
SHORTEST_KEEP_ALIVE_S = 30  # the client keeps idle connections for 15 s


def dtype(look: Look) -> Row:
    """Both sides compute in the same precision (SRV-8)."""
    served = str(look.section("model_config").get("dtype") or "").removeprefix("torch.")
    trained = trainer_dtype(look.config.model)
    if not served or trained == "auto":
        return look.skip("dtype", UNKNOWN if not served else f"{served}; the trainer's is known when it has loaded")
    if served != trained:
        return look.warn("dtype", f"serves {served}, the trainer computes in {trained}", f"--dtype {trained}")
    return look.ok("dtype", served)


def max_model_len(look: Look) -> Row:
    """Room for a prompt and a whole completion (SRV-10, SRV-11)."""
    length, longest = look.base_model.get("max_model_len"), look.config.sampler.max_completion_length
    name, words = "max_model_len", look.command.words("--max-model-len")
    if not length:
        return look.fail(name, "/v1/models does not say max_model_len", words)
    planned = int(words.split()[-1]) if words else length
    if length <= longest:
        return look.fail(
            name, f"{length}, and sampler.max_completion_length={longest} leaves no room for a prompt", _longer(planned)
        )
    affected = look.long_prompts(length - longest)
    if affected is not None and affected.num_affected:
        found = f"{length}: {affected.num_affected} of {affected.num_looked_at} prompts leave no room for a completion of {longest}"
        fix = _longer(max(planned, affected.longest + longest))
        return (look.fail if affected.num_affected == affected.num_looked_at else look.warn)(name, found, fix)
    budget = getattr(look.config.packer, "token_budget", None)
    if budget and budget < length:
        found = f"{length}, above packer.token_budget={budget}: longer samples are dropped"
        return look.warn(name, found, f"--max-model-len {budget}")
    return look.ok(name, f"{length} for a prompt and {longest} of completion")


def _longer(tokens: int) -> str:
    return f"--max-model-len {tokens}"


def logprobs_mode(look: Look) -> Row:
    """Log-probs of the distribution that was sampled from (SRV-6)."""
    mode, fix = look.section("model_config").get("logprobs_mode"), "--logprobs-mode processed_logprobs"
    if mode is None:
        return look.warn("log-probs mode", "not reported; it must be processed_logprobs", fix)
    if mode != "processed_logprobs":
        return look.fail("log-probs mode", f"{mode}, needed is processed_logprobs", fix)
    return look.ok("log-probs mode", mode)


def max_logprobs(look: Look) -> Row:
    """As many log-probs per token as the loss asks for, and one for the sampled token (SRV-7)."""
    wanted = look.config.sampler.num_sampler_logprobs + 1 if look.config.loss.wants_head else 0
    limit = look.section("model_config").get("max_logprobs")
    if limit is None:
        return look.skip("max_logprobs", f"{UNKNOWN}; needed are {wanted}")
    if 0 <= limit < wanted:
        found = f"{limit}, below sampler.num_sampler_logprobs + 1 = {wanted}"
        return look.fail("max_logprobs", found, f"--max-logprobs {max(wanted, VLLM_MAX_LOGPROBS)}")
    return look.ok("max_logprobs", f"{'no limit' if limit < 0 else limit}, needed are {wanted}")


def token_endpoint(look: Look) -> Row:
    """Tokens in, tokens out, with the weight version of each token (SAMP-5)."""
    if look.offers(TOKENS):
        return look.ok("token endpoint", TOKENS)
    fix = look.command.words("--enable-scale-out") or "--enable-scale-out"
    if look.config.sampler.is_truncated and not lacks_candidates(look):
        return look.fail("token endpoint", f"no {TOKENS}, which candidate sets need", fix)
    return look.warn(
        "token endpoint", f"no {TOKENS}: /v1/completions is used, which is slower and tells no version", fix
    )


def sampling_mask(look: Look) -> Row | None:
    """Candidate sets, where sampling is truncated (SAMP-5, SAMP-6)."""
    if not look.config.sampler.is_truncated or lacks_candidates(look):
        return None
    mask = look.section("model_config").get("return_sampling_mask")
    if mask:
        return look.ok("sampling mask", "candidate sets are returned")
    fix = look.command.words("VLLM_USE_V2_MODEL_RUNNER", "--return-sampling-mask")
    if mask is None:
        return look.warn("sampling mask", "not reported; top_k, top_p and min_p need candidate sets", fix)
    return look.fail("sampling mask", "off, and top_k, top_p and min_p need candidate sets", fix)


def api_servers(look: Look) -> Row:
    """HTTP front ends beside the engine (SRV-12)."""
    count, device = (
        look.section("parallel_config").get("_api_process_count"),
        look.section("device_config").get("device"),
    )
    if count is None:
        return look.skip("API servers", "not reported")
    if count == 1 and look.config.loss.wants_head and device != "cpu":
        found = f"1: with {look.config.sampler.num_sampler_logprobs} log-probs, one halves the speed; 8 cost below 3 %"
        return look.warn(
            "API servers",
            found + " (vllm serve takes the flag, the module api_server ignores it)",
            f"--api-server-count {API_SERVERS}",
        )
    return look.ok("API servers", f"{count}" + (", enough for a CPU" if device == "cpu" else ""))


def keep_alive(look: Look) -> Row | None:
    """Idle connections outlive the client's use of them."""
    seconds = look.variables.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    if seconds is None:
        return None
    if int(seconds) < SHORTEST_KEEP_ALIVE_S:
        found = f"{seconds} s: connections may end as a request is sent, which is then retried"
        return look.warn("keep-alive", found, look.command.words("VLLM_HTTP_TIMEOUT_KEEP_ALIVE"))
    return look.ok("keep-alive", f"{seconds} s")


def metrics(look: Look) -> Row:
    """The load that the concurrency cap follows (CONC-9)."""
    if look.answers["/metrics"].status == 200:
        return look.ok("metrics endpoint", "/metrics")
    limit = look.config.rollout.max_concurrent_rollouts
    return look.warn("metrics endpoint", f"none: the cap stays at rollout.max_concurrent_rollouts={limit}")


def paused(look: Look) -> Row:
    """A server that a dead trainer left paused (SRV-14)."""
    if look.value("/is_paused").get("is_paused"):
        return look.warn("paused", "yes, left so by a run that ended; the next run resumes it after its first sync")
    return look.ok("paused", "no") if look.offers("/is_paused") else look.skip("paused", UNKNOWN)
