"""firm sia, and firm fit --outliers sia: from good images to anomalies in one command, resumed, with a small model."""

import json
import sys

import cv2
import pytest
import torch

from commands import run
from firm.cli.sia import product_name
from firm.drawn.render import write_folder
from firm.errors import MachineError

SMALL = ("--set=size=64", "--set=training.epochs=1", "--set=pretrained.margin=0", "--set=training.batch=64")
SMALL += ("--encoder=wavelets", "--set=pretrained.hidden=[16]", "--set=pretrained.out=8", "--threads=1")


@pytest.fixture(scope="module")
def plates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=64, train=24, good=2, bad=2)
    return folder


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A denoiser of 16 px, a few steps, and a cache of its own."""
    pytest.importorskip("diffusers", reason="needs the extra `diffusion`")
    from firm.diffusion.model import SIZES, Denoiser
    from firm.diffusion.train import LEARNING, Learning

    monkeypatch.setitem(SIZES, "tiny", Denoiser(side=16, channels=(32, 32), attention=(8,)))
    monkeypatch.setitem(LEARNING, "tiny", Learning(steps=3, batch=2))
    monkeypatch.setenv("FIRM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(small, plates, tmp_path):
    code, out, err = run("sia", "train", plates, "-o", tmp_path / "part.sia", "--threads=1", "--json", "--batch=4")
    assert code == 0, err
    assert json.loads(out)["classes"] == ["plates"]
    return tmp_path / "part.sia"


def test_a_model_is_trained_and_its_cost_is_told_first(small, plates, tmp_path):
    code, out, err = run("sia", "train", plates, "-o", tmp_path / "part.sia", "--threads=1", "--steps=2", "--verbose")
    assert code == 0, err
    assert "at 16 px, 2 steps of 2 images: about" in err
    assert err.index("on this machine") < err.index("samples-")
    assert "part.sia" in out
    sheets = sorted((tmp_path / "part.sia.run").glob("samples-*.png"))
    assert [sheet.name for sheet in sheets] == ["samples-0000001.png", "samples-0000002.png"]
    assert cv2.imread(str(sheets[0])) is not None


def test_samples_fill_a_folder_and_are_kept(model, plates, tmp_path):
    command = (
        "sia",
        "sample",
        model,
        "--strength=.1:.2",
        "-n",
        "5",
        "-o",
        tmp_path / "sdas",
        "--steps=2",
        "--threads=1",
    )
    code, _, err = run(*command)
    assert code == 0, err
    files = sorted((tmp_path / "sdas" / "plates").glob("*.jpg"))
    assert [file.name for file in files] == [f"{number:05d}.jpg" for number in range(5)]
    assert cv2.imread(str(files[0])).shape == (16, 16, 3)
    times = {file: file.stat().st_mtime_ns for file in files}
    assert run(*command).code == 0
    assert times == {file: file.stat().st_mtime_ns for file in files}
    shown = ("--source=sia", "--set=outliers=sia", f"--set=outliers.folder={tmp_path / 'sdas' / 'plates'}")
    code, _, err = run("outliers", plates, *shown, "-o", tmp_path / "outliers.png")
    assert code == 0, err
    code, _, err = run(*(part if part != "--strength=.1:.2" else "--strength=.3" for part in command))
    assert code == 2
    assert "another model or other settings" in err
    code, _, err = run(*command[:3], "--strength=much", "-o", tmp_path / "x")
    assert code == 2
    assert "much" in err


def test_a_sheet_shows_good_images_strengths_and_blends(model, plates, tmp_path):
    code, out, err = run(
        "sia", "sheet", model, plates, "-o", tmp_path / "sheet.png", "--steps=2", "--threads=1", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["rows"] == ["normal", "s = 0", "s = 0.1", "s = 0.2", "s = 0.4", "blended"]
    assert cv2.imread(str(tmp_path / "sheet.png")).shape[0] > 500


def test_a_fit_trains_samples_and_uses_it(small, plates, tmp_path, monkeypatch):
    """In one command; a second fit, of another seed, shares the images; a killed sampling goes on."""
    command = ("fit", plates, *SMALL, "--outliers=sia", "--set=outliers.images=6", "--set=outliers.per_inlier=1")
    code, _, err = run(*command, "-o", tmp_path / "a.firm")
    assert code == 0, err
    assert err.index("a diffusion model of") < err.index("training:")
    assert "at 16 px, 3 steps of 2 images and 6 samples: about" in err
    (folder,) = (tmp_path / "cache" / "sia").iterdir()
    images = sorted((folder / "images-6" / "part").glob("*.jpg"))
    assert len(images) == 6
    assert not (folder / "run" / "checkpoint.safetensors").exists()
    card = json.loads((tmp_path / "a.firm" / "card.json").read_text())
    assert card["recipe"]["outliers"]["kind"] == "sia"
    assert card["recipe"]["outliers"]["folder"] == f"sia/{folder.name}/images-6/part"
    assert card["recipe"]["outliers"]["per_inlier"] == 1

    before = {image: image.read_bytes() for image in images}
    images[2].unlink()
    monkeypatch.setattr("firm.detector.generate.learn_images", None)  # not trained again
    code, _, err = run(*command, "--seed=1", "-o", tmp_path / "b.firm")
    assert code == 0, err
    assert {image: image.read_bytes() for image in images} == before


def test_a_folder_of_images_needs_no_diffusers(plates, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "sdas").mkdir()
    for number in range(4):
        pixels = torch.randint(256, (64, 64, 3), generator=generator).numpy()
        cv2.imwrite(str(tmp_path / "sdas" / f"{number}.jpg"), pixels)
    given = (f"--set=outliers.folder={tmp_path / 'sdas'}", "--set=outliers.per_inlier=1")
    code, _, err = run("fit", plates, *SMALL, "--outliers=sia", *given, "-o", tmp_path / "a.firm")
    assert code == 0, err
    code, _, err = run("fit", plates, *SMALL, "--outliers=sia", "-o", tmp_path / "b.firm")
    assert code == 2
    assert "firm[diffusion]" in err
    code, _, err = run("sia", "train", plates, "-o", tmp_path / "part.sia")
    assert code == 2
    assert "diffusers" in err


def test_outliers_of_a_fit_are_as_many_as_the_preset_has():
    from firm.cli.fit import _chosen

    assert _chosen("sia", "adapted") == ["outliers=sia", "outliers.per_inlier=6"]
    assert _chosen("nsa", "inspect") == ["outliers=nsa", "outliers.per_inlier=1"]
    assert _chosen("rotations", "fast") == ["outliers=rotations"]


def test_a_product_is_named_by_its_set_or_folder():
    assert product_name("mvtec:screw") == "screw"
    assert product_name("data/bolt/train/good") == "bolt"
    assert product_name("./parts/") == "parts"
    assert product_name("my parts") == "my-parts"
    assert product_name("good") == "part"


def test_the_papers_setting_is_one_command():
    """Patch sizes by category, 32/16 in testing, resized maps; a smaller generator below the paper's scale."""
    from firm.data.registry import DATASETS
    from firm.research.tables import TABLES, experiment, narrowed

    table = narrowed(TABLES["mvtec"], (), {"outliers": "sia"})
    for category in DATASETS["mvtec"].classes:
        made = experiment(table, f"mvtec:{category}", "firm", "paper", 0).recipe
        assert {16, 32} <= set(made.views.sizes) <= {16, 32, 48, 64}
        assert (made.tiling.size, made.tiling.stride, made.tiling.register) == (32, 16, "resize")
        assert (made.outliers.model, made.outliers.images, made.training.epochs) == ("paper", 10_000, 2000)
    small = experiment(table, "mvtec:screw", "firm", "smoke", 0).recipe.outliers
    assert (small.model, small.steps, small.images) == ("tiny", 4, 4)
    assert experiment(table, "mvtec:screw", "firm", "short", 0).recipe.outliers.steps == 0
    here = experiment(TABLES["sia-patches"], "mvtec:screw", "firm", "short", 0)
    assert here.key == experiment(table, "mvtec:screw", "firm", "short", 0).key
    own = narrowed(TABLES["mvtec"], (), {"outliers": "sia", "outliers.folder": "sdas/{class}", "views.sizes": [48]})
    given = experiment(own, "mvtec:screw", "firm", "paper", 0).recipe
    assert (given.outliers.folder, given.outliers.model, given.views.sizes) == ("sdas/screw", "tiny", (48,))
    plain = experiment(TABLES["mvtec"], "mvtec:screw", "firm", "paper", 0).recipe
    assert (plain.views.sizes, plain.tiling.register) == ((32,), "centred")


def test_sia_and_its_rivals_are_trained_equally_long():
    from firm.research.tables import TABLES, experiment

    rows = ("firm, sia", "firm, donor", "firm, nsa")
    recipes = [experiment(TABLES["sia"], "mvtec:screw", row, "short", 0).recipe for row in rows]
    assert len({(each.training, each.outliers.per_inlier, each.views) for each in recipes}) == 1
    assert len({type(each.outliers) for each in recipes}) == 3


def test_the_cost_of_a_generator_is_counted_once_per_class(small, monkeypatch):
    from firm.research import budget
    from firm.research.tables import TABLES, narrowed, plan

    monkeypatch.setattr(budget, "_seconds", lambda _: 0.0)
    monkeypatch.setattr(budget, "generator_cost", lambda _: budget.Cost(1, 2.0, 0.5))
    table = narrowed(
        TABLES["mvtec"], ["screw", "tile"], {"outliers": "sia", "outliers.steps": 100, "outliers.images": 8}
    )
    hours, unknown = budget.hours(plan(table, "short", [0, 1]))
    assert unknown == 0
    assert hours == pytest.approx(2 * (100 * 2.0 + 8 * 0.5) / 3600)


def test_a_missing_package_is_told_in_one_sentence(monkeypatch):
    from firm.diffusion.model import Denoiser, build

    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MachineError, match=r"diffusers.*firm\[diffusion\]"):
        build(Denoiser(), seed=0)
