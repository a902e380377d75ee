"""The running scorer: results, faults, time limits, and processes that end when they should."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from agrpo.errors import ContractError
from agrpo.scorer import guard
from agrpo.scorer.contract import ScoreError
from agrpo.scorer.functions import Functions
from agrpo.types import Group, Prompt, Rollout, Turn

S = "reward_samples."
FAST = {"timeout": 20.0}


def make_turn(ids):
    n, none = len(ids), np.zeros((len(ids), 0), np.int32)
    return Turn(
        np.zeros(2, np.int32), np.array(ids, np.int32), np.zeros(n, np.float32), np.ones(n, bool), np.zeros(n, np.int32),
        none, none.astype(np.float32), None, "stop",
    )  # fmt: skip


def make_group(texts=("five", "5", "5!"), group_id=0, ids=((1, 2), (3,)), unusable=(), rewards=None, **columns):
    rollouts = tuple(
        Rollout(
            tuple(make_turn(turn) for turn in ids),
            [{"role": "assistant", "content": text}],
            rewards=dict(rewards or {}),
            failure="server_error" if slot in unusable else None,
        )
        for slot, text in enumerate(texts)
    )
    return Group(group_id, Prompt(0, 0, [{"role": "user", "content": "2 + 3?"}], columns), rollouts, 0)


def run(functions, work, columns=None, **settings):
    """Open the scorer, run `work(live)`, close it; nothing it started may be left."""

    async def body():
        live = await Functions(functions=functions, **{**FAST, **settings}).open(columns)
        try:
            return await work(live), live
        finally:
            await live.close()

    return asyncio.run(body())[0]


def score(functions, group, **settings):
    return run(functions, lambda live: live.score(group), **settings)


def rewards_of(group):
    return [r.rewards for r in group.rollouts]


def gone(pid, within_s=5.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_sources_are_summed_and_unusable_rollouts_left_alone(executor):
    entries = [S + "token_count", S + "async_one", {"_target_": S + "returns", "values": [0.25, None]}]
    group = make_group(unusable=[1], rewards={"Env": 2.0})
    scored = score(entries, group, executor=executor)
    assert rewards_of(scored) == [
        {"Env": 2.0, "token_count": 3.0, "async_one": 1.0, "returns": 0.25},
        {"Env": 2.0},
        {"Env": 2.0, "token_count": 3.0, "async_one": 1.0, "returns": None},
    ]
    assert [r.reward for r in scored.usable] == [6.25, 6.0]


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_functions_get_every_column_but_the_standard_names(executor):
    group = make_group(answer="5", environment="calm", completion="ignored", completion_ids="ignored")
    assert [r.reward for r in score([S + "echo_check"], group, executor=executor).rollouts] == [1.0, 1.0, 1.0]


def test_all_none_is_unscorable():
    scored = score([{"_target_": S + "returns", "values": [None, None, 1]}], make_group())
    assert [np.isnan(r.reward) for r in scored.rollouts] == [True, True, False]


def test_multi_task_rollouts_get_the_reward_of_their_own_task():
    entries = [S + "math_only", S + "code_only"]

    async def both(live):
        return [await live.score(make_group(["5", "x", "def"], task=task)) for task in ("math", "code")]

    math_group, code_group = run(entries, both)
    assert rewards_of(math_group) == [{"math_only": v, "code_only": None} for v in (1.0, -1.0, -1.0)]
    assert rewards_of(code_group) == [{"math_only": None, "code_only": v} for v in (-1.0, -1.0, 1.0)]
    assert [r.reward for r in code_group.rollouts] == [-1.0, -1.0, 1.0]


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([True, 1, 1], "returned True (bool) for completion 0"),
        ([1, "nan", 1], "returned nan for completion 1"),
        ([1, 1, "inf"], "returned inf for completion 2"),
        ([1, 1, "text"], "returned 'text' (str)"),
        ([1, 1, "decimal"], "(Decimal)"),
        ([1, "numpy_bool", 1], "for completion 1"),
        ([1, 1], "must return 3 values, one per completion, got 2"),
        ("not a list", "must return a list of 3 numbers or None, got float32"),
        ("array", "must return a list of 3 numbers or None, got ndarray"),
    ],
)
def test_broken_contract_names_the_function(executor, values, text):
    with pytest.raises(ContractError) as caught:
        score([{"_target_": S + "returns", "values": values}], make_group(), executor=executor)
    assert text in str(caught.value) and "reward function returns " in str(caught.value)


def test_integers_and_numpy_numbers_become_floats():
    scored = score([S + "integers", {"_target_": S + "returns", "values": ["numpy", 3, None]}], make_group())
    assert rewards_of(scored)[0] == {"integers": 4.0, "returns": 0.5}
    assert {type(v) for r in rewards_of(scored) for v in r.values()} == {float, type(None)}


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize(("name", "text"), [("raises", "ZeroDivisionError: no such luck"), ("exits", "SystemExit: 3")])
def test_a_raising_function_drops_the_group_and_the_scorer_goes_on(executor, name, text):
    async def twice(live):
        for _ in range(2):
            with pytest.raises(ScoreError, match=text) as caught:
                await live.score(make_group())
            assert caught.value.reason == "raised"

    run([S + "token_count", S + name], twice, executor=executor)


def test_on_error_abort_ends_the_run():
    with pytest.raises(ContractError, match="scorer.on_error=abort"):
        score([S + "raises"], make_group(), on_error="abort")


def test_functions_of_a_group_run_at_the_same_time():
    async def timed(live):
        started = time.monotonic()
        scored = await live.score(make_group())
        return time.monotonic() - started, scored

    seconds, scored = run([S + "slow_a", S + "slow_b", S + "slow_async"], timed)
    assert seconds < 1.5
    assert scored.rollouts[0].reward == 7.0


def test_a_slow_group_does_not_stop_the_others():
    async def timed(live):
        slow = asyncio.ensure_future(live.score(make_group(delay_s=2.5)))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await asyncio.gather(*(live.score(make_group(group_id=i, delay_s=0.0)) for i in range(20)))
        seconds = time.monotonic() - started
        assert not slow.done()
        await slow
        return seconds

    assert run([S + "slow_if_asked"], timed) < 1.0


def test_one_group_at_a_time_when_asked():
    async def timed(live):
        started = time.monotonic()
        await asyncio.gather(*(live.score(make_group(group_id=i, delay_s=0.2)) for i in range(5)))
        return time.monotonic() - started

    assert run([S + "slow_if_asked"], timed, max_concurrent_groups=1) >= 1.0


def test_a_hung_function_is_killed_with_its_children_and_replaced(tmp_path):
    pid_file = tmp_path / "pids"

    async def work(live):
        started = time.monotonic()
        with pytest.raises(ScoreError, match=r"hangs exceeded scorer.timeout=1 s") as caught:
            await live.score(make_group())
        assert caught.value.reason == "timeout" and time.monotonic() - started < 3.0
        worker, child = map(int, pid_file.read_text().split())
        assert await asyncio.to_thread(gone, worker) and await asyncio.to_thread(gone, child)
        assert worker not in live.worker_pids and live.worker_pids
        return live.worker_pids

    pids = run([{"_target_": S + "hangs", "pid_file": str(pid_file)}], work, timeout=1.0)
    assert all(gone(pid) for pid in pids)


def test_time_limit_of_threads_and_coroutines():
    for settings in ({"functions": [S + "slow_async"]}, {"functions": [S + "slow_a"], "executor": "thread"}):
        with pytest.raises(ScoreError, match="exceeded scorer.timeout=0.2 s"):
            score(group=make_group(), timeout=0.2, **settings)


def test_a_worker_that_dies_is_replaced():
    async def work(live):
        with pytest.raises(ScoreError, match="killed by signal SIGKILL") as caught:
            await live.score(make_group(mood="bad"))
        assert caught.value.reason == "died"
        for pid in live.worker_pids:
            os.kill(pid, signal.SIGKILL)
        outcomes = []
        for i in range(10):  # idle workers killed from outside are found out by the calls that meet them
            try:
                outcomes.append((await live.score(make_group(group_id=i, mood="good"))).rollouts[0].reward)
            except ScoreError as error:
                outcomes.append(error.reason)
        return outcomes

    outcomes = run([S + "kills_itself"], work)
    assert set(outcomes) <= {"died", 1.0} and outcomes[-1] == 1.0


def test_a_function_may_start_processes_and_sees_no_device():
    scored = score([S + "uses_processes", S + "environment_facts"], make_group())
    assert rewards_of(scored) == [{"uses_processes": v, "environment_facts": 1.0} for v in (0.0, 1.0, 4.0)]


def test_cancelling_a_score_kills_its_worker(tmp_path):
    pid_file = tmp_path / "pids"

    async def work(live):
        task = asyncio.ensure_future(live.score(make_group()))
        while not pid_file.exists() or len(pid_file.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [int(pid) for pid in pid_file.read_text().split()]

    pids = run([{"_target_": S + "hangs", "pid_file": str(pid_file)}], work)
    assert all(gone(pid) for pid in pids)


OWNER = """
import asyncio, sys
sys.path[:0] = {paths!r}
from test_scorer_live import make_group
from agrpo.scorer.functions import Functions

async def main():
    live = await Functions(functions=[{{"_target_": "reward_samples.hangs", "pid_file": {pid_file!r}}}]).open()
    print(*live.worker_pids, flush=True)
    await live.score(make_group())

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_owner(tmp_path):
    pid_file = tmp_path / "pids"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(paths=paths, pid_file=str(pid_file))], stdout=subprocess.PIPE, text=True
    )
    workers = [int(pid) for pid in owner.stdout.readline().split()]
    while not pid_file.exists() or len(pid_file.read_text().split()) < 2:
        time.sleep(0.02)
    guards = [p.pid for p in psutil.Process(owner.pid).children() if any("guard" in part for part in p.cmdline())]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    pids = [*workers, *guards, *map(int, pid_file.read_text().split())]
    assert len(guards) == 1 and all(gone(pid) for pid in pids)


def test_time_per_function_is_known():
    async def work(live):
        for i in range(3):
            await live.score(make_group(group_id=i, delay_s=0.1))
        return live.function_calls, live.function_seconds, live.take_measured(), live.take_measured()

    calls, seconds, measured, later = run([S + "slow_if_asked", S + "async_one"], work)
    assert calls == {"slow_if_asked": 3, "async_one": 3}
    assert 0.3 <= seconds["slow_if_asked"] < 1.0 and seconds["async_one"] >= 0.03
    assert sorted({name for name, _, _ in measured}) == ["rewards/async_one/call_s", "rewards/slow_if_asked/call_s"]
    assert sum(s for name, s, _ in measured if "slow" in name) == pytest.approx(seconds["slow_if_asked"]) and not later


def test_the_guard_outlives_a_signal_to_every_process_and_then_does_its_work():
    work = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    watch = subprocess.Popen([sys.executable, guard.__file__], stdin=subprocess.PIPE, text=True)
    numbers, deadline = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), time.monotonic() + 20

    def ignored(number):
        mask = next(line for line in Path(f"/proc/{watch.pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
        return int(mask.split()[1], 16) >> (number - 1) & 1

    try:
        while not all(map(ignored, numbers)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in numbers:
            watch.send_signal(number)
        watch.communicate(f"+{work.pid}\n", timeout=20)
        assert watch.returncode == 0 and work.wait(20) == -signal.SIGKILL
    finally:
        watch.kill()
        work.kill()
