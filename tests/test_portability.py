"""Linux, macOS and Windows: no POSIX-only module is needed, and the lock has one owner on each of them."""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import firm
from firm.errors import MachineError, SettingError
from firm.runtime import files, platform
from firm.runtime.files import common_folder, folder_lock, write_atomically

POSIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses")


def windows_locking() -> ModuleType:
    """A stand-in for msvcrt: the lock of an open file by flock, refused with the error that Windows gives."""
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

    module = ModuleType("msvcrt")
    module.LK_NBLCK, module.LK_UNLCK = 2, 0

    def locking(handle: int, mode: int, count: int) -> None:
        assert count == 1
        try:
            flock(handle, LOCK_UN if mode == module.LK_UNLCK else LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking
    return module


@pytest.fixture(params=["posix", "windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "windows":
        monkeypatch.setitem(sys.modules, "msvcrt", windows_locking())
        monkeypatch.setitem(sys.modules, "fcntl", None)
    return request.param


def test_a_lock_has_one_owner_and_never_waits(system: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with folder_lock(folder) as first, folder_lock(folder) as second, folder_lock(folder, "other") as other:
        assert (first, second, other) == (True, False, True)
    with folder_lock(folder) as again:
        assert again
    with pytest.raises(KeyError), folder_lock(folder):
        raise KeyError
    with folder_lock(folder) as again:
        assert again


def test_a_lock_dies_with_its_owner(system: str, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from firm.runtime.files import folder_lock\n"
    code += "with folder_lock(Path(sys.argv[1])) as mine: print(mine, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as owner:
        assert owner.stdout.readline() == "True\n"
        with folder_lock(tmp_path) as mine:
            assert not mine
        owner.kill()
    with folder_lock(tmp_path) as mine:
        assert mine


PROGRAM = f"""
import errno, sys, warnings
from types import ModuleType
{{windows_locking}}
msvcrt = windows_locking()
for name in {POSIX_ONLY}:
    sys.modules[name] = None
import subprocess, torch, rich.progress, typer  # which ask for msvcrt to learn what system this is
sys.modules["msvcrt"] = msvcrt
warnings.filterwarnings("error", category=EncodingWarning, module="firm")
from firm.cli.app import main
sys.argv = ["firm", *sys.argv[1:]]
main()
"""


def test_a_fit_and_an_inspection_need_no_posix_module(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = 128 + 60 * np.sin(np.arange(96)[:, None, None] * 0.4) + rng.normal(0, 8, (96, 96, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(good / f"{number:02d}.png")
    program = PROGRAM.replace("{windows_locking}", inspect.getsource(windows_locking))

    def run(*arguments: object) -> str:
        command = [sys.executable, "-X", "warn_default_encoding", "-c", program, *map(str, arguments), "--threads=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = ["--set=size=96", "--set=training.epochs=1", "--set=automatic=[]"]
    run("fit", good, "--encoder=wavelets", "--out=part.firm", *small)
    assert run("inspect", "part.firm", good, "--report=report", "--maps=maps", "--json").count("verdict") >= 12
    assert (tmp_path / "report" / "report.html").is_file()


def test_a_stop_is_received_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)  # Ctrl-Break is of Windows alone
    before = signal.getsignal(signal.SIGUSR1)
    with platform.stop_signals() as received:
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(kind)
    assert received == [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before
    elsewhere = list[list[int]]()

    def in_a_thread() -> None:
        with platform.stop_signals() as received:
            elsewhere.append(received)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert elsewhere == [[]]


def test_a_file_that_another_program_reads_is_replaced_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, replace = [1, 2], os.replace

    def busy(source: str, target: str) -> None:
        if refused:
            refused.pop()
            raise PermissionError(errno.EACCES, "Access is denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(MachineError, match="page"):  # on POSIX a refusal is final
        write_atomically(tmp_path / "page", b"new")
    monkeypatch.setattr(files, "WINDOWS", True)
    write_atomically(tmp_path / "page", b"new")
    assert (tmp_path / "page").read_bytes() == b"new"
    refused[:] = range(9)
    with pytest.raises(MachineError, match="page"):
        write_atomically(tmp_path / "page", b"newer")
    assert os.listdir(tmp_path) == ["page"]


def test_paths_on_several_drives_have_no_common_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert common_folder([Path("/a/b"), Path("/a/c")]) == Path("/a")
    with pytest.raises(SettingError, match="several drives"):  # what Windows raises for C:/a and D:/b
        common_folder([Path("/a"), Path("b")])


def test_memory_and_devices_have_an_answer_on_every_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platform.check_device("cpu")
    with pytest.raises(MachineError, match="abacus"):
        platform.check_device("abacus")
    assert platform.keep_freed_memory() in (True, False)
    platform.reset_peak()
    assert (platform.peak_megabytes() or 1) > 0
    monkeypatch.setattr(platform, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(platform, "_RESET", tmp_path / "missing" / "clear_refs")
    monkeypatch.setattr(platform.platform, "libc_ver", lambda: ("", ""))
    platform.reset_peak()
    assert platform.peak_megabytes() is None
    assert not platform.keep_freed_memory()


def test_nothing_of_one_system_alone_is_used_unguarded() -> None:
    """Imports of POSIX modules, and functions that Python does not have on Windows."""
    only = "|".join(POSIX_ONLY)
    calls = r"os\.(fork|getuid|geteuid|getgid|mkfifo|chown|setsid|uname|getpgid|killpg|sysconf|sched_\w+)\b"
    signals = r"signal\.(SIGKILL|SIGHUP|SIGUSR1|SIGUSR2|SIGALRM|SIGCHLD|alarm|setitimer|pause|pthread_kill)\b"
    foreign = re.compile(rf"^\s*(import|from) ({only})\b|{calls}|{signals}", re.M)
    sources = Path(firm.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if foreign.search(path.read_text("utf-8"))] == []
