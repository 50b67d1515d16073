"""Watched folders for the tests: images that arrive, a clock that moves only in sleep, and what a test decides."""

import hashlib
import json
import os

import numpy as np

from firm.deploy.journal import Journal
from firm.deploy.watch import watch
from firm.errors import ImageError
from firm.images.decode import decode
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
        raise ImageError(f"{path} {error.strerror}", path) from error
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
