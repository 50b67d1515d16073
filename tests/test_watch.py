"""Watching: every image is decided when it is whole, once, and the journal survives any death."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from firm.deploy.journal import Journal
from firm.deploy.watch import watch
from firm.errors import DataError, FirmError
from watching import QUIET, Days, decided, digest, files, picture, put, read


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


def test_every_line_has_the_time_of_its_decision(place, journal):
    put(place / "a.png", picture(0), 10)
    put(place / "b.png", b"no image", 10)
    before = datetime.now(UTC) - timedelta(seconds=1)
    lines = Days(*[None] * 30).watch(journal, place)
    assert {"digest", "unreadable"} <= {key for line in lines for key in line}
    for line in read(journal):
        when = datetime.fromisoformat(line["time"])
        assert when.utcoffset() == timedelta(0)
        assert before <= when <= datetime.now(UTC)


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
    assert line.pop("time")
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
    assert lines[0].keys() == {"file", "stamp", "time", "unreadable"}
    assert "cannot be decoded" in lines[0]["unreadable"]
    assert lines[1]["digest"] == digest(picture(0))
    assert Days(*[None] * 40).watch(journal, place) == []


def test_patience_counts_from_the_last_change(place, journal):
    grow = [lambda n=n: put(place / "a.png", picture(0)[:n], n) for n in range(50, 80)]
    assert Days(*grow, *QUIET).watch(journal, place) == []
    (line,) = Days(*[None] * 12).watch(journal, place)
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
    assert [str(place) in text for text in days.said] == [True, True]  # when it went, and when it was back


def test_a_folder_may_come_later_and_costs_the_others_nothing(place, journal, tmp_path):
    put(place / "a.png", picture(0))
    late = tmp_path / "late"
    days = Days(*QUIET, lambda: put(late / "b.png", picture(1)), *QUIET)
    assert files(days.watch(journal, place, late)) == ["in/a.png", "late/b.png"]
    assert [str(late) in text for text in days.said] == [True, True]


def test_a_folder_inside_that_cannot_be_listed_is_no_image(place, journal, monkeypatch):
    put(place / "sub" / "a.png", picture(0))
    locked, scandir = [place / "sub"], os.scandir

    def refusing(folder):
        if Path(folder) in locked:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    days = Days(*[None] * 30, locked.clear, *QUIET)
    assert files(days.watch(journal, place)) == ["sub/a.png"]
    assert [str(place / "sub") in text for text in days.said] == [True, True]


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


def test_a_file_cannot_be_watched(place, journal):
    put(place / "a.png", picture(0))
    with Journal(journal) as opened, pytest.raises(DataError, match=r"a\.png"):
        next(watch([place / "a.png"], decided, opened, stop=lambda: True))
