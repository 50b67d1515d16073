"""The three levels of output, the progress bar, the version and the completion of the shell."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from commands import run
from firm.cli import terminal
from firm.cli.terminal import detail, report_error, reporting, say, set_level, show, warn


@pytest.fixture(autouse=True)
def _normal() -> object:
    yield
    set_level(None)


class Screen(io.StringIO):
    """Standard error as a terminal would be."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("verbose", "printed"),
    [
        (None, ["said", "warning: warned", "firm: failed"]),
        (True, ["said", "more", "warning: warned", "firm: failed"]),
        (False, ["warning: warned", "firm: failed"]),
    ],
)
def test_the_level_decides_what_stands_beside_the_result(
    verbose: bool | None, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_level(verbose)
    say("said")
    detail("more")
    warn("warned")
    report_error("failed")
    show({"value": 1}, "the result", as_json=True)
    out, err = capsys.readouterr()
    assert err.splitlines() == printed
    assert out == '{"value": 1}\n'


def test_the_bar_names_its_stages_on_a_terminal_and_the_log_keeps_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    set_level(True)
    with reporting() as listener:
        listener.count("embedding", 4)(3)
        listener._bar.refresh()
        listener.progress("training", 7, 9, "loss 0.500")
        listener._bar.refresh()
    drawn = screen.getvalue()
    assert "3/4" in drawn
    assert "7/9" in drawn
    assert "loss 0.500" in drawn
    assert "embedding: " in drawn  # how long it took
    assert "training: " in drawn


@pytest.mark.parametrize(("screen", "verbose"), [(io.StringIO, None), (Screen, False)])
def test_no_bar_in_a_log_or_with_quiet(
    screen: type[io.StringIO], verbose: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen())
    set_level(verbose)
    with reporting() as listener:
        listener.progress("embedding", 1, 4)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_verb_sets_the_level(tmp_path: Path) -> None:
    for flag, level in (("--verbose", terminal.VERBOSE), ("-q", terminal.QUIET)):
        run("inspect", tmp_path / "none.firm", tmp_path, flag)
        assert terminal._level is level
    run("inspect", tmp_path / "none.firm", tmp_path)
    assert terminal._level is terminal.NORMAL


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version")[:2] == (0, f"firm {version('firm')}\n")


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="needs bash")
def test_the_shell_completes_verbs_once_completion_is_installed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    firm = tmp_path / "firm"
    firm.write_text(f"#!{sys.executable}\nfrom firm.cli import main\nmain()\n")
    firm.chmod(0o755)
    settings = os.environ | {"HOME": str(home), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(  # typer looks for the shell among the parents of the process
        ["bash", "-c", "firm --install-completion; echo installed"], env=settings, capture_output=True, text=True
    )
    assert "installed" in done.stdout
    script = next(home.rglob("firm.sh"))
    typed = f"source {script}; COMP_WORDS=(firm insp); COMP_CWORD=1; _firm_completion firm; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", typed], env=settings, capture_output=True, text=True)
    assert done.stdout.split() == ["inspect"]
