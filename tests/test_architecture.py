"""The house: data flows one way, so a module imports only from modules before it; files and functions stay small."""

import ast
import re
from pathlib import Path

import pytest

import firm

# a file is a stage, a folder a family of siblings; each may import what stands before it
ORDER = (
    "errors",
    "allocator",
    "types",
    "streams",
    "storage",
    "store",
    "pixels",
    "images",
    "colour",
    "data",
    "foreground",
    "ignoring",
    "conditioning",
    "sisters",
    "outliers",
    "views",
    "replay",
    "batching",
    "tiling",
    "plain",
    "encoder",
    "backbones",
    "adaptor",
    "objective",
    "training",
    "cells",
    "memory",
    "scores",
    "coreset",
    "search",
    "bank",
    "prototype",
    "localiser",
    "recipes",
    "holdout",
    "fitting",
    "embedding",
    "runs",
    "calibration",
    "calibration_file",
    "promises",
    "drift",
    "watching",
    "verdicts",
    "leaks",
    "examples",
    "model_folder",
    "restoring",
    "metrics",
    "localisation",
    "trial",
    "choosing",
    "preferring",
    "doubting",
    "foretelling",
    "timing",
    "detector",
    "explaining",
    "gate",
    "progressing",
    "evaluate",
    "proving",
    "peak",
    "bench",
    "bench_patches",
    "bench_promises",
    "report",
    "cli",
    "__main__",
)
ROOT = Path(firm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
VAGUE = re.compile(r"^(utils?|commons?|helpers?|base|managers?|factory|factories|misc|tools)$")
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60


def stage_of(path):
    """`data/cifar.py` belongs to `data`; the package's own `__init__` stands outside the order."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(tree):
    """Every (dotted module, line, inside a function) of the package that is imported, wherever it stands."""
    late = {
        inner
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the module's full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "firm":
                yield name, node.lineno, node in late


def is_module(dotted):
    place = ROOT.joinpath(*dotted.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def imported_stage(dotted):
    """`firm.data.load` is a thing of `data`; `firm.__version__` is of the package itself."""
    first = dotted.split(".")[1] if "." in dotted else ""
    return first if is_module(f"firm.{first}") else ""


def test_the_order_names_every_stage_once():
    assert sorted(ORDER) == sorted({stage_of(path) for path in FILES} - {""})


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_one_way(path):
    here = stage_of(path)
    if not here:
        return  # the package gathers its public names from everywhere
    for dotted, line, _ in imports(ast.parse(path.read_text())):
        there = imported_stage(dotted)
        if there and there != here:
            before = ORDER[: ORDER.index(here)]
            assert there in before, f"{path.name}:{line} imports {dotted}, which does not stand before it"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_members_of_a_family_do_not_import_the_family_while_it_is_made(path):
    """`from firm.data import load` inside `firm/data/` would meet a half-made package; in a function it would not."""
    here = stage_of(path)
    if path.parent == ROOT or path.name == "__init__.py":
        return
    for dotted, line, late in imports(ast.parse(path.read_text())):
        own = dotted == f"firm.{here}" or (dotted.count(".") == 2 and dotted.startswith(f"firm.{here}."))
        assert late or not own or is_module(dotted), f"{path.name}:{line} imports {dotted} from its own family"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_fit_on_a_few_screens(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LINES_OF_A_FUNCTION, f"{path.name}:{node.lineno} {node.name} has {length} lines"


def test_names_say_what_a_module_is():
    parts = {part.removesuffix(".py") for path in FILES for part in path.relative_to(ROOT).parts}
    assert [part for part in sorted(parts) if VAGUE.match(part)] == []
    assert max(len(path.relative_to(ROOT).parts) for path in FILES) <= 2


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
