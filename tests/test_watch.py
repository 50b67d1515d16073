"""Watching: every image is decided when it is whole, once, and the journal survives any death."""

import hashlib
import json
import os
import random
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.errors import FirmError, UnreadableImage
from firm.images import decode
from firm.watching import HEAD, Journal, watch
from image_files import encoded


def picture(seed, side=8):
    return encoded(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def put(path, content, mtime_ns=None):
    """The file at once, with a time of its own: two versions written in one tick would look the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def digest(content):
    return hashlib.sha256(content).hexdigest()


def decided(path):
    """What the tests decide: the content that was read, of an image that is whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{path} {error.strerror}", path) from error
    decode(content)
    return {"digest": digest(content)}


class Days:
    """A clock that moves only when watch sleeps; in each sleep the next thing happens, after the last it stops."""

    def __init__(self, *events):
        self.events, self.now, self.said = list(events), 0.0, []

    def sleep(self, seconds):
        self.now += seconds
        event = self.events.pop(0)
        if event is not None:
            event()

    def watch(self, journal, *folders, decide=decided, **pace):
        with Journal(journal) as opened:
            return list(
                watch(
                    folders,
                    decide,
                    opened,
                    stop=lambda: not self.events,
                    clock=lambda: self.now,
                    sleep=self.sleep,
                    tell=self.said.append,
                    **({"settle": 1.0, "poll": 1.0, "patience": 10.0} | pace),
                )
            )


QUIET = [None] * 5


def files(lines):
    return [line["file"] for line in lines]


def read(journal):
    return [json.loads(line) for line in journal.read_text().splitlines()]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "out" / "journal.jsonl"


# --- what is decided ---


def test_every_image_is_decided_once_and_again_only_when_it_is_another(place, journal):
    put(place / "b.png", picture(1), 10)
    put(place / "sub" / "a.png", picture(2), 10)
    new = picture(3)
    days = Days(*QUIET, lambda: put(place / "b.png", new, 20), *QUIET, lambda: put(place / "c.png", new, 30), *QUIET)
    lines = days.watch(journal, place)
    assert files(lines) == ["b.png", "sub/a.png", "b.png", "c.png"]
    assert [line["digest"] for line in lines] == [digest(one) for one in (picture(1), picture(2), new, new)]
    assert lines[2]["stamp"] == [len(new), 20]
    assert read(journal) == lines
    assert Days(*QUIET).watch(journal, place) == []  # nor after a restart
    assert read(journal) == lines


@pytest.mark.parametrize("change", ["time", "size", "name"])
def test_an_image_is_known_by_name_size_and_time(place, journal, change):
    put(place / "a.png", picture(0), 10)
    Days(*QUIET).watch(journal, place)
    content, again = picture(0), place / ("b.png" if change == "name" else "a.png")
    put(again, content + b"\0" * (change == "size"), 11 if change == "time" else 10)
    assert files(Days(*QUIET).watch(journal, place)) == [again.name]


def test_the_content_alone_is_not_looked_at(place, journal):
    """The price of not reading every file at every look: same size and same time is the same image."""
    put(place / "a.png", picture(0), 10)
    Days(*QUIET).watch(journal, place)
    other = bytearray(picture(0))
    other[-1] ^= 1
    put(place / "a.png", bytes(other), 10)
    assert Days(*QUIET).watch(journal, place) == []


def test_names_that_are_no_images_are_passed_over(place, journal):
    for name in (".a.png", "a.png.part", "a.png.tmp", "a.png.crdownload", "a.txt", ".hidden/a.png"):
        put(place / name, picture(0))
    put(place / "A.PNG", picture(0))
    assert files(Days(*[None] * 30).watch(journal, place)) == ["A.PNG"]


def test_a_file_renamed_into_place_is_decided_as_soon_as_it_has_settled(place, journal):
    put(place / "a.png.part", picture(0), 10)
    moment = []
    days = Days(*QUIET, lambda: os.rename(place / "a.png.part", place / "a.png"), *QUIET)
    days.watch(journal, place, decide=lambda path: moment.append(days.now) or decided(path), settle=2.0)
    assert moment == [8.0]  # renamed in the sleep that ends at 6


def test_several_folders_have_one_home(tmp_path, journal):
    for name in ("one/a.png", "two/a.png", "two/in/b.png"):
        put(tmp_path / name, picture(0))
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "two" / "in"]
    assert sorted(files(Days(*QUIET).watch(journal, *folders))) == ["one/a.png", "two/a.png", "two/in/b.png"]


def test_the_name_does_not_depend_on_how_the_folder_was_given(place, journal, monkeypatch):
    put(place / "a.png", picture(0))
    put(place.with_name("more") / "b.png", picture(1))
    Days(*QUIET).watch(journal, place, place.with_name("more"))
    monkeypatch.chdir(place.parent)
    assert Days(*QUIET).watch(journal, Path("more/../in"), place.with_name("more")) == []


def test_names_of_any_bytes(place, journal):
    names = [b"new\nline.png", b"\xff\xfe.png", "\u2028 ö.png".encode(), b'"{.png']
    for name in names:
        put(Path(os.fsdecode(os.fsencode(place) + b"/" + name)), picture(0))
    assert sorted(os.fsencode(name) for name in files(Days(*QUIET).watch(journal, place))) == sorted(names)
    assert Days(*QUIET).watch(journal, place) == []


def test_what_was_decided_never_renames_the_image(place, journal):
    put(place / "a.png", picture(0), 10)
    (line,) = Days(*QUIET).watch(journal, place, decide=lambda path: {"score": 1.5, "file": str(path), "stamp": 0})
    assert list(line.items()) == [("file", "a.png"), ("stamp", [len(picture(0)), 10]), ("score", 1.5)]


# --- when ---


def test_a_growing_file_is_left_alone_until_it_rests(place, journal):
    content, tried = picture(0), []
    days = Days(*[lambda n=n: put(place / "a.png", content[:n], n) for n in (9, 60, 120, len(content))], *[None] * 9)
    lines = days.watch(journal, place, decide=lambda path: tried.append(days.now) or decided(path), settle=3.0)
    assert tried == [7.0]  # grew for the last time at 4
    assert [line["digest"] for line in lines] == [digest(content)]


def test_a_file_of_unchanged_size_that_is_still_written_is_left_alone(place, journal):
    days = Days(*[lambda n=n: put(place / "a.png", picture(n), n) for n in range(8)], *QUIET)
    assert [line["digest"] for line in days.watch(journal, place, settle=2.0)] == [digest(picture(7))]


def test_half_a_file_is_waited_for(place, journal):
    content = picture(0)
    put(place / "a.png", content[:100], 10)
    put(place / "b.png", content, 10)
    days = Days(*[None] * 8, lambda: put(place / "a.png", content, 20), *QUIET)
    lines = days.watch(journal, place)
    assert files(lines) == ["b.png", "a.png"]
    assert all(line["digest"] == digest(content) for line in lines)


def test_a_damaged_file_is_unreadable_once_patience_ends_and_decided_when_it_is_mended(place, journal):
    put(place / "a.png", picture(0)[:100], 10)
    tried = []
    days = Days(*[None] * 40, lambda: put(place / "a.png", picture(0), 20), *QUIET)
    lines = days.watch(journal, place, decide=lambda path: tried.append(days.now) or decided(path))
    assert tried == [1, 2, 4, 8, 10, 42]  # ever more rarely
    assert files(lines) == ["a.png", "a.png"]
    assert lines[0].keys() == {"file", "stamp", "unreadable"}
    assert "cannot be decoded" in lines[0]["unreadable"]
    assert lines[1]["digest"] == digest(picture(0))
    assert Days(*[None] * 40).watch(journal, place) == []


def test_patience_counts_from_the_last_change(place, journal):
    grow = [lambda n=n: put(place / "a.png", picture(0)[:n], n) for n in range(50, 80)]
    assert Days(*grow, *QUIET).watch(journal, place) == []
    (line,) = Days(*[None] * 12).watch(journal, place)
    assert "unreadable" in line


def test_without_patience_a_file_is_tried_once(place, journal):
    put(place / "a.png", b"no image")
    (line,) = Days(*QUIET).watch(journal, place, patience=0.0)
    assert "unreadable" in line


def test_without_settling_an_unreadable_file_is_not_tried_all_the_time(place, journal):
    put(place / "a.png", b"no image")
    tried = []
    days = Days(*[None] * 12)
    days.watch(journal, place, settle=0.0, decide=lambda path: tried.append(days.now) or decided(path))
    assert tried == [0, 1, 2, 4, 8, 10]


def test_what_changes_while_it_is_decided_is_decided_again(place, journal):
    put(place / "a.png", picture(0), 10)
    versions = [picture(1), picture(2)]

    def disturbed(path):
        found = decided(path)
        if versions:
            put(path, versions.pop(0), 30 - len(versions))
        return found

    lines = Days(*[None] * 9).watch(journal, place, decide=disturbed)
    assert [line["digest"] for line in lines] == [digest(picture(2))]


def test_what_changed_while_others_were_decided_is_not_decided_yet(place, journal):
    put(place / "a.png", picture(0), 10)
    put(place / "b.png", picture(0), 10)
    tried = []

    def disturbing(path):
        tried.append(path.name)
        if len(tried) == 1:
            put(place / "b.png", picture(1), 20)
        return decided(path)

    days = Days(*QUIET)
    assert [line["digest"] for line in days.watch(journal, place, decide=disturbing)] == [
        digest(picture(0)),
        digest(picture(1)),
    ]
    assert tried == ["a.png", "b.png"]


def test_what_is_damaged_while_it_is_read_has_not_been_patient_yet(place, journal):
    """Unreadable at the end of patience, but being written at this very moment."""
    put(place / "a.png", picture(0)[:100], 10)

    def disturbed(path):
        try:
            return decided(path)
        finally:
            if days.now >= 10 and path.stat().st_size == 100:
                put(path, picture(0), 20)

    days = Days(*[None] * 20)
    (line,) = days.watch(journal, place, decide=disturbed)
    assert line["digest"] == digest(picture(0))


def test_files_that_vanish_are_forgotten(place, journal):
    for name in ("a.png", "b.png", "c.png"):
        put(place / name, picture(0), 10)
    put(place / "d.png", b"half", 10)

    def vanishing(path):
        (place / "c.png").unlink(missing_ok=True)  # listed, and not there when its turn comes
        if path.name == "b.png":
            path.unlink()  # while it is read
        return decided(path)

    days = Days(*QUIET, (place / "d.png").unlink, *[None] * 20)
    assert files(days.watch(journal, place, decide=vanishing)) == ["a.png"]
    assert days.said == []


def test_a_link_that_leads_nowhere_is_waited_for(place, journal, tmp_path):
    (place / "a.png").symlink_to(tmp_path / "there.png")
    days = Days(*[None] * 20, lambda: put(tmp_path / "there.png", picture(0)), *QUIET)
    assert files(days.watch(journal, place)) == ["a.png"]


def test_a_folder_that_takes_long_to_list_is_looked_at_less_often(place, journal, monkeypatch):
    looks, scandir = [], os.scandir

    def slow(folder):
        looks.append(days.now)
        days.now += 4.0
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", slow)
    days = Days(*[None] * 20)
    days.watch(journal, place)
    assert looks == [0, 16]  # stopped in its rest, not after it


# --- folders that vanish ---


def test_a_folder_that_vanishes_is_waited_for_and_said_once(place, journal):
    away = place.with_name("away")
    put(place / "a.png", picture(0), 10)

    def back():
        away.rename(place)
        put(place / "b.png", picture(1), 10)

    days = Days(*QUIET, lambda: place.rename(away), *QUIET, back, *QUIET)
    assert files(days.watch(journal, place)) == ["a.png", "b.png"]
    assert days.said == [f"{place} cannot be listed; waiting for it", f"{place} is back"]


def test_a_folder_may_come_later_and_costs_the_others_nothing(place, journal, tmp_path):
    put(place / "a.png", picture(0))
    late = tmp_path / "late"
    days = Days(*QUIET, lambda: put(late / "b.png", picture(1)), *QUIET)
    assert files(days.watch(journal, place, late)) == ["in/a.png", "late/b.png"]
    assert days.said == [f"{late} cannot be listed; waiting for it", f"{late} is back"]


def test_a_folder_inside_that_cannot_be_listed_is_no_image(place, journal, monkeypatch):
    put(place / "sub" / "a.png", picture(0))
    locked, scandir = [place / "sub"], os.scandir

    def refusing(folder):
        if folder in locked:
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    days = Days(*[None] * 30, locked.clear, *QUIET)
    assert files(days.watch(journal, place)) == ["sub/a.png"]
    assert days.said == [f"{place / 'sub'} cannot be listed; waiting for it", f"{place / 'sub'} is back"]


# --- stopping and failing ---


def test_stop_is_asked_before_every_image(place, journal):
    for number in range(5):
        put(place / f"{number}.png", picture(0))
    made = []
    with Journal(journal) as opened:
        lines = watch(
            [place], lambda path: made.append(path) or {}, opened, settle=0, stop=lambda: len(made) >= 3, sleep=print
        )
        assert files(lines) == ["0.png", "1.png", "2.png"]
    assert files(Days(None).watch(journal, place, settle=0)) == ["3.png", "4.png"]


def test_a_line_is_in_the_journal_before_anybody_hears_of_it(place, journal):
    put(place / "a.png", picture(0))
    with Journal(journal) as opened:
        line = next(watch([place], decided, opened, settle=0, stop=lambda: False))
        assert read(journal) == [line]


def test_a_failure_that_is_not_the_images_ends_it_and_nothing_is_written(place, journal):
    put(place / "a.png", picture(0))

    def broken(path):
        raise FirmError("the device is gone")

    with pytest.raises(FirmError, match="the device is gone"):
        Days(*QUIET).watch(journal, place, decide=broken)
    assert read(journal) == []
    assert files(Days(*QUIET).watch(journal, place)) == ["a.png"]


@pytest.mark.parametrize("pace", [{"settle": -1}, {"patience": -1}, {"poll": 0}, {"poll": float("nan")}])
def test_spans_of_time_are_checked_at_once(place, journal, pace):
    with Journal(journal) as opened, pytest.raises(FirmError, match="use seconds"):
        watch([place], decided, opened, stop=lambda: True, **pace)


def test_what_cannot_be_watched_is_refused_at_once(place, journal):
    put(place / "a.png", picture(0))
    with Journal(journal) as opened:
        with pytest.raises(FirmError, match="is not a folder"):
            watch([place / "a.png"], decided, opened, stop=lambda: True)
        with pytest.raises(FirmError, match="name a folder"):
            watch([], decided, opened, stop=lambda: True)


# --- the journal ---

VALUES = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
LINES = st.lists(
    st.fixed_dictionaries(
        {"file": st.text(max_size=6), "stamp": st.lists(st.integers(0, 2**63), min_size=2, max_size=2), "x": VALUES}
    ),
    max_size=3,
    unique_by=lambda line: (line["file"], *line["stamp"]),
)


@settings(max_examples=25)
@given(lines=LINES, tail=st.sampled_from([b"", b"\0", b"\0" * 9]))
def test_cut_anywhere_it_keeps_every_whole_line(tmp_path_factory, lines, tail):
    folder, new = tmp_path_factory.mktemp("cut"), {"file": "new", "stamp": [-1, 0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # hundreds of journals need not wait for the disk
        with Journal(folder / "whole") as journal:
            for line in lines:
                journal.write(line)
            assert journal.lines == lines
        content = (folder / "whole").read_bytes()
        for length in range(len(content) + 1):
            (folder / f"{length}").write_bytes(content[:length] + tail)
            kept = lines[: content[:length].count(b"\n")]
            with Journal(folder / f"{length}") as journal:
                assert journal.path.read_bytes() == content[: content[:length].rfind(b"\n") + 1]
                assert journal.lines == kept
                assert [journal.knows(line["file"], line["stamp"]) for line in lines] == [one in kept for one in lines]
                journal.write(new)
                assert journal.lines == [*kept, new]


def test_a_line_without_its_end_is_not_whole(journal):
    put(journal, b'{"file": "a", "stamp": [1, 2]}')
    with Journal(journal) as opened:
        assert opened.lines == []
        assert not opened.knows("a", (1, 2))


def test_a_line_is_there_once_however_often_it_is_written(journal):
    line = {"file": "a.png", "stamp": [1, 2], "score": 0.5}
    for _ in range(2):
        with Journal(journal) as opened:
            opened.write(line)
            opened.write(line | {"score": 0.6})
            assert opened.knows("a.png", (1, 2))
            assert not any(opened.knows(*other) for other in [("b.png", (1, 2)), ("a.png", (2, 2)), ("a.png", (1, 3))])
    assert read(journal) == [line]


def test_every_line_is_on_the_disk_when_it_is_written(journal, monkeypatch):
    synced = []
    with Journal(journal) as opened:
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(journal.read_bytes()))
        for number in range(3):
            opened.write({"file": "a", "stamp": [number, 0]})
            assert synced[-1] == journal.read_bytes()
    assert len(synced) == 3


def test_the_second_to_open_it_is_refused_and_harms_nothing(journal):
    with Journal(journal) as opened:
        opened.write({"file": "a", "stamp": [1, 2]})
        journal.write_bytes(journal.read_bytes() + HEAD)  # as if the first were in the middle of a line
        with pytest.raises(FirmError, match="another process is writing"):
            Journal(journal)
        journal.with_name("link.jsonl").symlink_to(journal)
        with pytest.raises(FirmError, match="another process is writing"):
            Journal(journal.with_name("link.jsonl"))
        assert journal.read_bytes().endswith(HEAD)
        Journal(journal.with_name("other.jsonl")).close()  # each has its own claim
    Journal(journal).close()


@pytest.mark.parametrize(
    "content",
    [
        b"notes",
        b"\x89PNG\r\n\x1a\n",
        b"[1, 2]\n",
        b'{"file": "a", "stamp": [1, 2]}\n{"file": "b", "sta\n{"file": "c", "stamp": [1, 2]}\n',
        b'{"step": 1, "loss": 0.5}\n',
        b'{"step": 1, "lo',
    ],
)
def test_what_is_no_journal_is_refused_and_left_as_it_is(journal, content):
    put(journal, content)
    with pytest.raises(FirmError, match="is not one of a journal"):
        Journal(journal)
    assert journal.read_bytes() == content
    journal.unlink()
    Journal(journal).close()  # the claim was given back


def test_a_line_that_could_only_be_written_in_part(journal, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with Journal(journal) as opened:
        opened.write({"file": "a", "stamp": [1, 2]})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(FirmError, match="No space left"):
                opened.write({"file": "long" * 99, "stamp": [1, 2]})
        assert not opened.knows("long" * 99, (1, 2))
        opened.write({"file": "b", "stamp": [1, 2]})
    assert files(read(journal)) == ["a", "b"]


def test_a_journal_that_others_touched_is_not_written_over(journal):
    with Journal(journal) as opened:
        opened.write({"file": "a", "stamp": [1, 2]})
        journal.write_bytes(b"")
        with pytest.raises(FirmError, match="was shortened"):
            opened.write({"file": "b", "stamp": [1, 2]})
        assert journal.read_bytes() == b""
        journal.unlink()
        with pytest.raises(FirmError, match="cannot write"):
            opened.write({"file": "b", "stamp": [1, 2]})
        assert not journal.exists()


def test_a_closed_journal_is_not_written(journal):
    opened = Journal(journal)
    opened.close()
    with pytest.raises(FirmError, match="was closed"):
        opened.write({"file": "a", "stamp": [1, 2]})


def test_a_folder_is_no_journal(tmp_path):
    with pytest.raises(FirmError, match="cannot read"):
        Journal(tmp_path)


# --- killed ---


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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["in the middle of writing it", "as soon as it is written"])
def test_a_death_at_every_line_costs_none(place, journal, moment):
    for number in range(4):
        put(place / f"{number}.png", picture(number))

    def work():
        with Journal(journal) as opened:
            if moment == "in the middle of writing it":
                os.fsync = lambda _: die()
            for _ in watch([place], decided, opened, settle=0, stop=lambda: False):
                die()

    for number in range(4):
        assert ended_by(forked(work)) == signal.SIGKILL
        lines = read(journal)
        assert files(lines) == [f"{n}.png" for n in range(number + 1)]
        assert [line["digest"] for line in lines] == [digest(picture(n)) for n in range(number + 1)]


def test_what_was_not_written_is_decided_again(place, journal):
    put(place / "a.png", picture(0))

    def work():
        with Journal(journal) as opened:
            next(watch([place], lambda path: decided(path) and die(), opened, settle=0, stop=lambda: False))

    for _ in range(2):
        assert ended_by(forked(work)) == signal.SIGKILL
        assert read(journal) == []
    assert files(Days(*QUIET).watch(journal, place)) == ["a.png"]


def test_another_process_is_refused_while_this_one_lives(place, journal):
    with Journal(journal):
        assert ended_by(forked(lambda: Journal(journal) and die())) == 0  # refused, so it did not come to die
    assert ended_by(forked(lambda: Journal(journal) and die())) == signal.SIGKILL
    Journal(journal).close()  # a claim dies with its owner


KILLS, IMAGES = 25, 30
DEADLINE = 300


def until(condition):
    give_up = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def arrivals(place, chance):
    """Steps that bring the images: some renamed into place, the others written in pieces, many at the same time."""
    coming, contents = [], {}
    for number in range(IMAGES):
        name, content = f"{number:02d}.png", picture(number, side=24)
        contents[name] = content
        if number % 3 == 0:
            coming.append([lambda n=name, c=content: put_whole(place / n, c)])
        else:
            cuts = [0, *sorted(chance.sample(range(1, len(content) - 50), 3)), len(content)]
            pieces = [content[a:b] for a, b in pairwise(cuts)]
            coming.append([lambda n=name, p=piece: append(place / n, p) for piece in pieces])
    steps = []
    while coming:
        one = chance.choice(coming[:6])
        steps.append(one.pop(0))
        coming = [other for other in coming if other]
    return steps, contents


def put_whole(path, content):
    put(path.with_name(path.name + ".part"), content)
    os.rename(path.with_name(path.name + ".part"), path)


def append(path, piece):
    with path.open("ab") as file:
        file.write(piece)


def test_killed_again_and_again_every_image_has_one_line(place, journal):
    chance = random.Random(5)
    steps, contents = arrivals(place, chance)
    deaths = set(chance.sample(range(len(steps)), KILLS))

    def work():
        with Journal(journal) as opened:
            for _ in watch([place], decided, opened, settle=0.004, poll=0.002, patience=1e6, stop=lambda: False):
                pass

    def written():
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    pid = forked(work)
    try:
        for number, step in enumerate(steps):
            step()
            time.sleep(chance.uniform(0, 0.01))  # only so that deaths come at various moments
            if number in deaths:
                os.kill(pid, signal.SIGKILL)
                assert ended_by(pid) == signal.SIGKILL
                pid = forked(work)
        until(lambda: written() >= IMAGES)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert ended_by(pid) == signal.SIGKILL
    with Journal(journal) as opened:  # whatever the last death left
        lines = opened.lines
    assert Counter(files(lines)) == Counter(contents.keys())
    assert {line["file"]: line["digest"] for line in lines} == {name: digest(one) for name, one in contents.items()}
    assert Days(*QUIET).watch(journal, place) == []
