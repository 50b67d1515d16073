"""The house: data flows one way, so a module imports only from modules before it; files and functions stay small."""

import ast
import re
from pathlib import Path

import firm
from cases import each

# the package's docstring lists the stages; each may import those above it
ORDER = (*re.findall(r"^    (\w+) {2,}\w", firm.__doc__, re.M), "__main__")
ROOT = Path(firm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
VAGUE = re.compile(r"^(utils?|commons?|helpers?|base|managers?|factory|factories|misc|tools)$")
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60


def stage_of(path):
    """`data/cifar.py` belongs to `data`; the public faces `__init__` and `losses` stand outside the order."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first in ("__init__.py", "losses.py") else first.removesuffix(".py")


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


def imports_of(path):
    return imports(ast.parse(path.read_text(encoding="utf-8")))


def is_module(dotted):
    place = ROOT.joinpath(*dotted.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def imported_stage(dotted):
    """`firm.data.registry.load` is a thing of `data`; `firm.__version__` is of the package itself."""
    first = dotted.split(".")[1] if "." in dotted else ""
    return first if is_module(f"firm.{first}") else ""


def test_the_order_names_every_stage_once():
    assert sorted(ORDER) == sorted({stage_of(path) for path in FILES} - {""})


@each("path", FILES)
def test_imports_go_one_way(path):
    here = stage_of(path)
    if not here:
        return  # the package gathers its public names from everywhere
    for dotted, line, _ in imports_of(path):
        there = imported_stage(dotted)
        if there and there != here:
            before = ORDER[: ORDER.index(here)]
            assert there in before, f"{path.name}:{line} imports {dotted}, which does not stand before it"


@each("path", FILES)
def test_imports_stand_on_top(path):
    """In a function only where the command line starts faster by it, or for an optional extra."""
    if stage_of(path) in ("cli", "") or path == ROOT / "networks" / "weights.py":
        return
    late = [f"{path.name}:{line} {dotted}" for dotted, line, inside in imports_of(path) if inside]
    assert late == []


def test_no_module_imports_itself_by_way_of_others():
    names = {".".join(("firm", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
    above = {
        name: {
            dotted if dotted in names else dotted.rpartition(".")[0] for dotted, _, late in imports_of(path) if not late
        }
        for name, path in names.items()
    }
    done = set()

    def visit(name, way):
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done and name in above:
            for other in above[name] - {name}:
                visit(other, [*way, name])
        done.add(name)

    for name in names:
        visit(name, [])


@each("path", FILES)
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


@each("path", FILES)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
