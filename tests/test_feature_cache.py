"""Features are computed once: killed or cut anywhere, a cache ends with the bytes of one that never was."""

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import each
from firm.errors import MachineError, ModelFileError, SettingError
from firm.runtime.feature_cache import stored

# a forked process here computes a little and ends; newer versions of Python warn of any fork beside threads
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

KEY, OTHER = "3f2a" * 4, "0b1c" * 4
ROWS, CHUNK, SHAPE = 11, 3, (2, 5)  # four chunks, the last of two rows
CHUNKS = 4
BYTES = 2 * 2 * 5  # of a row
VALUES = torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(1)) * 100


@pytest.fixture(autouse=True, scope="module")
def no_waiting():
    """A killed process loses nothing it gave to the system; only a power failure needs the disk to be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


class Network:
    """Hands out rows of VALUES, notes what it was asked for, and dies when it is asked for a row beyond `until`."""

    def __init__(self, until=ROWS, values=VALUES):
        self.until, self.values, self.asked = until, values, []

    def __call__(self, begin, end):
        if end > self.until:
            raise InterruptedError
        self.asked.append((begin, end))
        return self.values[begin:end]


def spans(begin, rows=ROWS, chunk=CHUNK):
    return [(at, min(at + chunk, rows)) for at in range(begin, rows, chunk)]


def run(folder, network=None, key=KEY, **options):
    return stored(folder, "good", key, ROWS, network or Network(), **{"chunk": CHUNK} | options)


def data(folder, key=KEY):
    return Path(folder) / f"good-{key}.f16"


def card(folder, key=KEY):
    return Path(folder) / f"good-{key}.json"


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a store that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return files(folder)


def laid(folder, content):
    """The files, in a folder that holds nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, value in content.items():
        (folder / name).write_bytes(value)
    return folder


def mended(folder, whole, **options):
    """Called again, the store is right in every bit; returns what had to be computed for it."""
    network, reported = Network(), []
    values = run(folder, network, on_rows=reported.append, **options)
    assert torch.equal(values, VALUES.half())
    assert files(folder) == whole
    assert reported[-1] == ROWS
    return network.asked


# --- what is stored ---


def test_the_values_are_those_of_the_computation_rounded(tmp_path):
    for folder in (None, tmp_path / "new" / "folder"):
        network = Network()
        values = run(folder, network)
        assert values.dtype == torch.float16
        assert torch.equal(values, VALUES.half())
        assert network.asked == spans(0)


def test_the_file_is_little_endian_float16_row_after_row(whole):
    assert whole[data("").name] == VALUES.numpy().astype("<f2").tobytes()
    assert json.loads(whole[card("").name]) == {
        "schema": 2,
        "row": [*SHAPE],
        "rows": ROWS,
        "chunk": CHUNK,
        "done": ROWS,
    }
    assert len(whole) == 2


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9), chunk=st.integers(1, 12), row=st.lists(st.integers(0, 3), max_size=3), disk=st.booleans()
)
def test_any_shape_and_any_chunk_give_the_same_rows(tmp_path_factory, rows, chunk, row, disk):
    values = torch.arange(rows * int(np.prod(row)), dtype=torch.float64).reshape(rows, *row)
    folder = tmp_path_factory.mktemp("any") if disk else None
    for expected in (spans(0, rows, chunk), [] if disk else spans(0, rows, chunk)):
        network, reported = Network(rows, values), []
        found = stored(folder, "good", KEY, rows, network, chunk=chunk, on_rows=reported.append)
        assert network.asked == expected
        assert (reported or [0])[-1] == rows
        assert torch.equal(found, values.half()) if rows else len(found) == 0


def test_rows_of_any_kind_are_taken(tmp_path):
    crooked = VALUES.to(torch.bfloat16).transpose(1, 2).requires_grad_()
    values = run(tmp_path, Network(values=crooked))
    assert torch.equal(values, crooked.detach().half())
    assert not values.requires_grad


def test_no_rows_need_no_network_and_no_file(tmp_path):
    run(tmp_path, key=OTHER)
    for folder in (None, tmp_path / "none", tmp_path):
        assert len(stored(folder, "good", KEY, 0, Network(until=-1))) == 0
    assert files(tmp_path) == {}


def test_a_finished_store_is_a_map_of_its_file(tmp_path):
    for _ in range(2):  # when it is made, and when it is found
        values = run(tmp_path)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ranges = [line[0].split("-") for line in maps if line[-1] == str(data(tmp_path))]
        assert any(int(begin, 16) <= values.data_ptr() < int(end, 16) for begin, end in ranges)
        del values


def test_writing_into_the_values_does_not_reach_the_file(tmp_path, whole):
    run(tmp_path).zero_()
    assert mended(tmp_path, whole) == []


def test_rows_are_reported_as_they_are_made(tmp_path):
    reported = []
    with suppress(InterruptedError):
        run(tmp_path, Network(until=6), on_rows=reported.append)
    assert reported == [3, 6]
    run(tmp_path, on_rows=reported.append)
    assert reported == [3, 6, 6, 9, 11]
    run(tmp_path, on_rows=reported.append)
    assert reported[5:] == [11]


def test_a_reported_chunk_is_safe(tmp_path):
    def told(_):
        done.append(json.loads(card(tmp_path).read_text())["done"])
        assert data(tmp_path).stat().st_size == done[-1] * BYTES

    done = []
    run(tmp_path, on_rows=told)
    assert done == [3, 6, 9, 11]


def test_values_are_on_the_disk_before_the_card_vouches_for_them(tmp_path, monkeypatch):
    def synced(handle):
        done.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name.strip(".")[:21], os.fstat(handle).st_size))

    def replaced(old, new):
        done.append("card")
        replace(old, new)

    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    run(tmp_path)
    before = [done[at - 2] for at, what in enumerate(done) if what == "card"]
    assert before == [(data("").name[:21], rows * BYTES) for rows in (3, 6, 9, 11)]


# --- stopped, and gone on ---


def test_a_computation_that_fails_continues_where_it_was(tmp_path, whole):
    for chunks in range(CHUNKS):
        folder = laid(tmp_path / "part", {})
        with pytest.raises(InterruptedError):
            run(folder, Network(until=chunks * CHUNK))
        assert mended(folder, whole) == spans(chunks * CHUNK)


def partial(folder, chunks):
    laid(folder, {})
    with suppress(InterruptedError):
        run(folder, Network(until=chunks * CHUNK if chunks < CHUNKS else ROWS))
    return folder


def test_a_file_of_another_length_than_the_card_counts_is_computed_again(tmp_path, whole):
    """As after a power failure: rows the card does not count are dropped, and without those it counts none is used."""
    for chunks in range(1, CHUNKS + 1):
        content = files(partial(tmp_path / "part", chunks))
        counted = min(chunks * CHUNK, ROWS) * BYTES
        for length in (0, counted - 1, counted, counted + 1, counted + 300):
            folder = laid(tmp_path / "cut", content)
            data(folder).write_bytes((content[data("").name] + b"\xff" * 300)[:length])
            usable = length == counted or (length > counted and chunks < CHUNKS)
            assert mended(folder, whole) == spans(chunks * CHUNK if usable else 0), (chunks, length)


@each("lost", [card, data])
def test_half_a_cache_is_computed_again(tmp_path, whole, lost):
    for chunks in (1, CHUNKS):
        lost(partial(tmp_path / "part", chunks)).unlink()
        assert mended(tmp_path / "part", whole) == spans(0)


def forked(work):
    """A process of its own that does the work and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def ended_by(pid):
    """The signal that ended the process; 0: it went to its end."""
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def deadly(calls, moment):
    """From now on this process dies at the system's given call, counted over all that matter to a store."""
    left = [moment]

    def wrapped(call):
        def counting(*arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return counting

    for name in calls:
        setattr(os, name, wrapped(getattr(os, name)))


def test_a_kill_at_every_call_of_the_system_loses_at_most_a_chunk(tmp_path, whole):
    def work():
        deadly(("fsync", "replace", "unlink", "truncate"), moment)
        run(folder)

    folder, moment, killed = tmp_path / "store", 0, signal.SIGKILL
    while killed:
        laid(folder, {data("", OTHER).name: b"old", card("", OTHER).name: b"old"})
        killed = ended_by(forked(work))
        assert killed in (0, signal.SIGKILL)
        # a chunk: values synced; card synced, in place (it counts), temporary removed, folder synced
        assert mended(folder, whole) == spans((moment + 2) // 5 * CHUNK)
        moment += 1
    assert moment == CHUNKS * 5 + 3  # two old files were removed, and one call more never came


def test_a_store_survives_one_kill_after_another(tmp_path, whole):
    def work():
        deadly(("fsync",), 4)  # a chunk takes three, so it dies in the second
        run(tmp_path)

    kills = [ended_by(forked(work)) for _ in range(CHUNKS)]
    assert kills == [signal.SIGKILL] * 3 + [0]
    assert mended(tmp_path, whole) == []


def test_a_process_killed_from_outside_leaves_what_it_did(tmp_path, whole):
    def slow(begin, end):
        time.sleep(0.01 if begin < 6 else 600)
        return VALUES[begin:end]

    pid = forked(lambda: run(tmp_path, slow))
    give_up = time.monotonic() + 300
    vouching = card(tmp_path)  # it alone: what is half-written beside it may be gone before it is read
    try:
        while not (vouching.exists() and b'"done": 6' in vouching.read_bytes()) and time.monotonic() < give_up:
            time.sleep(0.001)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert ended_by(pid) == signal.SIGKILL
    assert mended(tmp_path, whole) == spans(6)


# --- damaged ---


@settings(max_examples=80)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_no_changed_byte_of_the_card_goes_into_the_values(tmp_path_factory, whole, place, value):
    damaged = bytearray(whole[card("").name])
    damaged[int(place * len(damaged))] = value
    folder = laid(tmp_path_factory.getbasetemp() / "flipped", whole | {card("").name: bytes(damaged)})
    assert torch.equal(run(folder), VALUES.half())


def test_a_card_that_makes_no_sense_is_ignored(tmp_path, whole):
    wrong = [
        {"schema": 3},
        {"rows": ROWS + 1},
        {"row": [5, 10**30]},
        {"row": [2, 10**13]},
        {"row": [-2, -5]},
        {"row": 10},
    ]
    wrong += [{"row": ["x"]}, {"row": [1, 5]}, {"chunk": 0}, {"chunk": None}, {"done": 12}, {"done": -3}, {"done": 7}]
    texts = [json.dumps(json.loads(whole[card("").name]) | changes).encode() for changes in wrong]
    for text in (*texts, b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}"):
        laid(tmp_path / "store", whole | {card("").name: text})
        assert mended(tmp_path / "store", whole) == spans(0), text


def test_another_chunk_is_another_computation(tmp_path):
    for chunks in (2, CHUNKS):
        network = Network()
        assert torch.equal(run(partial(tmp_path / "store", chunks), network, chunk=4), VALUES.half())
        assert network.asked == spans(0, chunk=4)


# --- what is removed ---

FOREIGN = (
    f"outliers-{OTHER}.f16",
    f"good-parts-{OTHER}.f16",
    f"very-good-{OTHER}.f16",
    f"good-{OTHER}.f16.old",
    f"good-{OTHER}.safetensors",
    f"good-{OTHER.upper()}.f16",
    f"good{OTHER}.f16",
    f"good-{OTHER}",
    f"good-{OTHER[1:]}.json",
    "good-2024.json",
    "good-.f16",
    "good-notes.json",
    "goodX-1.f16",
    f".good-{OTHER}.f16.12345678",
    f".outliers-{OTHER}.json.abcdefgh",
    "lock",
)
OLD = (f"good-{OTHER}.f16", f"good-{OTHER}.json", f".good-{OTHER}.json.abc_e0gh", f".good-{KEY}.json.abc_e0gh")


def test_other_keys_are_removed_and_nothing_else(tmp_path, whole):
    laid(tmp_path / "store", dict.fromkeys(FOREIGN + OLD, b"content"))
    (tmp_path / "store" / f"good-{'ab' * 8}.json").mkdir()
    run(tmp_path / "store")
    (tmp_path / "store" / f"good-{'ab' * 8}.json").rmdir()
    assert files(tmp_path / "store") == dict.fromkeys(FOREIGN, b"content") | whole


def test_other_keys_stay_until_the_store_is_whole(tmp_path, whole):
    run(tmp_path, key=OTHER)
    with pytest.raises(InterruptedError):
        run(tmp_path, Network(until=9))
    assert torch.equal(run(tmp_path, Network(until=0), key=OTHER), VALUES.half())
    run(tmp_path)
    laid(tmp_path, whole | dict.fromkeys(OLD, b"left by one killed while it removed"))
    assert mended(tmp_path, whole) == []


def test_a_name_is_no_pattern(tmp_path):
    (tmp_path / f"goods-{OTHER}.f16").write_bytes(b"")
    stored(tmp_path, "g...s", KEY, 0, Network())
    assert [path.name for path in tmp_path.iterdir()] == [f"goods-{OTHER}.f16"]


def test_values_outlive_the_removal_of_their_file(tmp_path):
    old = run(tmp_path)
    run(tmp_path, key=OTHER)
    assert not data(tmp_path).exists()
    assert torch.equal(old, VALUES.half())


# --- what is refused ---


@each("on_disk", [True, False])
def test_what_float16_cannot_hold_is_refused(tmp_path, on_disk):
    for value in (torch.nan, torch.inf, -torch.inf, 65505.0):
        values = VALUES.clone()
        values[7, 1, 2] = value
        with pytest.raises(ModelFileError, match=rf"'good' of image 7 hold {value:g}"):
            run(tmp_path if on_disk else None, Network(values=values))
    if on_disk:
        assert json.loads(card(tmp_path).read_text())["done"] == 6


def test_the_largest_float16_is_stored(tmp_path):
    values = VALUES.clone()
    values[7, 1, 2], values[7, 0, 0] = 65504, -65504
    assert torch.equal(run(tmp_path, Network(values=values)), values.half())


@each("on_disk", [True, False])
def test_rows_of_another_shape_are_refused(tmp_path, on_disk):
    def first(begin, end):
        return torch.zeros(1, 4)

    def changing(begin, end):
        return torch.zeros(end - begin, 4 + begin // 6)

    folder = tmp_path if on_disk else None
    with pytest.raises(SettingError, match=r"images 0 to 2 have the shape \(1, 4\) instead of \(3, 4\)"):
        run(folder, first)
    with pytest.raises(SettingError, match=r"images 6 to 8 have the shape \(3, 5\) instead of \(3, 4\)"):
        run(folder, changing)
    if on_disk:
        with pytest.raises(SettingError, match=r"images 6 to 8 have the shape \(3, 2, 5\) instead of \(3, 4\)"):
            run(folder)


WIDE = torch.ones(ROWS, 250_000)  # half a megabyte a row


def with_free(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - free, free))


def test_a_disk_without_room_is_refused_after_the_first_chunk(tmp_path, monkeypatch):
    network = Network(values=WIDE)
    with_free(monkeypatch, 5_499_999)
    with pytest.raises(MachineError, match=r"good-.*\.f16 needs 6 MB more and its disk has 5 MB free"):
        run(tmp_path, network)
    assert network.asked == [(0, 3)]
    with_free(monkeypatch, 5_500_000)
    assert torch.equal(run(tmp_path, network), WIDE.half())


def test_a_resumed_store_asks_for_the_room_it_lacks_before_computing(tmp_path, monkeypatch):
    with pytest.raises(InterruptedError):
        run(tmp_path, Network(until=6, values=WIDE))
    network = Network(values=WIDE)
    with_free(monkeypatch, 2_400_000)
    with pytest.raises(MachineError, match=r"needs 3 MB more and its disk has 2 MB free"):
        run(tmp_path, network)
    assert network.asked == []
    with_free(monkeypatch, 2_500_000)
    run(tmp_path, network)
    assert network.asked == spans(6)
    with_free(monkeypatch, 0)
    run(tmp_path, Network(until=0))


def test_a_full_disk_is_named_and_what_is_done_is_kept(tmp_path, whole):
    """No file may grow beyond seven rows here: the third chunk is written in part, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 * 500_000, limits[1]))
    try:
        with pytest.raises(MachineError, match=rf"{KEY}\.f16: File too large; free some space"):
            run(tmp_path, Network(values=WIDE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    network = Network(values=WIDE)
    assert torch.equal(run(tmp_path, network), WIDE.half())
    assert network.asked == spans(6)


def test_a_card_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MachineError, match=r"\.json: No space left"):
        run(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(MachineError, match=rf"good-{KEY}\.f16: "):
        run(tmp_path / "file" / "folder")
    data(tmp_path).mkdir()
    with pytest.raises(MachineError, match=rf"good-{KEY}\.f16 is not a file"):
        run(tmp_path)


def test_a_card_nested_deeply_or_a_pipe_is_computed_again(tmp_path, whole):
    run(tmp_path)
    card(tmp_path).write_text("[" * 100_000)
    assert torch.equal(run(tmp_path), VALUES.half())
    card(tmp_path).unlink()
    os.mkfifo(card(tmp_path))
    assert torch.equal(run(tmp_path), VALUES.half())


def test_a_pipe_in_the_place_of_the_features_is_named(tmp_path):
    os.mkfifo(data(tmp_path))
    with pytest.raises(MachineError, match=data(tmp_path).name):
        run(tmp_path)
