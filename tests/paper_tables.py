"""The tables of the paper's LaTeX file, cell by cell; run as a script, it writes `firm/research/published.json`.

    python tests/paper_tables.py PAPER.tex src/firm/research/published.json

A cell is a number, [mean, deviation], a percentage as text ("+1.4%"), or null where the paper prints a dash. Rows and
columns are named by the lines of their headers.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

NAMES = {  # label, or label and the number of the part -> the name of the table here
    "tab:ablation_objectives": "objectives",
    "tab:results_mvtec_fullwidth": "mvtec-ablation",
    "tab:main_industrial_results": "mvtec",
    "tab:main_semantic_results": "semantic",
    "tab:supcon_comparison": "supcon",
    "tab:ablation_scores": "scores",
    "tab:ablation_synthetic_outliers": "sources-rotations",
    "tab:ablation_synthetic_outliers (2)": "sources-exposure",
    "tab:distance_per_class_scores": "scores-rotations",
    "tab:distance_per_class_scores_oe": "scores-exposure",
    "tab:cipher10_per_class_classifiers": "per-class-cifar10",
    "tab:cipher100_per_class_classifiers": "per-class-cifar100",
    "tab:fmnist_per_class_classifiers": "per-class-fashion-mnist",
    "tab:catsdogs_per_class_classifiers": "per-class-cats-vs-dogs",
    "tab:results_mvtec_perclass_full": "mvtec-further",
}
SECOND = ("Score", "Category")  # headers of a second column that names rows
MACROS = [
    (r"\\multicolumn\{\d+\}\{\w+\}\{(.*)\}$", r"\1"),
    (r"\\multirow\{\d+\}\{\*\}\{(.*)\}$", r"\1"),
    (r"\\rotatebox\[[^\]]*\]\{\d+\}\{(\w*)\}", r"\1"),
    (r"\\NTXent", "NT-Xent"),
    (r"\\FIRM", "FIRM"),
    (r"\\s(con|shift|ens)\b ?", r"s_\1"),
    (r"s_\{\\textup\{proto\}\}", "s_proto"),
    (r"\\Delta *", "Δ"),
    (r"\\(?:textbf|textup|ac)\{([^{}]*)\}", r"\1"),
    (r"\\[, ]", " "),
    (r"[${}^]", ""),
    (r"  +", " "),
]
COMMENT = re.compile(r"(?<!\\)%.*")
NUMBER = r"(-?\d+(?:\.\d+)?)"

Cell = float | str | list[float] | None


def paper() -> Path | None:
    """The LaTeX file, named by FIRM_PAPER or in a folder beside the data; None where it is not."""
    beside = [Path(root).parent / "paper" / "firm-ecai2025.tex" for root in _roots()]
    named = os.environ.get("FIRM_PAPER")
    return next((file for file in ([Path(named)] if named else beside) if file.is_file()), None)


def _roots() -> list[str]:
    return [part for part in os.environ.get("FIRM_DATA", "").split(os.pathsep) if part]


def read_tables(text: str) -> dict[str, dict[str, Any]]:
    """Every table by its name here: caption, label, columns, rows and cells."""
    tables = {}
    text = "\n".join(COMMENT.sub("", line) for line in text.splitlines())
    for body in re.findall(r"\\begin\{table\*?\}(.*?)\\end\{table\*?\}", text, re.DOTALL):
        (label,) = re.findall(r"\\label\{(.*?)\}", body)
        caption = _caption(body)
        for number, grid in enumerate(re.findall(r"\\begin\{tabularx\}(.*?)\\end\{tabularx\}", body, re.DOTALL), 1):
            name = NAMES[label if number == 1 else f"{label} ({number})"]
            tables[name] = {"label": label, "caption": caption} | _grid(grid)
    return tables


def _caption(body: str) -> str:
    start = body.index(r"\caption{") + len(r"\caption{")
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(body[end], 0)
        end += 1
    text = re.sub(r" \(Table~\\ref\{.*?\}\)", "", body[start : end - 1])
    text = re.sub(r"\\(?:emph|textit|ac|text)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\\( *(.*?) *\\\)", r"\1", text.replace("~", " ").replace(r"\%", "%"))
    return re.sub(r"\s+", " ", _plain(text))


def _grid(body: str) -> dict[str, Any]:
    """Columns, rows and cells; a header spans as many columns as it says, and `a / b` is two cells."""
    body = re.sub(r"\\(?:toprule|midrule|bottomrule|cmidrule(?:\(\w+\))?\{[\d-]+\})", "", body)
    first = re.search(r"\\textbf\{(?:Loss|Method|Classes|Label|Group)\}", body)
    assert first is not None
    start = body.rindex("\n", 0, first.start())
    lines = [re.split(r"(?<!\\)&", line) for line in re.split(r"\\\\(?:\[[^\]]*\])?", body[start:]) if line.strip()]
    lines = [[cell for text in line for cell in _spanned(text.strip())] for line in lines]
    heads = next(number for number, line in enumerate(lines) if any(_is_cell(text) for text in line[1:]))
    stub = 2 if _plain(lines[0][1]) in SECOND else 1
    split = any(" / " in text for line in lines[heads:] for text in line)
    columns = [[_plain(line[column]) for line in lines[:heads]] for column in range(stub, len(lines[0]))]
    columns = [[part for part in parts if part] for parts in columns]
    if split:
        columns = [[*parts, level] for parts in columns for level in ("image", "pixel")]
    rows, cells = [], []
    for line in lines[heads:]:
        names = [_plain(text) for text in line[:stub]]
        rows.append([name for name in names if name][-1:] if split else names)  # without the group of a category
        texts = [part for text in line[stub:] for part in (text.split(" / ") if split else [text])]
        cells.append([_cell(text) for text in texts])
    return {"columns": columns, "rows": rows, "cells": cells}


def _spanned(text: str) -> list[str]:
    """A cell as often as it spans columns; of rows it is named once."""
    span = re.match(r"\\multicolumn\{(\d+)\}\{l?c?\}", text)
    if span is None:
        return [text]
    return [text] * int(span[1]) if "{c}" in span[0] else [text, *[""] * (int(span[1]) - 1)]


def _plain(text: str) -> str:
    text = text.strip()
    for pattern, by in MACROS:
        text = re.sub(pattern, by, text)
    return text.strip()


def _bare(text: str) -> str:
    """A cell without bold type."""
    return re.sub(r"^\{(.*)\}$", r"\1", re.sub(r"\\textbf\{(.*)\}", r"\1", text.strip()).strip()).strip()


def _is_cell(text: str) -> bool:
    return bool(re.match(rf"(--|{NUMBER}|\\showdiff)", _bare(text)))


def _cell(text: str) -> Cell:
    text = _bare(text)
    if text == "--":
        return None
    if found := re.fullmatch(rf"\\showdiff\{{{NUMBER}\}}", text):
        return f"{float(found[1]):+.1f}%"
    found = re.fullmatch(rf"{NUMBER}(?:\\sd\{{{NUMBER}\}})?", text)
    assert found is not None, text
    return float(found[1]) if found[2] is None else [float(found[1]), float(found[2])]


def written(tables: dict[str, dict[str, Any]]) -> str:
    """JSON with one line for each row."""
    parts = []
    for name, table in tables.items():
        head = [f"{json.dumps(key)}: {json.dumps(table[key], ensure_ascii=False)}" for key in ("label", "caption")]
        head.append(f'"columns": {json.dumps(table["columns"], ensure_ascii=False)}')
        for key in ("rows", "cells"):
            listed = ",\n   ".join(json.dumps(line, ensure_ascii=False) for line in table[key])
            head.append(f'"{key}": [\n   {listed}\n  ]')
        parts.append(f" {json.dumps(name)}: {{\n  " + ",\n  ".join(head) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    content = written(read_tables(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(content, encoding="utf-8")
