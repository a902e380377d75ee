"""What the pages tell: commands compose, examples work, keys exist, quoted messages are in the code, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from agrpo.config.hints import KEYS
from agrpo.config.runner import compose_tree
from agrpo.errors import ConfigError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("first-run", "rewards", "environments", "tuning", "troubleshooting", "multi-gpu", "from-trl", "from-areal", "from-verl")
GROUPS = ("run", "checkpoint", "model", "data", "rollout", "env", "sampler", "scorer", "advantage", "packer", "loss", "sync",
          "server", "optimizer", "logger")  # fmt: skip
# What a page mentions that stands in no composed configuration: its value is a mapping or a name.
OPEN_KEYS = {"model.lora"}


def text(page):
    return (DOCS / f"{page}.md").read_text()


def commands(page):
    """The `agrpo train` and `agrpo serve` command lines of a page's code blocks, as words."""
    blocks = re.findall(r"^```\n(.*?)^```", text(page), flags=re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"agrpo (train|serve)\b", line)]


ALL_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("page, words", ALL_COMMANDS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(ALL_COMMANDS)])
def test_every_command_composes(page, words):
    flags, overrides = [w for w in words[2:] if w.startswith("-")], [w for w in words[2:] if not w.startswith("-")]
    assert set(flags) <= {"-m", "--dry-run", "--print"}
    if "-m" in flags:  # the first job; launchers are Hydra's own and belong to packages of their own
        overrides = [w.split(",")[0] if "[" not in w else w for w in overrides if not w.startswith("hydra")]
    if "RUN" not in words:
        compose_tree(overrides)


@pytest.fixture(scope="module")
def trees():
    """Configurations that have, between them, every key."""
    chosen = (
        [], ["server=external", "data=jsonl", "loss=grpo"], ["data=none", "server=vllm"], ["data=hub", "model=lora"],
        ["loss=tis"], ["loss=decoupled"],
    )  # fmt: skip
    return [compose_tree(["+recipe=quickstart", *more]) for more in chosen]


def has(tree, key):
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


@pytest.mark.parametrize("page", PAGES)
def test_every_key_named_on_a_page_exists(page, trees):
    named = re.findall(rf"`'?((?:{'|'.join(GROUPS)})\.[a-z_0-9.]+?)(?:=[^`]*)?`", text(page))
    for key in set(named) - OPEN_KEYS - set(KEYS):  # names of other systems are answered, not accepted
        assert any(has(tree, key) for tree in trees), key


@pytest.mark.parametrize("page, other", [("from-trl", "TRL"), ("from-areal", "AReaL"), ("from-verl", "verl")])
def test_the_tables_of_keys_say_what_the_command_line_answers(page, other):
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text(page), flags=re.M)
    assert len(rows) > 30
    for name, key in rows:
        assert key.replace("`", "") == KEYS[name], name


def test_the_defaults_in_the_tables_are_those_of_the_configuration():
    needed = ["model.path=owner/model", "data=hub", "data.path=owner/data", "loss=grpo"]
    own = [compose_tree([*needed, server]) for server in ("server=external", "server=vllm")]
    words, compared = {"true": True, "false": False, "null": None}, 0
    for page in ("from-trl", "from-areal", "from-verl"):
        for key, said in re.findall(r"^\| `[\w.]+` \| `([\w.]+)`[^|]*\| ([\w.-]+)[^|]*\|$", text(page), flags=re.M):
            if not (said in words or re.fullmatch(r"[\d.]+(e-\d+)?", said)):
                continue
            value = next(tree for tree in own if has(tree, key))
            for part in key.split("."):
                value = value[part]
            assert value == (words[said] if said in words else float(said)), (page, key)
            compared += 1
    assert compared > 25


def test_no_option_name_is_in_neither_table():
    listed = {
        name
        for page in ("from-trl", "from-areal", "from-verl")
        for name, _ in re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text(page), flags=re.M)
    }
    assert set(KEYS) == listed


def test_an_old_name_is_answered_with_the_new_one():
    from agrpo.config import check, detect

    tree = compose_tree(["+recipe=quickstart", "num_generations=16"])
    with pytest.raises(ConfigError, match="rollout.group_size"):
        check(tree, detect())


def test_every_verdict_is_in_the_tuning_table():
    sources = [(ROOT / "agrpo" / "metrics" / f"rules_of_{n}.py").read_text() for n in ("flow", "signal")]
    rules = set(re.findall(r'Finding\(\s*"([a-z-]+)"', " ".join(sources)))
    assert len(rules) > 25 and rules == set(re.findall(r"^\| `([a-z-]+)` \|", text("tuning"), flags=re.M))


def test_the_messages_that_troubleshooting_quotes_are_in_the_code():
    code = " ".join(path.read_text() for path in (ROOT / "agrpo").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    quoted = re.findall(r"^\| `([a-z]+ [^`]+)` \|", text("troubleshooting"), flags=re.M)
    assert len(quoted) >= 7
    for words in quoted:
        assert words in joined, words


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", text(page)):
        assert (DOCS / target).exists(), target


def module(tmp_path, page, name):
    """A Python example of a page, imported."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", text(page), flags=re.S)
    found = dict(blocks)[f"{name}.py"]
    scope = {"__name__": name}
    exec(compile(found, f"{page}.md", "exec"), scope)
    return scope


def test_the_rewards_of_the_page_by_hand(tmp_path):
    scope = module(tmp_path, "rewards", "my_rewards")
    said = [[{"role": "assistant", "content": " 5 "}], [{"role": "assistant", "content": "6"}]]
    assert scope["exact"](completions=said, answer=["5", "5"], prompts=None) == [1.0, 0.0]
    assert scope["brief"](completion_ids=[[1] * 4, [1] * 6], limit=4) == [0.0, -0.5]


def test_the_tool_and_the_environment_of_the_page(tmp_path):
    from agrpo.env.environments import tools_of
    from agrpo.env.tools import tool_of

    tool = tool_of(module(tmp_path, "environments", "my_tools")["add"], "env.tools")
    assert tool.function(**tool.fit({"a": "2", "b": 3})) == 5
    guess = module(tmp_path, "environments", "my_env")["Guess"]
    assert list(tools_of(guess, "env.factory")) == ["guess"]
    env = guess()
    assert "between 1 and 20" in env.reset(group_seed=3, answer="unused") and env.get_reward() == 0.0
    assert {env.guess(number) for number in range(1, 21)} == {"Yes.", "Higher.", "Lower."} and env.get_reward() == 1.0
    other = guess()
    other.reset(group_seed=3)
    assert other.secret == env.secret
