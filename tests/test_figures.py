"""The figures: the claim of the mechanism, the landscape against naive loops, and every figure from crafted records."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from commands import run
from firm.research import figures
from firm.research.experiment import record_path
from firm.research.figures import FIGURES, trained
from firm.research.landscape import INLIERS, OUTLIERS, TEMPERATURE, configuration, landscape
from firm.research.mechanism import HELD, LABELS, NOISES, PROPERTIES, Mixture, embed, measure, turned
from firm.research.probes import properties
from firm.research.tables import TABLES, experiment, plan
from firm.runtime.listener import SILENT
from firm.training.positives import POSITIVES

STORED = Path("results/runs")
SCORES = ("s_con k=1", "s_con* k=1")


def craft(folder: Path, seeds: list[int], *, with_properties: bool = True) -> None:
    """Records of every run that a figure needs at smoke scale."""
    for name in ("objectives", "temperature", "batch-size"):
        for number, asked in enumerate(plan(TABLES[name], "smoke", seeds)):
            value = {"value": 0.6 + 0.01 * (number % 7), "low": 0.5, "high": 0.9}
            numbers = dict.fromkeys(PROPERTIES, 0.1 * (number % 5)) | {"margin": None if number == 3 else 0.5}
            probes = [
                {"step": step, SCORES[0]: value} | ({"properties": numbers} if with_properties else {})
                for step in (5, 10)
            ]
            record = {
                "experiment": asked.content,
                "recipe": {"training": {"epochs": 1}},
                "steps": 10,
                "probes": probes,
                "diagnostics": {"step": 10} | numbers,
                "final": dict.fromkeys(SCORES, value),
            }
            record_path(folder, asked).write_text(json.dumps(record))


def colours(path: Path) -> int:
    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(2**24) or [])


@pytest.mark.parametrize("noise", NOISES)
def test_firm_has_all_three_properties_and_each_rival_loses_one(noise):
    """The claim of section 4, in 32 dimensions with every seed; what is lost is lost with every seed too."""
    for seed in (0, 1):
        mixture = Mixture(seed=seed, noise=noise)
        values = {name: measure(embed(mixture, name, 32)) for name in LABELS}
        assert all(values["firm"][name] > HELD for name in PROPERTIES)
        assert values["supcon"]["outlier_spread"] < HELD < values["supcon"]["compactness"]
        assert values["ntxent"]["compactness"] < HELD < values["ntxent"]["outlier_spread"]
        assert values["rot-supcon"]["kind_spread"] < HELD < values["firm"]["kind_spread"]


def test_the_mechanism_depends_on_the_seed_alone():
    short = [embed(Mixture(seed=seed, steps_per_epoch=5), "firm", 2) for seed in (0, 0, 1)]
    assert torch.equal(short[0]["anomalies"], short[1]["anomalies"])
    assert not torch.equal(short[0]["anomalies"], short[2]["anomalies"])


def test_four_quarter_turns_are_none_and_no_turn_is_another():
    points, ones = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)), torch.ones(6, dtype=torch.long)
    assert torch.equal(turned(points, 0 * ones), points)
    assert torch.equal(turned(turned(points, ones), 3 * ones), points)
    assert torch.equal(turned(turned(points, ones), ones), turned(points, 2 * ones))
    group = Mixture(seed=0).batch(0).group
    assert [(group == kind).sum().item() for kind in range(4)] == [16] * 4


@pytest.mark.parametrize("name", ["ntxent", "supcon", "firm"])
def test_the_landscape_is_the_loss_by_naive_loops(name):
    arcs = torch.tensor([0.0, 1.3, 4.0], dtype=torch.float64)
    values = landscape(name, arcs)
    for row, column in ((0, 0), (1, 2), (2, 0)):
        z = configuration(float(arcs[column]), float(arcs[row])).tolist()
        assert float(values[row, column]) == pytest.approx(naive_loss(z, name), rel=1e-9)


def naive_loss(z: list[list[float]], name: str) -> float:
    """Equation 5, where an anchor's positives are found from what each image is."""
    images, total = INLIERS + OUTLIERS, 0.0
    for i, anchor in enumerate(z):
        similar = [math.exp(sum(a * b for a, b in zip(anchor, other, strict=True)) / TEMPERATURE) for other in z]
        inlier, image = i % images < INLIERS, i % images
        positives = []
        for j in range(len(z)):
            alike = {
                "ntxent": False,
                "supcon": inlier == (j % images < INLIERS),
                "firm": inlier and j % images < INLIERS,
            }[name]
            if j != i and (j % images == image or alike):
                positives.append(j)
        below = sum(similar) - similar[i]
        total += sum(-math.log(similar[j] / below) for j in positives) / len(positives)
    return total / len(z)


def test_the_minimum_of_each_landscape_is_what_its_positive_set_asks_for():
    arcs = torch.linspace(0, 2 * torch.pi, 25, dtype=torch.float64)
    best = {name: divmod(int(landscape(name, arcs).argmin()), 25) for name in ("ntxent", "supcon", "firm")}
    assert best["supcon"] == (0, 0)
    assert best["firm"][1] == 0 < best["firm"][0]
    assert min(best["ntxent"]) > 0


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_at_smoke_scale(name, tmp_path):
    craft(tmp_path, [0, 1])
    settings = {"scale": "smoke", "seeds": [0, 1], "folder": tmp_path, "listener": SILENT}
    files = FIGURES[name].draw(tmp_path, **settings)
    assert files[0].name == f"{name}.png"
    assert colours(files[0]) > 100
    assert all(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", ["learning-curves", "positive-sets", "temperature-batch-size"])
def test_a_figure_of_runs_draws_what_there_is(name, tmp_path):
    draw = FIGURES[name].draw
    settings = {"scale": "smoke", "folder": tmp_path, "listener": SILENT}
    assert draw(tmp_path, seeds=[0], **settings) == []
    craft(tmp_path, [0], with_properties=False)
    assert draw(tmp_path, seeds=[0, 1], **settings)
    for table, row in (("objectives", "supcon"), ("temperature", "0.5"), ("batch-size", "2048")):
        for data in TABLES[table].data:
            record_path(tmp_path, experiment(TABLES[table], data, row, "smoke", 0)).unlink()
    (path,) = draw(tmp_path, seeds=[0, 1], **settings)
    assert colours(path) > 100


def test_the_legend_names_what_any_of_the_axes_shows(tmp_path, monkeypatch):
    """A row that has not run on the first data set is drawn on the second."""
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, _: drawn.append(figure))
    craft(tmp_path, [0])
    table = replace(TABLES["objectives"], data=["cifar10:horse", "fashion-mnist:sandal"])
    record_path(tmp_path, experiment(table, "cifar10:horse", "rot-supcon", "smoke", 0)).unlink()
    figures.draw_curves(table, "smoke", [0], tmp_path, tmp_path / "curves.png")
    (legend,) = drawn[0].legends
    assert "rot-supcon" in [text.get_text() for text in legend.get_texts()]


def test_the_page_shows_every_figure_and_says_what_is_missing(tmp_path):
    page, out = (
        tmp_path / "figures.md",
        run("bench", "report", "figures", "--out", tmp_path / "figures.md", "--seeds=1"),
    )
    assert out.code == 0
    text = page.read_text(encoding="utf-8")
    assert all(f"## {picture.title}" in text for picture in FIGURES.values())
    assert "| 32-D | 1.0 | FIRM |" in text
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert {"mechanism.png", "landscape.png", "gallery.png"} <= set(shown)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*shown, "figures.md"])


def test_a_figure_says_which_runs_it_needs(tmp_path):
    out = ("--out", tmp_path / "page.md", "--results", tmp_path / "none")
    assert run("bench", "report", "learning-curves", *out).code == 0
    assert "Needs runs of `objectives`" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_a_probe_holds_the_properties_of_the_last_batch_logged_before_it():
    lines = [
        {"step": step, "loss": 1.0, "compactness": step / 100, "margin": None, "outlier_spread": 1.0}
        for step in (10, 20)
    ]
    training = type("Run", (), {"history": type("History", (), {"lines": [*lines, {"step": 25, "probe": {}}]})})
    assert properties(training, 19)["properties"]["compactness"] == 0.1
    assert properties(training, 25)["properties"] == {"compactness": 0.2, "margin": None, "outlier_spread": 1.0}
    assert properties(training, 9) == {}


def test_the_sweeps_hold_the_papers_values():
    sweeps = {
        name: [
            experiment(TABLES[name], "cifar10:bird", row, "paper", 0).recipe.training for row in trained(TABLES[name])
        ]
        for name in ("temperature", "batch-size")
    }
    assert [each.temperature for each in sweeps["temperature"]] == [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5]
    assert [each.batch for each in sweeps["batch-size"]] == [2**power for power in range(4, 12)]
    assert set(LABELS) == set(POSITIVES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_the_mechanism_holds_with_further_seeds(seed):
    for noise in NOISES:
        values = {name: measure(embed(Mixture(seed=seed, noise=noise), name, 32)) for name in LABELS}
        assert all(values["firm"][name] > HELD for name in PROPERTIES)
        assert values["supcon"]["outlier_spread"] < HELD
        assert values["ntxent"]["compactness"] < HELD
