"""The journal of a watch: every line that was written is there, whatever dies, and nothing else is."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.deploy.journal import HEAD, Journal
from firm.errors import DataError, MachineError, SettingError


@pytest.fixture
def journal(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "journal.jsonl"


def read(journal):
    return [json.loads(line) for line in journal.read_text().splitlines()]


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
    journal.write_bytes(b'{"file": "a", "stamp": [1, 2]}')
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
        with pytest.raises(MachineError, match="jsonl"):
            Journal(journal)
        journal.with_name("link.jsonl").symlink_to(journal)
        with pytest.raises(MachineError, match="jsonl"):
            Journal(journal.with_name("link.jsonl"))
        assert journal.read_bytes().endswith(HEAD)
        Journal(journal.with_name("other.jsonl")).close()  # each has its own lock
    Journal(journal).close()


@pytest.mark.parametrize(
    "content",
    [
        b"notes",
        b"[1, 2]\n",
        b'{"file": "a", "stamp": [1, 2]}\n{"file": "b", "sta\n{"file": "c", "stamp": [1, 2]}\n',
        b'{"step": 1, "loss": 0.5}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_journal_is_refused_and_left_as_it_is(journal, content):
    journal.write_bytes(content)
    with pytest.raises(DataError, match=r"line [12] of"):
        Journal(journal)
    assert journal.read_bytes() == content
    journal.unlink()
    Journal(journal).close()  # the lock was released


def test_a_line_that_could_only_be_written_in_part(journal, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with Journal(journal) as opened:
        opened.write({"file": "a", "stamp": [1, 2]})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(MachineError, match="No space left"):
                opened.write({"file": "long" * 99, "stamp": [1, 2]})
        assert not opened.knows("long" * 99, (1, 2))
        opened.write({"file": "b", "stamp": [1, 2]})
    assert [line["file"] for line in read(journal)] == ["a", "b"]


def test_a_journal_that_others_touched_is_not_written_over(journal):
    with Journal(journal) as opened:
        opened.write({"file": "a", "stamp": [1, 2]})
        journal.write_bytes(b"")
        with pytest.raises(DataError, match="jsonl"):
            opened.write({"file": "b", "stamp": [1, 2]})
        assert journal.read_bytes() == b""
        journal.unlink()
        with pytest.raises(MachineError, match="jsonl"):
            opened.write({"file": "b", "stamp": [1, 2]})
        assert not journal.exists()


def test_a_closed_journal_is_not_written(journal):
    opened = Journal(journal)
    opened.close()
    with pytest.raises(SettingError, match="jsonl"):
        opened.write({"file": "a", "stamp": [1, 2]})


def test_a_folder_is_no_journal(tmp_path):
    with pytest.raises(MachineError):
        Journal(tmp_path)
