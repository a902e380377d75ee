"""`python -m agrpo.rollout RUN_DIR`: open every part, run the loop, close every part."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Any

from agrpo.lifecycle import Life, run_process, without_collector

_log = logging.getLogger("agrpo.rollout")
LOADING = "loading data and tokenizer"  # the supervisor allows more time for it than for anything else
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_FR_DUMP_TEMP_FILE",
)


def leave_the_training_world() -> None:
    """No GPU and no distributed job is visible here, before any user code is imported (ARCH-4, REW-12)."""
    for name in list(os.environ):
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""


def main(run_dir: Path, life: Life) -> None:
    leave_the_training_world()
    from agrpo.config import load

    config = load(run_dir)
    logging.basicConfig(level=config.logger.level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(run(config, run_dir, life))


async def run(config: Any, run_dir: Path, life: Life) -> None:
    """One run from the connection to the trainer to its `Finish`."""
    from agrpo import wire
    from agrpo.env.resolve import open_player
    from agrpo.lifecycle import Runtime, told_wire_port
    from agrpo.metrics.window import Window
    from agrpo.rollout.custom import open_custom
    from agrpo.rollout.loop import Policy

    runtime = Runtime.load(run_dir)
    async with contextlib.AsyncExitStack() as stack:
        life.beat(LOADING)
        # Opening may take long; in a thread the event loop stays free for signals and time limits.
        rows, tokenizer, eos_ids = await asyncio.to_thread(_open_inputs, config)
        life.beat("starting the scorer")
        scorer = await config.scorer.open(config.data.columns() if hasattr(config.data, "columns") else None)
        stack.push_async_callback(scorer.close)
        life.beat("connecting to the trainer")
        link = await wire.connect(runtime.wire_host, lambda: runtime.wire_port or told_wire_port(run_dir), runtime.wire_key)
        stack.push_async_callback(link.close)
        policy, window = Policy(link.start.version), Window()
        life.beat("connecting to the server")
        client = await config.sampler.connect(
            urls=runtime.server_urls,
            model_name=config.server.model_name,
            run_seed=config.run.seed,
            version=lambda: policy.version,
            timeout_s=config.server.timeout,
            max_connections=config.rollout.max_concurrent_rollouts,
            centering=config.loss.wants_head,
            metrics=window,
            # The trainer listens only once its first weights have arrived; adapters leave the server's own as they were.
            is_synced=not link.start.adapters,
            salts_cache=getattr(config.sync, "cache", None) == "salt",
        )
        stack.push_async_callback(client.close)
        player = open_player(config, tokenizer, client.max_model_len, eos_ids, lambda: policy.version)
        await start_player(player, stack)
        if hasattr(player, "check_rows"):
            await asyncio.to_thread(player.check_rows, rows)
        custom = open_custom(config, tokenizer, lambda: policy.version)
        if custom is not None:
            stack.push_async_callback(custom.close)
            life.beat("waiting for setup of rollout.loop")
            await custom.setup(link.start.loop_state)
            player = custom.player(player)
        completions, dump = await _open_logs(config, run_dir, link, tokenizer, stack)
        judge = _judge(config, scorer, window, completions, dump, custom, player)
        life.beat(LOADING)  # of evaluations, which may take as long as those of the run
        evaluations = await open_evaluations(config, stack)
        loop = await build_loop(config, rows, player, client, judge, link, policy, window, life, custom, evaluations)
        await loop.run()


async def _open_logs(config: Any, run_dir: Path, link: Any, tokenizer: Any, stack: contextlib.AsyncExitStack) -> tuple[Any, Any]:
    """What is written of completions and of whole rollouts; None where nothing is."""
    from agrpo.rollout.completions import CompletionLog, surviving

    completions = None
    if config.logger.log_completions:
        completions = CompletionLog(run_dir / "completions.jsonl", surviving(link.start))
        stack.callback(completions.close)
    dump = await asyncio.to_thread(_open_dump, config, tokenizer)
    if dump is not None:
        stack.callback(dump.close)
    return completions, dump


async def start_player(player: Any, stack: contextlib.AsyncExitStack) -> None:
    """`start` before the first prompt and `close` at the end, also after a failed start, where the player has them."""
    if hasattr(player, "close"):
        stack.push_async_callback(player.close)
    if hasattr(player, "start"):
        await player.start()


def _open_inputs(config: Any) -> tuple[Any, Any, frozenset[int]]:
    from agrpo.data.rows import gives_prompts

    with without_collector():
        from agrpo.model.tokenizer import load_tokenizer

        return (
            config.data.open(needs_prompt=not gives_prompts(config)),
            load_tokenizer(config.model),
            _eos_ids(config.model),
        )


def _open_dump(config: Any, tokenizer: Any) -> Any:
    """The trajectory dump with the tokenizer that decodes it; None where it is off."""
    from agrpo.model.tokenizer import load_tokenizer
    from agrpo.rollout.dump import Dump

    settings = config.rollout
    if not settings.dump_to_file:
        return None
    if settings.tokenizer_path is not None:
        tokenizer = load_tokenizer(dataclasses.replace(config.model, tokenizer_path=settings.tokenizer_path))
    folder = Path(settings.fileroot).expanduser() / settings.experiment_name / settings.trial_name
    return Dump(folder, tokenizer, settings.dump_keep_versions)


def _eos_ids(model: Any) -> frozenset[int]:
    """All EOS ids of the model's generation config; none where it has no such file (GEN-10)."""
    import transformers

    try:
        eos = transformers.GenerationConfig.from_pretrained(model.path).eos_token_id
    except (OSError, ValueError):
        return frozenset()
    return frozenset() if eos is None else frozenset(int(i) for i in (eos if isinstance(eos, list) else [eos]))


async def build_loop(
    config: Any,
    rows: Any,
    player: Any,
    client: Any,
    judge: Any,
    link: Any,
    policy: Any,
    window: Any,
    life: Any,
    custom: Any,
    evaluations: dict[str, Any],
) -> Any:
    """The producing loop with every part it works with."""
    from agrpo.data.prompts import prompts_of, seed_of
    from agrpo.rollout.concurrency import Cap, Places
    from agrpo.rollout.loop import Loop
    from agrpo.rollout.server_watch import ServerWatch

    settings = config.rollout
    load = await client.poll_load()
    cap = Cap.first(
        load.kv_cache_tokens if load is not None else None,
        client.max_model_len,
        settings.max_concurrent_rollouts,
        settings.concurrency.raise_only_when_reached,
        link.start.concurrency_cap,
    )
    text = "%s at %s: context %d tokens, at most %d rollouts at first"
    prompts = prompts_of(rows, config.data.shuffle, seed_of(config.data, config.run.seed))
    _log.info(text, client.model_name, ", ".join(client.urls), client.max_model_len, cap.value)
    places = Places(cap)
    return Loop(
        settings=settings,
        prompts=prompts,
        player=player,
        client=client,
        judge=judge,
        slots=_slots(config, player, client, places, link, policy),
        places=places,
        watch=ServerWatch(client, cap, places, settings.concurrency.poll_interval, window),
        link=link,
        policy=policy,
        evaluations=evaluations,
        window=window,
        life=life,
        custom=custom,
    )


def _slots(config: Any, player: Any, client: Any, places: Any, link: Any, policy: Any) -> Any:
    """Who plays rollouts, and which of them are given up."""
    from agrpo.rollout.failures import Failures
    from agrpo.rollout.play import Slots
    from agrpo.rollout.staleness import VersionWindow

    settings = config.rollout
    return Slots(
        player,
        client,
        places,
        Failures(settings.max_failure_frac, settings.failure_window),
        settings.on_error == "abort",
        VersionWindow(lambda: policy.version, settings.max_staleness),
        settings.staleness_stamp == "group",
        **_pin(config, link, policy),
    )


def _pin(config: Any, link: Any, policy: Any) -> dict[str, Any]:
    """Where versions are adapters, each rollout keeps the one it began with."""
    from agrpo.rollout.adapters import Adapters

    if not link.start.adapters:
        return {}
    adapters = Adapters(
        link.start.adapters, lambda: policy.version, config.rollout.max_staleness, config.server.timeout
    )
    return {"pin": adapters.pinned}


def _judge(config: Any, scorer: Any, window: Any, completions: Any, dump: Any, custom: Any, player: Any) -> Any:
    from agrpo.config import locate
    from agrpo.rollout.judge import Judge

    return Judge(
        scorer,
        config.advantage,
        config.rollout,
        config.sampler.max_completion_length,
        config.scorer.queue_size,
        config.scorer.max_concurrent_groups,
        locate(config.rollout.accept_fn) if config.rollout.accept_fn else None,
        window,
        completions,
        dump,
        custom,
        getattr(player, "merged", lambda group: group),
    )


async def open_evaluations(config: Any, stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    """By name: each with its prompts, in their order, without any where an environment gives them, and its own scorer."""
    from agrpo.data.prompts import prompts_of
    from agrpo.data.rows import gives_prompts
    from agrpo.errors import ConfigError
    from agrpo.eval import NO_LENGTH
    from agrpo.rollout.evaluating import Opened

    needs, opened = not gives_prompts(config), {}
    for name, evaluation in config.eval.items():
        rows = await asyncio.to_thread(evaluation.data.open, needs_prompt=needs)
        if evaluation.max_prompts is None and not hasattr(rows, "__len__"):
            raise ConfigError(f"eval.{name}.{NO_LENGTH}")
        scorer = None
        if evaluation.scorer is not None:
            columns = evaluation.data.columns() if hasattr(evaluation.data, "columns") else None
            scorer = await evaluation.scorer.open(columns)
            stack.push_async_callback(scorer.close)
        opened[name] = Opened(evaluation, prompts_of(rows, False, 0), scorer)
    return opened


async def open_evaluating(
    config: Any, urls: tuple[str, ...], version: int, progress: Any, stack: contextlib.AsyncExitStack
) -> Any:
    """What plays the evaluations without a trainer, at the weights that the servers have."""
    from agrpo.env.resolve import open_player
    from agrpo.metrics.window import Window
    from agrpo.model.tokenizer import load_tokenizer
    from agrpo.rollout.concurrency import Cap, Places
    from agrpo.rollout.custom import open_custom
    from agrpo.rollout.evaluating import Evaluating
    from agrpo.rollout.failures import Failures
    from agrpo.rollout.play import Slots

    settings, window = config.rollout, Window()
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
    scorer = await config.scorer.open(config.data.columns() if hasattr(config.data, "columns") else None)
    stack.push_async_callback(scorer.close)
    client = await config.sampler.connect(
        urls=urls,
        model_name=config.server.model_name,
        run_seed=config.run.seed,
        version=lambda: version,
        timeout_s=config.server.timeout,
        max_connections=settings.max_concurrent_rollouts,
        centering=False,
        metrics=window,
        is_synced=False,
        salts_cache=False,
    )
    stack.push_async_callback(client.close)
    player = open_player(config, tokenizer, client.max_model_len, _eos_ids(config.model), lambda: version)
    await start_player(player, stack)
    custom = open_custom(config, tokenizer, lambda: version)
    if custom is not None:
        stack.push_async_callback(custom.close)
        await custom.setup(None)
        player = custom.player(player)
    load = await client.poll_load()
    cap = Cap.first(
        load.kv_cache_tokens if load is not None else None, client.max_model_len, settings.max_concurrent_rollouts, True
    )
    failures = Failures(settings.max_failure_frac, settings.failure_window)
    slots = Slots(player, client, Places(cap), failures, settings.on_error == "abort")
    judge = _judge(config, scorer, window, None, None, custom, player)
    return Evaluating(await open_evaluations(config, stack), slots, judge, progress)


if __name__ == "__main__":
    sys.exit(run_process("rollout", Path(sys.argv[1]), main))
