"""The rules of the layout hold: import order, one reader of the environment, documented names exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dwdp"
ORDER = [
    "errors", "env", "config", "group", "memory", "device", "partition", "weights", "runtime", "kernels",
    "model", "executor", "disagg", "serve", "llm", "tools",
]  # fmt: skip
HEAVY = [
    "torch", "cuda", "triton", "mpi4py", "matplotlib", "mlx", "mlx_lm", "transformers", "safetensors",
    "tokenizers", "tiktoken", "zmq",
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def _folder(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Every imported module of the package with whether the import stands at module level."""
    top = {id(n) for n in ast.iter_child_nodes(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "dwdp" else [node.module]
            found += [(name, id(node) in top) for name in names]
    return found


def test_a_folder_imports_only_from_folders_above_it():
    wrong = []
    for path in FILES:
        here = _folder(path)
        if here in ("__init__", "models"):
            continue
        for name, _ in _imports(ast.parse(path.read_text())):
            parts = name.split(".")
            if parts[0] == "dwdp" and len(parts) > 1 and parts[1] in ORDER:
                if ORDER.index(parts[1]) > ORDER.index(here):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_every_folder_has_its_place_in_the_order():
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name not in ("__pycache__", "models")}
    assert folders <= set(ORDER)


def test_only_env_reads_the_environment():
    readers = [
        str(p.relative_to(SOURCE)) for p in FILES
        if re.search(r"os\.environ|os\.getenv|environb", p.read_text()) and p.name != "env.py"
    ]  # fmt: skip
    assert readers == []


def test_no_relative_imports_and_no_private_paths():
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []


def test_the_package_and_its_planning_parts_import_without_heavy_libraries():
    """A machine with none of the heavy libraries still imports configuration, partition and command line."""
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {HEAVY!r}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())
import dwdp, dwdp.env, dwdp.config.schema, dwdp.config.gate, dwdp.config.files
import dwdp.partition.experts, dwdp.model.config, dwdp.executor.request, dwdp.llm, dwdp.tools.cli
import dwdp.model.folder, dwdp.tools.plan_folder, dwdp.tools.plan
from dwdp import LLM, SamplingParams, DwdpConfig, DenseConfig
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_imports_where_gpu_and_mpi_libraries_are_missing(path):
    module = "dwdp." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    module = module.removesuffix(".__init__")
    blocked = {"cuda", "triton", "mpi4py", "matplotlib", "mlx", "mlx_lm", "transformers"}
    top = [name.split(".")[0] for name, level in _imports(ast.parse(path.read_text())) if level]
    assert not blocked & set(top), f"{module} imports {blocked & set(top)} at module level"


def test_every_name_of_the_tour_exists():
    """`docs/tour.md` names code as `path.py:function` or `path.py:Class.method`; each must exist."""
    tour = (ROOT / "docs" / "tour.md").read_text()
    names = re.findall(r"`([\w/]+)\.py:([\w.]+)`", tour)
    assert len(names) >= 10
    missing = []
    for file, dotted in names:
        target = importlib.import_module("dwdp." + file.replace("/", "."))
        for part in dotted.split("."):
            target = getattr(target, part, None)
        if target is None:
            missing.append(f"{file}.py:{dotted}")
    assert not missing


def test_the_tour_lists_every_module_once_and_nothing_else():
    tour = (ROOT / "docs" / "tour.md").read_text()
    listed = re.findall(r"^- `([\w/]+\.py)`: ", tour.partition("## Every file")[2], re.M)
    modules = [str(path.relative_to(SOURCE)) for path in FILES if path.name != "__init__.py"]
    assert sorted(listed) == sorted(modules)


def test_files_named_in_readme_and_docs_exist():
    missing = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for name in re.findall(r"`((?:src|tests|examples|docs|schemas)/[\w./-]+)`", document.read_text()):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert not missing


def test_nothing_above_16_megabytes_is_tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    large = [f for f in listed.stdout.split("\0") if f and (ROOT / f).exists() and (ROOT / f).stat().st_size > 16e6]
    assert large == []
