"""A page as headings, paragraphs, grids and pictures, and what it is written as: Markdown, LaTeX, CSV or HTML."""

import base64
import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "td,th{padding:.2em .6em;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)
MARK = " †"  # of what other code made
NUMBERS = re.compile(r"([+-]?[\d.]+)(?: ± ([\d.]+))?(?: \[([+-]?[\d.]+), ([+-]?[\d.]+)\])?")
EMPHASIS = r"(?<!\w)\*([^*\s][^*]*)\*"  # and not the star of s_con*
TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "†": r"\dag{}", "Δ": r"$\Delta$",
    "×": r"$\times$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawing:
    """A picture in a file."""

    title: str
    file: Path


Block = str | Grid | Drawing  # a text is a paragraph, a list ("- ") or a heading ("# ", "## ", "### ")


def markdown(blocks: Sequence[Block]) -> str:
    """Pictures are linked by name, so they lie beside the page."""

    def text(block: Block) -> str:
        if isinstance(block, Drawing):
            return f"![{block.title}]({block.file.name})"
        if isinstance(block, str):
            return block
        lines = [block.head, ["---"] * len(block.head), *block.lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    return "\n\n".join(text(block) for block in blocks if block) + "\n"


def parsed(text: str) -> list[Block]:
    """The blocks of a piece of Markdown as `markdown` writes it."""

    def block(part: str) -> Block:
        if not part.startswith("|"):
            return part
        head, _, *lines = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in part.splitlines())
        return Grid(head, lines)

    return [block(part) for part in text.strip().split("\n\n")]


def latex(blocks: Sequence[Block]) -> str:
    """A fragment for a document with the packages booktabs and graphicx."""

    def text(block: Block) -> str:
        if isinstance(block, Drawing):
            return rf"\includegraphics[width=\linewidth]{{{block.file.name}}}"
        if isinstance(block, str):
            sections = ("", "section", "subsection", "subsubsection")
            level, _, words = block.partition(" ")
            if block.startswith("- "):
                items = "\n".join(rf"\item {_tex(line[2:])}" for line in block.splitlines())
                return "\\begin{itemize}\n" + items + "\n\\end{itemize}"
            return rf"\{sections[len(level)]}*{{{_tex(words)}}}" if _is_heading(block) else _tex(block)
        head, *lines = (" & ".join(map(_tex, line)) + r" \\" for line in [block.head, *block.lines])
        rows = "\n".join([r"\toprule", head, r"\midrule", *lines, r"\bottomrule"])
        return rf"\begin{{tabular}}{{{'l' + 'r' * (len(block.head) - 1)}}}" + f"\n{rows}\n" + r"\end{tabular}"

    return "\n\n".join(text(block) for block in blocks if block) + "\n"


def as_csv(blocks: Sequence[Block]) -> str:
    """One line for each cell of every grid; what is written ± and in brackets has columns of its own, and marks too."""
    out, table, section = io.StringIO(), "", ""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "section", "row", "column", "value", "deviation", "low", "high", "mark"])
    for block in blocks:
        if isinstance(block, str) and _is_heading(block):
            level, _, words = block.partition(" ")
            table, section = (table, words) if level == "###" else (words, "")
        for line in block.lines if isinstance(block, Grid) else ():
            assert isinstance(block, Grid)
            named = 2 if block.head[1:2] == [""] else 1  # a second column without a head names rows too
            row = ", ".join(line[:named])
            for column, cell in zip(block.head[named:], line[named:], strict=True):
                writer.writerow([table, section, row.removesuffix(MARK), column, *_numbers(cell, row)])
    return out.getvalue()


def _numbers(cell: str, row: str) -> list[str]:
    """A cell as value, deviation, bounds and mark; a text that is no number is the value."""
    mark = MARK.strip() if MARK in cell or row.endswith(MARK) else ""
    plain = cell.replace(MARK, "")
    found = NUMBERS.fullmatch(plain)
    return [*(part or "" for part in found.groups()), mark] if found else [plain, "", "", "", mark]


def as_html(blocks: Sequence[Block]) -> str:
    """One file with its pictures inside."""

    def text(block: Block) -> str:
        if isinstance(block, Drawing):
            data = base64.b64encode(block.file.read_bytes()).decode()
            return f'<img alt="{html.escape(block.title)}" src="data:image/png;base64,{data}">'
        if isinstance(block, str):
            return _html_text(block)
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.head)
        lines = "".join(
            "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in line) + "</tr>\n" for line in block.lines
        )
        return f"<table>\n<tr>{head}</tr>\n{lines}</table>"

    title = next((block.lstrip("# ") for block in blocks if isinstance(block, str)), "firm")
    body = "\n".join(text(block) for block in blocks if block)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


FORMATS: dict[str, Callable[[Sequence[Block]], str]] = {
    ".md": markdown,
    ".tex": latex,
    ".csv": as_csv,
    ".html": as_html,
}


def _is_heading(block: str) -> bool:
    return re.match(r"#{1,3} ", block) is not None


def _html_text(block: str) -> str:
    if _is_heading(block):
        marks, _, words = block.partition(" ")
        return f"<h{len(marks)}>{_inline(words)}</h{len(marks)}>"
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in block.splitlines()) + "</ul>"
    return f"<p>{_inline(block)}</p>"


def _inline(text: str) -> str:
    """Code, bold and emphasis of Markdown."""
    for mark, tag in ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "b"), (EMPHASIS, "em")):
        text = re.sub(mark, rf"<{tag}>\1</{tag}>", html.escape(text, quote=False) if tag == "code" else text)
    return text


def _tex(text: str) -> str:
    plain = re.sub(EMPHASIS, r"\1", re.sub(r"\*\*|`", "", text))
    return "".join(TEX.get(character, character) for character in plain)
