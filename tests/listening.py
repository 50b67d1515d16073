"""A listener that keeps what it hears."""

from __future__ import annotations

from firm.runtime.listener import Listener


class Heard(Listener):
    """The lines of every level, and the stages in their order with how much of each was done."""

    def __init__(self):
        self.lines, self.details, self.warnings, self.stages = [], [], [], {}

    def say(self, text):
        self.lines.append(text)

    def detail(self, text):
        self.details.append(text)

    def warn(self, text):
        self.warnings.append(text)

    def progress(self, stage, done, total, note=""):
        self.stages[stage] = (done, total)
