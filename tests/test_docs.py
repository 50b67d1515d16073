"""The examples of the docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from firm.data.drawn import drawn, write_folder

PAGE = Path(__file__).parent.parent / "docs" / "python.md"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small parts, learnt by default settings."""
    import cv2

    write_folder(tmp_path / "drawn", "plate", size=64, train=30, good=19, bad=1)
    (tmp_path / "parts").mkdir()
    (tmp_path / "drawn" / "train" / "good").rename(tmp_path / "parts" / "good")
    (tmp_path / "drawn" / "test" / "good").rename(tmp_path / "parts" / "more")
    (tmp_path / "parts" / "new").mkdir()
    for number, part in enumerate(drawn("plate", size=64, train=0, good=9, bad=9, seed=5)[1]):
        cv2.imwrite(str(tmp_path / "parts" / "new" / f"{number:03d}.png"), part.image)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_runs_from_top_to_bottom(workshop: Path) -> None:
    threads = torch.get_num_threads()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    try:
        torch.set_num_threads(1)
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert (workshop / "out" / "report.html").is_file()
    assert (workshop / "part.firm" / "card.json").is_file()
