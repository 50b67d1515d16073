"""Which learnt features are compared: tried on good images that were spared, whose draws never reach the training."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import contracts
from firm.adaptor import Adapted, Pretrained
from firm.bank import Memory
from firm.cells import Cells, CellTask, Choosable, Spare, good_groups
from firm.embedding import FEWEST, MOST_SPARED, spare_images
from firm.fitting import as_data
from firm.images import Preprocessing
from firm.preferring import BEFORE, BEHIND, _judged, prefer
from firm.recipes.presets import ADAPTED
from firm.recipes.recipe import change
from firm.streams import stream
from firm.tiling import Grid
from firm.training import Training

IMAGES, ROWS, PER = 24, 6, 2
GRID = Grid(size=8, stride=8, sigma=0)
SETTINGS = Pretrained(name="x", stages=(1,))
OPEN = change(
    ADAPTED,
    {"tiling": GRID, "pretrained": SETTINGS, "memory": Memory(standardise=True), "automatic": ["features"]},
)
FACTS = SimpleNamespace(channels=(1,), stages=(1,), strides=(8,), name="x")


class Told(Adapted):
    """A network by hand: number 0 is the backbone's, 1 and 2 lie before the head, 3 and 4 behind it."""

    def __init__(self):
        nn.Module.__init__(self)
        self.backbone = SimpleNamespace(facts=FACTS)

    def adapt(self, features):
        return features[..., 1:3].float()

    def project(self, features):
        return features[..., 3:5].float()


def features_of(images, rng, *, clear, altered=None):
    """Every number is the same noise for good and bad; only the `clear` ones move where a cell is altered."""
    found = torch.rand(images, ROWS, ROWS, 5, generator=rng) * 0.1
    found[..., [2, 4]] += 1.0  # a direction for the cosine to turn
    if altered is not None:
        for number in clear:
            found[..., number] += 2.0 * altered
    return found.half()


def task_of(clear, *, spare=True):
    rng = contracts.generator(3)
    altered = torch.zeros(IMAGES * PER, ROWS, ROWS)
    altered[:, 2:4, 3] = 1.0
    altered[:, 4, 3] = 0.3  # neither good nor bad
    good, bad = features_of(IMAGES, rng, clear=()), features_of(IMAGES * PER, rng, clear=clear, altered=altered)
    shown = torch.ones(IMAGES, 8 * ROWS, 8 * ROWS, dtype=torch.bool)
    kept = Spare(torch.arange(0, IMAGES, 4), shown, None, altered) if spare else None
    cells = Cells(good, Choosable(good[..., 0] > -1), good_groups(IMAGES))
    outliers = Cells(bad, Choosable(altered > 0.5), torch.ones(len(bad), dtype=torch.long))
    return CellTask(
        cells, outliers, None, SETTINGS, Preprocessing(48), "firm", 0.15, Training(epochs=1, batch=8), 0, "key", kept
    )


@pytest.mark.parametrize(("clear", "best"), [((3,), BEHIND), ((1,), BEFORE), ((1, 3), BEFORE), ((), BEFORE)])
def test_what_tells_defects_on_spare_images_apart_is_taken(clear, best):
    told = []
    chosen = prefer(OPEN, Told(), task_of(clear), seed=0, on_choice=told.append)
    assert chosen == replace(OPEN, features=best, automatic=())
    assert [line.split(":")[0] for line in told] == [
        f"tried features {BEFORE}", f"tried features {BEHIND}", f"chosen: features {best}".split(":")[0]
    ]  # fmt: skip
    assert told[-1].startswith(f"chosen: features {best}: ")


def test_what_is_not_left_open_or_cannot_be_tried_stays():
    closed = replace(OPEN, automatic=())
    assert prefer(closed, Told(), task_of((3,)), seed=0) is closed
    assert prefer(OPEN, Told(), task_of((3,), spare=False), seed=0) == closed
    near = replace(OPEN, memory=replace(OPEN.memory, reach=1))  # a mean behind the head knows no places
    assert prefer(near, Told(), task_of((3,)), seed=0) == replace(near, automatic=())


def test_learnt_images_are_not_tried_on():
    """Defects that show on learnt images alone are no reason."""
    task = task_of((3,))
    spared = torch.isin(torch.arange(IMAGES * PER) % IMAGES, task.spare.images)
    task.outliers.features[spared] = task_of(()).outliers.features[spared]
    assert prefer(OPEN, Told(), task, seed=0).features == BEFORE


def test_judged_is_the_mean_over_pairs_of_images_and_of_cells():
    rng = contracts.generator(5)
    scores, cells = torch.rand(7, generator=rng), torch.rand(7, 3, 3, generator=rng)
    altered = torch.tensor([0.0, 0.3, 0.5, 1.0])[torch.randint(4, (7, 3, 3), generator=rng)]

    def pairs(good, bad):
        return sum((b > g) + 0.5 * (b == g) for g, b in product(good, bad)) / (len(good) * len(bad))

    of_images = pairs(scores[:3].tolist(), scores[3:].tolist())
    of_cells = pairs(cells[altered == 0].tolist(), cells[altered >= 0.5].tolist())
    assert _judged(scores, cells, altered, 3) == pytest.approx((of_images + of_cells) / 2, abs=1e-6)
    thin = altered.clamp(max=0.3)  # scratches that fill no cell
    assert _judged(scores, cells, thin, 3) == pytest.approx(of_images, abs=1e-6)


# --- sparing ---


def folder_of(images):
    rng = contracts.generator(images)
    return as_data(torch.randint(0, 255, (images, 3, 64, 64), dtype=torch.uint8, generator=rng))


def test_a_tenth_is_spared_of_many_images_and_none_of_few_or_unasked():
    assert spare_images(OPEN, folder_of(FEWEST - 1), seed=0) is None
    assert spare_images(replace(OPEN, automatic=()), folder_of(FEWEST), seed=0) is None
    assert spare_images(change(OPEN, {"training.epochs": 0}), folder_of(FEWEST), seed=0) is None
    near = replace(OPEN, memory=replace(OPEN.memory, reach=1))
    assert spare_images(near, folder_of(FEWEST), seed=0) is None  # nothing to choose, so none is lost for it
    assert len(spare_images(OPEN, folder_of(FEWEST), seed=0)) == FEWEST // 10
    assert len(spare_images(OPEN, folder_of(20 * MOST_SPARED), seed=0)) == MOST_SPARED


@pytest.mark.parametrize("evenly", ["images", "cells"])
def test_spare_images_are_never_drawn(evenly):
    drawn = torch.arange(10) % 3 > 0
    choosable = Choosable(torch.ones(10, 2, 2, dtype=torch.bool), evenly=evenly, drawn=drawn)
    found = choosable.draw_images(2_000, rng=stream(0, "x")).bincount(minlength=10)
    assert ((found > 0) == drawn).all()
    assert found[drawn].float().std() < 40  # about 333 of each
