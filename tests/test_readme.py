"""What the README shows is what works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import firm
from commands import run
from firm.drawn.render import write_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, beginning: str) -> str:
    return next(
        code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if code.startswith(beginning)
    )


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """The folders that the README names: good parts, suspects, and a labelled set."""
    write_folder(tmp_path / "my" / "parts", "plate", size=48, train=12, good=3, bad=4)
    (tmp_path / "my" / "good").mkdir()
    (tmp_path / "my" / "good" / "parts").symlink_to(tmp_path / "my" / "parts" / "train" / "good")
    (tmp_path / "my" / "new" / "good").mkdir(parents=True)
    (tmp_path / "my" / "new" / "good" / "parts").symlink_to(tmp_path / "my" / "parts" / "test" / "good")
    (tmp_path / "my" / "suspects").symlink_to(tmp_path / "my" / "parts" / "test" / "scratch")
    return tmp_path


def test_the_lines_of_python_run(workshop: Path) -> None:
    code = "import torch; torch.set_num_threads(1)\n" + block("python", "from firm import Detector")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=workshop)
    assert done.returncode == 0, done.stderr
    assert "Verdict(image='my/suspects/000.png'" in done.stdout
    assert (workshop / "parts.firm" / "card.json").is_file()


def test_the_lines_of_shell_run(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    lines = [line.partition("#")[0].split() for line in block("sh", "firm fit").splitlines()]
    assert [line[1] for line in lines] == ["fit", "inspect", "calibrate", "evaluate"]
    lines[0] += ["--set=training.epochs=1", "--set=size=96"]
    for line in lines:
        done = run(*line[1:])
        assert done.code in ((0, 3, 4) if line[1] == "inspect" else (0,)), done.err
    assert (workshop / "out" / "report.html").is_file()


def test_the_numbers_are_those_of_the_results() -> None:
    """Image / pixel AUROC of the README's table, row by row, as the page of the table has them."""
    names = {
        "**`firm fit`**": "firm + unadapted",
        "FIRM-adapted": "firm",
        "unadapted": "unadapted",
        "PatchCore": "patchcore",
        "trivial: brightness": "brightness alone",
        "trivial: distance": "nearest whole image",
    }
    page = (ROOT / "docs" / "results" / "pretrained.md").read_text(encoding="utf-8")
    sections = page.split("\n### ")[1:4]
    assert [each.split("\n")[0] for each in sections] == ["mvtec:screw", "magnetic_tile", "drawn:plate"]
    for begin, row in names.items():
        cells = re.search(rf"^\| {re.escape(begin)}[^|]*\|(.*)\|$", README, re.MULTILINE)
        assert cells, begin
        for section, cell in zip(sections, cells[1].split("|"), strict=True):
            measured = re.search(rf"^\| {re.escape(row)}(?: †)? \|(.*)\|$", section, re.MULTILINE)
            trivial = re.search(rf"{row} (\d+\.\d)", section)
            if measured:
                found = [value.split()[0] for value in measured[1].split("|")[1:3]]
            else:
                assert trivial, row
                found = [trivial[1]]
            assert cell.strip().strip("*").split(" / ") == [value for value in found if value != "-"], f"{row}: {cell}"


def test_the_numbers_of_whole_images_are_those_of_the_results() -> None:
    """The mean over ten classes by the preset's score, which comes first on the page."""
    page = (ROOT / "docs" / "results" / "semantic-frozen.md").read_text(encoding="utf-8")
    names = {
        "**FIRM**": "firm",
        "SupCon": "supcon",
        "NT-Xent": "ntxent",
        "frozen features": "frozen",
        "plain pixels, cosine": "pixels, cosine",
        "plain pixels, L2": "pixels, L2",
    }
    for begin, row in names.items():
        stated = re.search(rf"^\| {re.escape(begin)}[^|]*\| \**([\d.]+)\** \|$", README, re.MULTILINE)
        measured = re.search(rf"^\| {row}(?: †)? \| 10 \| \d+ \| ([\d.]+)(?: ± [\d.]+)? \|", page, re.MULTILINE)
        assert stated, begin
        assert measured, row
        assert stated[1] == measured[1]


def test_public_names_are_there() -> None:
    for name in firm.__all__:
        assert getattr(firm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = firm.nonsense
