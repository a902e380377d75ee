"""The file of completions: cut back to what a resume keeps, and no reason to end a run."""

import json
import resource

from agrpo.rollout.completions import CompletionLog, surviving
from agrpo.types import Group, Prompt, Rollout
from agrpo.wire import Start


def group(number: int, text: str = "5") -> Group:
    rollout = Rollout((), [{"role": "assistant", "content": text}], rewards={"right": 1.0})
    return Group(number, Prompt(0, 0, [{"role": "user", "content": "2 + 3"}], {}), (rollout,), 2)


def written(path) -> list[int]:
    return [json.loads(line)["group"] for line in path.read_text().splitlines()]


def start(step: int, resolved: list, ready: list) -> Start:
    return Start(step, 1, resolved, ready, 0, 0, 0)


def test_a_resume_keeps_the_lines_of_groups_that_are_not_generated_again(tmp_path):
    path = tmp_path / "completions.jsonl"
    for begun, played, left in (
        (start(0, [], []), range(7), [0, 1, 2, 3, 4, 5, 6]),
        (start(2, [(0, 3)], [5]), [3, 4, 6, 7], [0, 1, 2, 5, 3, 4, 6, 7]),
        (start(2, [], []), [0], [0, 1, 2, 5, 3, 4, 6, 7, 0]),  # other data: its groups have the same numbers
        (start(0, [], []), [0], [0]),  # killed before its first checkpoint
    ):
        log = CompletionLog(path, surviving(begun))
        for number in played:
            log.write(group(number), None, None)
        log.close()
        assert written(path) == left
        with path.open("a") as file:
            file.write('{"group": 1, "ver')  # by a killed process


def test_a_full_disk_costs_lines_and_one_warning(tmp_path, caplog):
    log = CompletionLog(tmp_path / "completions.jsonl")
    log.write(group(0), None, None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        for number in (1, 2):
            log.write(group(number, "x" * 2000), None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(group(3), None, None)
    log.close()
    assert written(tmp_path / "completions.jsonl") == [0, 3]
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/completions.jsonl lacks rollouts from group 1 on: [Errno 27] File too large"
    ]
