"""What the README shows is what works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import firm
from firm.data.drawn import write_folder

README = Path(__file__).parent.parent / "README.md"


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)[number]


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """The folders the README speaks of: good parts, suspects, and a labelled set."""
    write_folder(tmp_path / "my" / "parts", "plate", size=48, train=24, good=4, bad=4)
    (tmp_path / "my" / "good").mkdir()
    (tmp_path / "my" / "good" / "parts").symlink_to(tmp_path / "my" / "parts" / "train" / "good")
    (tmp_path / "my" / "new" / "good").mkdir(parents=True)
    (tmp_path / "my" / "new" / "good" / "parts").symlink_to(tmp_path / "my" / "parts" / "test" / "good")
    (tmp_path / "my" / "suspects").symlink_to(tmp_path / "my" / "parts" / "test" / "scratch")
    return tmp_path


def test_the_lines_of_python_run(workshop: Path) -> None:
    code = "import torch; torch.set_num_threads(1)\n" + block("python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=workshop)
    assert done.returncode == 0, done.stderr
    assert "Calibration(" in done.stdout
    assert "Verdict(image='my/suspects/000.png'" in done.stdout
    assert (workshop / "parts.firm" / "card.json").is_file()


def test_the_lines_of_shell_run(workshop: Path) -> None:
    lines = [line.partition("#")[0].split() for line in block("sh", 1).splitlines()]
    assert [line[1] for line in lines] == ["fit", "inspect", "calibrate", "evaluate"]
    lines[0] += ["--set=training.epochs=1", "--set=size=96"]
    for line in lines:
        command = [sys.executable, "-m", *line, "--threads=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=workshop)
        assert done.returncode in ((0, 3, 4) if line[1] == "inspect" else (0,)), done.stderr
    assert (workshop / "out" / "report.html").is_file()


def test_public_names_are_there() -> None:
    for name in firm.__all__:
        assert getattr(firm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = firm.nonsense


def test_links_lead_somewhere() -> None:
    for page in [README, *README.parent.glob("docs/**/*.md"), README.parent / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
