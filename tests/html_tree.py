"""Inspected images and the elements of a page, for the tests of the report."""

import base64
import io
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from firm.decision.verdict import Region, Verdict
from firm.detector.inspection import InspectedImage

VOID = {"meta", "img", "input", "br", "link", "hr"}
REGIONS = (Region((2, 3, 8, 11), 30, 1.25), Region((20, 4, 24, 9), 12, 2.5))
HOSTILE = ["<script>alert(1)</script>.png", "\"'>&amp;.png", "caf\udce9.png", "=cmd|' /C calc'!A0", "a\nb\u202e.png"]


def verdict_of(name="a.png", score=1.0, verdict="PASS", regions=()):
    return Verdict(name, score, verdict, tuple(regions), "model-1", "calibration-1", 2.0, 3.0)


def shown_of(name="a.png", score=1.0, verdict="PASS", regions=(), nearest=None, height=30, width=40, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    heat = np.linspace(0, 4, height * width, dtype=np.float32).reshape(height, width)
    return InspectedImage(verdict_of(name, score, verdict, regions), pixels, heat, nearest)


def batch():
    """Out of order, with every verdict, regions, nearest parts and names that mean harm."""
    good = np.full((30, 40, 3), 90, np.uint8)
    return [
        shown_of("ok 1.png", 0.5),
        shown_of(HOSTILE[0], 5.0, "FAIL", REGIONS, good),
        shown_of("maybe.png", 2.5, "REVIEW", REGIONS[:1]),
        shown_of(HOSTILE[1], 9.0, "FAIL", REGIONS[1:]),
        shown_of("ok 2.png", 0.75, "PASS", (), good),
        shown_of(HOSTILE[2], 3.5, "FAIL"),
    ]


class Tree(HTMLParser):
    """What a browser would find: elements with their attributes, text by element; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), f"{tag} says an attribute twice"
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag, kind=None):
        return [a for name, a in self.elements if name == tag and (kind is None or kind in a.get("class", "").split())]

    def said(self):
        return [text for tag, text in self.texts if tag not in ("style", "script")]


def pixels_of(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))
