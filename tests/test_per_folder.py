"""firm fit --per-folder: a detector for each product, what is finished is kept, what fails costs itself alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import run
from firm.detector.detector import Detector
from firm.detector.model_folder import CARD
from firm.detector.read import Good
from firm.drawn.render import write_folder
from firm.errors import Stopped

CHEAP = (
    "--preset=inspect", "--set=features=pixels", "--set=training.epochs=0", "--set=training.batch=8",
    "--set=encoder.width=8", "--set=size=48", "--set=encoder.head.hidden=[8]", "--set=automatic=[]",
    "--set=memory.neighbourhood=1", "--set=tiling.size=16", "--set=tiling.stride=8",
)  # fmt: skip
NAMES = ["label", "plate", "weave"]


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three products, each in another layout, and a folder that is hidden."""
    tree = tmp_path_factory.mktemp("data") / "line"
    for product in NAMES:
        write_folder(tree / product, product, size=48, train=10, good=1, bad=1)
    shutil.move(tree / "label" / "train" / "good", tree / "label" / "good")
    for rest in ("train", "test", "ground_truth"):
        shutil.rmtree(tree / "label" / rest)
    for file in (tree / "weave" / "train" / "good").iterdir():
        shutil.move(file, tree / "weave" / file.name)
    for rest in ("train", "test", "ground_truth"):
        shutil.rmtree(tree / "weave" / rest)
    (tree / ".cache").mkdir()
    return tree


@pytest.fixture(scope="module")
def fitted(drawings: Path) -> tuple[Path, tuple[int, str, str]]:
    """All three learnt, and what was said."""
    out = drawings.parent / "models"
    return out, run("fit", drawings, "--per-folder", "-o", out, *CHEAP)


@pytest.fixture
def tree(drawings: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawings, tmp_path / "line"))


@pytest.fixture
def models(fitted: tuple[Path, tuple[int, str, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(fitted[0], tmp_path / "models"))


def again(tree: Path, models: Path, *options: str) -> tuple[int, dict[str, str], str]:
    """The exit code, what became of each product, and what was said."""
    force = ("--force", *options)  # the copy of a tree is other data
    code, out, err = run("fit", tree, "--per-folder", "-o", models, *CHEAP, "--json", *force)
    return code, {one["product"]: one["state"] for one in json.loads(out)["products"]}, err


def test_every_product_gets_its_detector(drawings: Path, fitted: tuple[Path, tuple[int, str, str]]) -> None:
    models, (code, out, err) = fitted
    assert code == 0, err
    assert sorted(one.name for one in models.iterdir()) == sorted(
        name for product in NAMES for name in (f"{product}.firm", f"{product}.firm.run")
    )
    *lines, last = out.splitlines()
    for name, line in zip(NAMES, lines, strict=True):
        model = models / f"{name}.firm"
        assert line.startswith(f"learnt  {name}  {model}: 8 good images learnt; guarantee: at most 33.3 %")
        assert Detector.load(model).origin["data"] == str(drawings / name)
    assert last == "3 products: 3 learnt, 0 kept, 0 failed"
    assert err.count(": product ") == 3


def test_a_detector_is_that_of_a_fit_alone(
    drawings: Path, fitted: tuple[Path, tuple[int, str, str]], tmp_path: Path
) -> None:
    assert run("fit", drawings / "label", "-o", tmp_path / "alone.firm", *CHEAP)[0] == 0
    for name in (CARD, "calibration.json"):
        alone, beside = (path / name for path in (tmp_path / "alone.firm", fitted[0] / "label.firm"))
        assert alone.read_bytes() == beside.read_bytes()


def test_what_is_unchanged_is_kept_and_said(drawings: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.read_bytes() for file in models.rglob("*") if file.is_file()}
    monkeypatch.setattr(Detector, "learn", lambda *_, **__: pytest.fail("learnt again"))
    code, states, err = again(drawings, models)
    assert (code, states) == (0, dict.fromkeys(NAMES, "kept"))
    assert f"plate: images and settings are those of {models / 'plate.firm'}, which is kept" in err
    assert {file: file.read_bytes() for file in models.rglob("*") if file.is_file()} == before


def test_what_all_products_need_is_refused_once(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, options, culprit in (
        ("models", ("--preset=wavelets", "--set=pretrained.name=nowhere.pth"), "nowhere.pth"),
        ("file/models", CHEAP, "file"),
    ):
        code, out, err = run("fit", tree, "--per-folder", "-o", tmp_path / place, *options)
        assert (code, out) == (2, "")
        assert culprit in err
        assert err.count("firm: ") == err.count("\n") == 1


def test_detectors_of_another_tree_are_not_replaced(tree: Path, models: Path) -> None:
    code, out, err = run("fit", tree, "--per-folder", "-o", models, *CHEAP)
    assert (code, out.count("failed")) == (2, 4)
    assert err.count("--force") == 3


def test_other_options_are_another_detector(tree: Path, models: Path) -> None:
    for name in ("plate", "weave"):
        shutil.rmtree(tree / name)
    for option in ("--seed=1", "--holdout=0.2", "--false-calls=0.2", "--fail=0.2", "--set=memory.k=2"):
        assert again(tree, models, option)[1] == {"label": "learnt"}, option
        assert again(tree, models, option)[1] == {"label": "kept"}, option


def test_only_what_changed_or_is_missing_is_learnt_again(tree: Path, models: Path) -> None:
    next((tree / "plate" / "train" / "good").iterdir()).unlink()
    next((models / "weave.firm").glob("weights-*")).unlink()
    assert again(tree, models)[1] == {"label": "kept", "plate": "learnt", "weave": "learnt"}
    (models / "label.firm" / "calibration.json").unlink()
    shutil.rmtree(models / "weave.firm")
    assert again(tree, models)[1] == {"label": "learnt", "plate": "kept", "weave": "learnt"}


def test_a_failing_product_costs_itself_alone(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "label" / "good")
    code, out, err = run("fit", tree, "--per-folder", "-o", tmp_path / "models", *CHEAP)
    assert code == 1
    (said,) = [line for line in err.splitlines() if line.startswith("firm: ")]
    assert said.startswith(f"firm: label: {tree / 'label'} has no usable image")
    assert "Traceback" not in err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["failed", "learnt", "learnt"]
    assert "has no usable image" in lines[0]
    assert lines[-1] == "3 products: 2 learnt, 0 kept, 1 failed"
    assert not (tmp_path / "models" / "label.firm").exists()


def test_where_all_fail_nothing_was_done(tree: Path, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.rmtree(tree / name)
        (tree / name).mkdir()
    code, states, err = again(tree, tmp_path / "models")
    assert (code, states) == (2, dict.fromkeys(NAMES, "failed"))
    assert err.count("firm: ") == 3


def test_an_unusable_file_is_told_in_the_exit_code_also_of_a_kept_one(tree: Path, tmp_path: Path) -> None:
    for name in ("plate", "label"):
        shutil.rmtree(tree / name)
    (tree / "weave" / "zzz.png").write_bytes(b"no image")
    for state in ("learnt", "kept"):
        code, states, _ = again(tree, tmp_path / "models")
        assert (code, states["weave"]) == (1, state)
    _, out, _ = run("fit", tree, "--per-folder", "-o", tmp_path / "models", *CHEAP)
    assert out.splitlines()[0].endswith("(1 files left out)")


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Learning the plate fails."""
    learn = Detector.learn

    def sometimes(good: Good, *rest: object) -> Detector:
        if good.data.name.endswith("plate"):
            raise error
        return learn(good, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Detector, "learn", sometimes)


def test_an_error_of_the_system_costs_its_product_alone(
    drawings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, OSError(5, "Input/output error", "/somewhere"))
    code, states, err = again(drawings, tmp_path / "models")
    assert (code, states) == (1, {"label": "learnt", "plate": "failed", "weave": "learnt"})
    assert "firm: plate: cannot use /somewhere: Input/output error\n" in err


def test_a_stop_ends_all_and_the_same_command_goes_on(
    drawings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, Stopped(15, "stopped at step 1 of 2"))
    code, _, err = run("fit", drawings, "--per-folder", "-o", tmp_path / "models", *CHEAP)
    assert code == 143
    assert err.splitlines()[-1].startswith("firm: stopped at step 1 of 2")
    monkeypatch.undo()
    states = {"label": "kept", "plate": "learnt", "weave": "learnt"}
    assert again(drawings, tmp_path / "models")[:2] == (0, states)


def test_what_is_no_tree_of_products_is_refused(tree: Path, tmp_path: Path) -> None:
    refused = {
        ("drawn:plate", tmp_path / "models"): "'drawn:plate' is no folder",
        (str(tmp_path / "nowhere"), tmp_path / "models"): "nowhere' is no folder",
        (str(tree / "plate"), tmp_path / "models"): "plate is laid out as one product; leave --per-folder out",
        (str(tree / "label"), tmp_path / "models"): "label is laid out as one product; leave --per-folder out",
        (str(tree / "weave"), tmp_path / "models"): "weave has no sub-folder",
        (str(tree), tree / "models"): "models lies among the images of",
        (str(tree), tree / "weave" / "0000.png"): "lies among the images of",
    }
    for (data, out), reason in refused.items():
        code, _, err = run("fit", data, "--per-folder", "-o", out, *CHEAP)
        assert (code, err.count("firm: "), reason in err) == (2, 1, True), err
        assert not (tmp_path / "models").exists()


def test_a_detector_is_no_folder_of_detectors(drawings: Path, models: Path) -> None:
    code, _, err = run("fit", drawings, "--per-folder", "-o", models / "plate.firm", *CHEAP)
    assert (code, "plate.firm is not a folder of detectors" in err) == (2, True)


def test_images_beside_the_products_are_said(tree: Path, models: Path) -> None:
    shutil.copy(next((tree / "label" / "good").iterdir()), tree / "overview.png")
    _, states, err = again(tree, models)
    assert f"warning: 1 images in {tree} itself belong to no product" in err
    assert list(states) == NAMES


def test_an_odd_name_stays_on_its_line(tree: Path, models: Path) -> None:
    (tree / "la\nbel").mkdir()
    code, out, err = run("fit", tree, "--per-folder", "-o", models, *CHEAP, "--force")
    assert (code, len(out.splitlines())) == (1, 5)
    assert "firm: la\\nbel: " in err
