"""The design's rules of place: imports go down, stations are strangers, an option's name stays at home."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agrpo.config.choices import conf_dir

PACKAGE = Path(__file__).parents[1] / "agrpo"
FOUNDATION = {"types", "schema", "errors", "lifecycle", "config", "sections", "__init__"}
STATIONS = {
    "data", "env", "sampler", "scorer", "advantage", "packer", "loss", "sync", "model", "eval", "serve", "wire",
    "ledger", "metrics",
}  # fmt: skip
LAYERS = {
    **dict.fromkeys(FOUNDATION, 0),
    **dict.fromkeys(STATIONS, 1),
    "recipes": 0,  # a path, nothing else
    "rollout": 2,
    "train": 2,
    "launch": 3,
    "report": 3,
    "cli": 4,
    "__main__": 5,
}
FILES = sorted(
    p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts and PACKAGE / "recipes" not in p.parents
)
MAY_IMPORT_TORCH = {"model", "loss", "sync", "train", "serve"}
PROGRAMMES = {"config/reference.py": 3}  # run by itself, imported by nothing
MAX_LINES = 350
# Words of options that are ordinary words too, or names of something else of the same name, with where that is.
ORDINARY = {
    "reasoning_gym",  # the package of that name
    "none", "hub", "functions", "console", "full", "lora", "disk", "tree", "sequence", "external", "conversation",
    "grouped", "rollouts",
}  # fmt: skip
ALSO_NAMES = {
    # process-group back ends of torch.distributed, and the one default that depends on the machine (CFG-sync)
    "nccl": {"config/runner.py", "train/ranks.py", "model/shard.py"},
    "gloo": {"config/runner.py", "train/ranks.py", "model/shard.py"},
    # the server programme that the metrics and flags belong to; packages named for their installation
    "vllm": {"launch/run_folder.py"},
    # the answer to another system's option name says which option to choose
    "*": {"config/hints.py", "config/other_keys.py", "config/other_reasons.py"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(tree: ast.AST, only_at_import: bool = False) -> list[str]:
    """Modules a file imports; those under TYPE_CHECKING are left out, for they are never loaded."""
    found, queue = [], [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue += node.orelse
            continue
        if only_at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [node.module] if node.module != "agrpo" else [f"agrpo.{alias.name}" for alias in node.names]
        queue += list(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_and_stations_are_strangers(path):
    own = part_of(path)
    assert own in LAYERS, f"{own} has no layer"
    for module in imports(ast.parse(path.read_text())):
        if not module.startswith("agrpo."):
            continue
        other = module.split(".")[1]
        if other == own or other == "__version__":
            continue
        assert other in LAYERS, f"{path}: {module} has no layer"
        layer = PROGRAMMES.get(str(path.relative_to(PACKAGE)), LAYERS[own])
        lower = LAYERS[other] < layer or layer == LAYERS[other] == 0
        assert lower, f"{path.relative_to(PACKAGE)} imports {module}"


def test_only_the_stations_that_compute_import_torch():
    for path in FILES:
        names = {m.split(".")[0] for m in imports(ast.parse(path.read_text()))}
        if "torch" in names:
            assert part_of(path) in MAY_IMPORT_TORCH or path == PACKAGE / "metrics" / "sinks.py", path
        assert "vllm" not in names or part_of(path) == "sync", path


def test_only_one_folder_knows_hydra():
    for path in FILES:
        names = {m.split(".")[0] for m in imports(ast.parse(path.read_text()))}
        if {"hydra", "omegaconf"} & names:
            assert path.parent == PACKAGE / "config" and path.stem in ("runner", "overrides"), path


def test_an_options_name_appears_only_at_home():
    """In code: the option's own files, or where it names something else. Comments and docstrings are not code."""
    for group in sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and p.name != "recipe"):
        station = PACKAGE / ("serve" if group == "server" else group)
        for name in sorted(p.stem for p in (conf_dir() / group).glob("*.yaml")):
            if name in ORDINARY or group in ("optimizer", "logger", "model"):
                continue
            for path in FILES:
                relative = str(path.relative_to(PACKAGE))
                if station in path.parents or path == station.with_suffix(".py") or path.stem == name:
                    continue
                if relative in ALSO_NAMES.get(name, set()) | ALSO_NAMES["*"]:
                    continue
                for word in strings_in_code(path):
                    assert not re.fullmatch(name, word), f"{relative} knows the option {group}={name}"


@functools.cache  # each option asks for those of every file
def strings_in_code(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    ]


def test_a_plan_loads_no_torch():
    # Stations that compute keep torch in internal files; the component's own file must stay free of it.
    modules = [
        "agrpo.config",
        "agrpo.config.runner",
        "agrpo.launch",
        "agrpo.launch.supervisor",
        "agrpo.cli",
        "agrpo.eval",
    ]
    modules += [m for m in targets() if m]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_tokenizer_is_loaded_without_what_trains():
    """The rollout process imports this; PyTorch itself comes with the tokenizer's library, the rest is of no use there."""
    code = "import sys, agrpo.model.tokenizer\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def targets() -> list[str]:
    files = [p for p in conf_dir().glob("*/*.yaml") if p.parent.name != "recipe"]
    found = [re.search(r"^_target_: (\S+)\.\w+", p.read_text(), re.M) for p in files]
    return [m.group(1) for m in found if m]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_fit_on_their_pages(path):
    text, relative = path.read_text(), str(path.relative_to(PACKAGE))
    assert text.isascii() or relative == "metrics/chart.py", "code and comments are ASCII"
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
