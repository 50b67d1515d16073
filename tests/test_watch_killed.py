"""A watch that is killed: every image still has one line in the journal."""

import os
import random
import signal
import time
from collections import Counter
from itertools import pairwise

import pytest

from firm.deploy.journal import Journal
from firm.deploy.watch import watch
from watching import QUIET, Days, decided, digest, files, picture, put, read

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "out" / "journal.jsonl"


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
    Journal(journal).close()  # a lock dies with its owner


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
