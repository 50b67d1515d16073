"""Do the tests still catch what an earlier suite caught? Run by hand, after the tests were rewritten:

    python tests/mutations.py EARLIER_CHECKOUT --count 50 --out mutations.jsonl

A mutation is one operator changed in a line of code that stands in both checkouts exactly once. It counts if the
earlier suite catches it in the earlier code; then today's suite must catch it in today's code. Results are written line
by line, so the run can be stopped and started again, and several runs with different `--part` can share the work.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SWAPS = {
    "<": "<=", ">": ">=", "<=": "<", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "//": "*",
    "and": "or", "or": "and", "min": "max", "max": "min", "True": "False", "False": "True", "any": "all", "all": "any",
}  # fmt: skip
BROAD = ("detector", "patch", "fit", "cli", "inspect", "tune", "choosing", "runs", "folder")  # asked last
SECONDS = 400


def code_lines(root: Path) -> dict[str, list[tuple[Path, int]]]:
    """Every line of code of the package -> where it stands; text is no code."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for path in sorted((root / "src").rglob("*.py")):
        content = path.read_text(encoding="utf-8")
        text = set()
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text |= set(range(node.lineno - 1, node.end_lineno))
        for number, line in enumerate(content.splitlines()):
            if number not in text:
                found.setdefault(line.strip(), []).append((path.relative_to(root), number))
    return found


def mutants(line: str) -> list[tuple[int, int, str]]:
    """Begin, end and replacement of every operator in a line of code."""
    if line.startswith(("#", "def ", "class ", "from ", "import ", "@", '"', "raise ", "assert ", 'f"')):
        return []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return []
    swaps = []
    for before, one in itertools.pairwise(tokens):
        operand = before.type in (tokenize.NAME, tokenize.NUMBER) or before.string in (")", "]")
        if one.string in SWAPS and (one.string not in ("+", "-", "*") or operand):
            swaps.append((one.start[1], one.end[1], SWAPS[one.string]))
    return [] if re.search(r"Annotated|help=|->", line) else swaps


def candidates(old: Path, new: Path, seed: int) -> list[tuple[str, tuple[int, int, str]]]:
    before, now = code_lines(old), code_lines(new)
    shared = sorted(
        line for line in before if len(before[line]) == 1 and len(now.get(line, ())) == 1 and len(line) > 20
    )
    found = [(line, swap) for line in shared for swap in mutants(line)]
    random.Random(seed).shuffle(found)
    once = Counter()
    return [one for one in found if not (once[one[0]] or once.update([one[0]]))]  # one mutation to a line


def related(root: Path, module: Path) -> list[str]:
    """Test files that name the module, then the broad ones."""
    dotted = ".".join(module.with_suffix("").parts[1:]).removesuffix(".__init__")
    sibling = rf"from {re.escape(dotted.rpartition('.')[0])} import [^\n]*\b{module.stem}\b"
    name = re.compile(rf"\b{re.escape(dotted)}\b|{sibling}")
    files = sorted((root / "tests").glob("test_*.py"))
    near = [file for file in files if name.search(file.read_text(encoding="utf-8"))]
    broad = [file for file in files if any(word in file.stem for word in BROAD) and file not in near]
    return [str(file.relative_to(root)) for file in (*near, *broad)]


def caught(root: Path, line: str, swap: tuple[int, int, str]) -> bool | None:
    """Whether the tests of a checkout fail with the mutation; None if they took too long to say."""
    (module, number), begin, end, text = code_lines(root)[line][0], *swap
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "docs", "examples", "pyproject.toml", "README.md"):
            source = root / part
            if source.exists():
                (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        lines = (copy / module).read_text(encoding="utf-8").split("\n")
        indent = len(lines[number]) - len(lines[number].lstrip())
        lines[number] = lines[number][: indent + begin] + text + lines[number][indent + end :]
        (copy / module).write_text("\n".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *related(root, module)]
        env = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    parser.add_argument("--part", default="0/1", help="every n-th candidate, as in 0/2 and 1/2")
    given = parser.parse_args()
    which, parts = map(int, given.part.split("/"))
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(one["line"], tuple(one["swap"])) for one in known}
    for line, swap in candidates(given.earlier, HERE, given.seed)[which::parts]:
        counted = [one for one in known if one["earlier"]]
        if len(counted) >= given.count:
            break
        if (line, swap) in done:
            continue
        earlier = caught(given.earlier, line, swap)
        result = {"line": line, "swap": swap, "earlier": earlier, "now": caught(HERE, line, swap) if earlier else None}
        known.append(result)
        with given.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    counted = [one for one in known if one["earlier"]]
    missed = [one for one in counted if not one["now"]]
    print(f"{len(counted)} mutations caught before, {len(counted) - len(missed)} of them now")
    for one in missed:
        print(f"not caught: {one['line']}  {one['swap']}")


if __name__ == "__main__":
    main()
