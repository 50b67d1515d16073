"""The bench runner: a plan makes what is missing, once, though processes die or share it, and records its origin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import firm
from firm.data.registry import load
from firm.detector.detector import Detector
from firm.detector.prepare import prepare
from firm.errors import DataError
from firm.images.preprocess import fingerprint
from firm.metrics.image import aulc, auroc
from firm.networks.heads import build
from firm.outliers.registry import Exposure, Sia
from firm.recipes.presets import FAST, INSPECT
from firm.recipes.presets import recipe as recipe_named
from firm.recipes.recipe import change
from firm.research import protocols, runner, semantic
from firm.research.experiment import Experiment, Record, read_record, record_path
from firm.research.runner import (
    PROTOCOLS,
    code_digest,
    confirm_outdated,
    is_confirmed,
    is_outdated,
    missing,
    normalised,
    run_missing,
)
from firm.research.semantic import FINAL, evaluate_scorings, pixel_scores
from firm.runtime.files import folder_lock
from firm.runtime.random import stream
from striped import write_striped_fashion_mnist

SMALL = {"encoder.width": 8, "encoder.head.hidden": (16,), "training.batch": 16, "training.epochs": 4}
UNTRAINED = {"features": "pixels", "training.epochs": 0, "automatic": (), "size": 64, "encoder.width": 8}
SANDAL = "fashion-mnist:sandal"
WORKER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_runner import tiny_plan
from firm.research.runner import run_missing
for line in run_missing(tiny_plan(int(sys.argv[2])), Path(sys.argv[1]) / "results", Path(sys.argv[1]) / "work"):
    print(line, flush=True)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_striped_fashion_mnist(tmp_path)
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    return tmp_path


def tiny_plan(seeds: int = 1, **changes: Any) -> list[Experiment]:
    recipe = change(FAST, SMALL | changes)
    return [Experiment(protocol="semantic", data=SANDAL, recipe=recipe, seed=seed, probes=3) for seed in range(seeds)]


def made(plan: list[Experiment], root: Path, **options: Any) -> list[str]:
    return list(run_missing(plan, root / "results", root / "work", **options))


def record_of(root: Path, experiment: Experiment) -> Record:
    record = read_record(root / "results", experiment)
    assert record is not None
    return record


def timeless(record: Record) -> Record:
    """A record without what a repetition may change."""
    record = json.loads(json.dumps(record))
    if record["diagnostics"]:
        del record["diagnostics"]["seconds"]
    return {name: value for name, value in record.items() if name not in ("seconds", "resumed")}


def test_a_plan_is_made_once_and_measures_everything(root):
    plan = tiny_plan(2)
    assert len(made(plan, root)) == 2
    assert made(plan, root) == []
    for one in plan:
        record = record_of(root, one)
        assert set(record["final"]) == set(FINAL)
        assert [probe["step"] for probe in record["probes"]] == [1, 2, 4]
        assert set(record["probes"][-1]["properties"]) == {"compactness", "margin", "outlier_spread"}
        assert record["probes"][-1]["s_con k=1"]["value"] == record["final"]["s_con k=1"]["value"]
        assert all(0 <= value["low"] <= value["value"] <= value["high"] <= 1 for value in record["final"].values())
        assert 0 <= aulc([probe["s_con k=1"]["value"] for probe in record["probes"]]) <= 1


def test_a_record_says_where_it_comes_from(root):
    (one,) = tiny_plan()
    made([one], root)
    record, data = record_of(root, one), load(SANDAL)
    assert record["key"] == one.key == record_path(root / "results", one).stem
    assert record["data"] == {"train": fingerprint(data.train), "test": fingerprint(data.test)}
    assert record["code"] == code_digest("semantic")
    assert record["experiment"]["seed"] == 0
    assert record["origin"]["torch"] == torch.__version__
    assert {"machine", "python", "device", "threads"} <= set(record["origin"])
    assert "pool" not in record


def test_the_exposure_pool_is_found_by_name_and_named_in_key_and_record(root):
    (root / "exposure").mkdir()
    for name in ("one.npy", "two.npy"):
        np.save(root / "exposure" / name, np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    one, two = (tiny_plan(**{"outliers": Exposure(path=name)})[0] for name in ("one.npy", "two.npy"))
    assert one.key != two.key
    made([one], root)
    pool = record_of(root, one)["pool"]
    assert (pool["name"], pool["images"], len(pool["digest"])) == ("one.npy", 20, 16)


def test_missing_data_is_skipped_and_the_rest_is_made(root):
    (there,) = tiny_plan()
    elsewhere = replace(there, data="cifar10:bird")
    no_pool = tiny_plan(**{"outliers": Exposure(path="nowhere.npy")})[0]
    no_weights = replace(there, recipe=change(INSPECT, {"pretrained.name": "nowhere.safetensors"}), protocol="patches")
    lines = made([elsewhere, no_pool, no_weights, there], root)
    assert ["skipped" in line for line in lines] == [True, True, True, False]
    assert [path.stem for path in (root / "results").iterdir()] == [there.key]


def test_a_run_that_another_process_makes_is_left_to_it(root):
    (one,) = tiny_plan()
    with folder_lock(root / "work" / one.key) as mine:
        assert mine
        assert ["another process" in line for line in made([one], root)] == [True]
    assert len(made([one], root)) == 1


def worker(root: Path, seeds: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", WORKER, str(root), str(seeds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_share_a_plan_and_make_each_run_once(root):
    plan = tiny_plan(6)
    other = worker(root, 6)
    while other.poll() is None and not (root / "results").is_dir():  # both are at work at the same time
        time.sleep(0.02)
    lines = [*made(plan, root), *other.communicate()[0].splitlines()]
    assert other.returncode == 0
    finished = [line for line in lines if "s_con" in line]
    assert len(finished) == len({line.split()[1] for line in finished}) == 6
    assert all(read_record(root / "results", one) for one in plan)


def test_a_killed_plan_goes_on_and_ends_equal(root, tmp_path):
    plan = tiny_plan(3)
    victim = worker(root, 3)
    assert victim.stdout is not None
    victim.stdout.readline()
    victim.kill()
    victim.communicate()
    before = len(list((root / "results").glob("*.json")))
    assert 1 <= before < 3 or victim.returncode == 0
    assert len(made(plan, root)) == 3 - before
    whole = tmp_path / "whole"
    list(run_missing(plan, whole / "results", whole / "work"))
    for one in plan:
        assert timeless(record_of(root, one)) == timeless(record_of(whole, one))


def test_a_training_interrupted_before_its_scores_ends_equal_and_is_marked(root, monkeypatch):
    (one,) = tiny_plan()
    monkeypatch.setattr(semantic, "FINAL", {})  # the first attempt dies before its final scores
    with pytest.raises(ValueError, match="empty"):
        made([one], root)
    monkeypatch.setattr(semantic, "FINAL", FINAL)
    made([one], root)
    resumed = record_of(root, one)
    assert resumed["resumed"]
    list(run_missing([one], root / "whole/results", root / "whole/work"))
    whole = record_of(root / "whole", one)
    assert not whole["resumed"]
    assert timeless(resumed) == timeless(whole)


def test_a_key_names_all_that_decides_a_run_and_nothing_else():
    (one,) = tiny_plan()
    others = [
        replace(one, protocol="patches"),
        replace(one, data="fashion-mnist:shirt"),
        replace(one, recipe=change(one.recipe, {"training.lr": 0.01})),
        replace(one, seed=1),
        replace(one, probes=4),
        replace(one, steps=5),
        replace(one, test_images=100),
        replace(one, side=64),
        replace(one, variants={"wide": {"tiling.stride": 8}}),
        replace(one, keep_back=True),
    ]
    assert len({other.key for other in [one, *others]}) == 11
    assert one.key.startswith("fashion-mnist-sandal-firm-0-")
    # every score is measured in a semantic run, so they share it
    assert replace(one, recipe=change(one.recipe, {"score": "kde"})).key == one.key


def test_a_record_that_is_not_this_runs_is_refused(root):
    (one,) = tiny_plan()
    made([one], root)
    path = record_path(root / "results", one)
    whole = path.read_text()
    record = json.loads(whole)
    record["experiment"]["probes"] = 5
    foreign = ("[]", '"text"', "null", json.dumps({"experiment": one.content}))
    for damaged in (json.dumps(record), whole[:-20], *foreign):
        path.write_text(damaged)
        with pytest.raises(DataError, match=one.key):
            read_record(root / "results", one)


def test_runs_of_other_code_are_repeated_only_if_asked(root):
    (one,) = tiny_plan()
    made([one], root)
    path = record_path(root / "results", one)
    path.write_text(json.dumps(record_of(root, one) | {"code": "before"}))
    assert made([one], root) == []
    assert len(made([one], root, outdated=True)) == 1
    assert record_of(root, one)["code"] == code_digest("semantic")


def test_the_digest_of_code_sees_what_decides_and_not_how_it_is_written():
    plain = normalised('def f(a):\n    """Words."""\n    return a + 1')
    assert normalised('def f(a):\n    """Other words."""\n    # a comment\n    return (a +\n            1)') == plain
    for other in ("2", "True", "1.0"):
        assert normalised(f'def f(a):\n    """Words."""\n    return a + {other}') != plain


def test_an_untrained_network_is_a_result(root):
    one = tiny_plan(**{"training.epochs": 0})[0]
    made([one], root)
    record, data = record_of(root, one), load(SANDAL)
    assert record["steps"] == 0
    assert [probe["step"] for probe in record["probes"]] == [0]
    assert record["diagnostics"] is None
    expected = evaluate_scorings(
        build(one.recipe.encoder, rng=stream(0, "weights")).encoder,
        prepare(one.recipe, data, torch.arange(len(data.train)), seed=0).task.preprocessing,
        data.train,
        data.test,
        data.anomalous,
        FINAL,
    )
    for name, interval in expected.items():
        assert record["final"][name]["value"] == pytest.approx(interval.value, abs=1e-4)


def test_patches_are_measured_in_every_variant_with_synthetic_defects_on_images_kept_back(tmp_path):
    recipe = change(INSPECT, UNTRAINED)
    variants = {"": {}, "five": {"tiling.top_patches": 5}}
    one = Experiment(
        protocol="patches", data="drawn:plate", recipe=recipe, seed=0, side=64, variants=variants, keep_back=True
    )
    (line,) = made([one], tmp_path)
    record = record_of(tmp_path, one)
    assert list(record["final"]) == ["", "five"]
    assert record["good_images"] == 180
    assert all(0.4 < final["synthetic"]["auroc"] <= 1 for final in record["final"].values())
    assert f"{100 * record['final']['']['overall']['auroc']['value']:.1f}, five" in line


def test_whole_parts_have_floors_of_their_pixels(tmp_path):
    small = {"features": "pixels", "training.epochs": 0, "size": 32, "encoder.width": 8, "encoder.head.hidden": (8,)}
    found, data = [], load("drawn:weave", side=32)
    for metric in ("cosine", "l2"):
        recipe = change(recipe_named("whole"), {**small, "memory.metric": metric, "automatic": ()})
        one = Experiment(protocol="patches", data="drawn:weave", recipe=recipe, seed=0, side=32)
        made([one], tmp_path)
        view = prepare(recipe, data, torch.arange(len(data.train)), seed=0).task.preprocessing.test_view
        aligned = (recipe.conditioning(images).images for images in (data.train, data.test))
        scores = pixel_scores(*(view(images).flatten(1) for images in aligned), 1, metric)
        found.append(record_of(tmp_path, one)["final"][""]["overall"]["auroc"]["value"])
        assert found[-1] == pytest.approx(auroc(scores, data.anomalous), abs=1e-4)
    assert found[0] != found[1]


def guarantee(seed: int) -> Experiment:
    recipe = change(INSPECT, UNTRAINED)
    return Experiment(protocol="guarantees", data="drawn:plate", recipe=recipe, seed=seed, side=64)


def test_a_guarantee_stands_beside_what_was_measured(tmp_path):
    one = guarantee(0)
    made([one], tmp_path)
    record = record_of(tmp_path, one)
    assert record["measured"]["review"]["of"] == 400
    assert record["guaranteed"]["review"] < record["bound"]["review"] < 1
    assert record["measured"]["fail"]["count"] <= record["measured"]["review"]["count"]
    assert record["caught"]["of"] == 60


def test_good_parts_kept_back_are_judged_and_never_fitted(tmp_path, monkeypatch):
    given, judged = [], []
    read, score = protocols.read_good, Detector.score
    monkeypatch.setattr(protocols, "read_good", lambda data, *more: given.append(data.train) or read(data, *more))
    monkeypatch.setattr(
        Detector, "score", lambda detector, images, *more: judged.append(images) or score(detector, images, *more)
    )
    every = load("drawn:plate", side=64).train
    for seed in (0, 1):
        one = replace(guarantee(seed), keep_back=True)
        made([one], tmp_path)
        assert record_of(tmp_path, one)["measured"]["review"]["of"] == len(judged[-1]) == 40
        both = torch.cat([given[-1], judged[-1]])
        assert {image.numpy().tobytes() for image in both} == {image.numpy().tobytes() for image in every}
        assert len(both) == len(every)
    assert not torch.equal(given[0], given[1])


def test_pixel_scores_are_mean_distances_to_the_nearest():
    rng = torch.Generator().manual_seed(0)
    good, test = torch.rand(7, 5, generator=rng), torch.rand(4, 5, generator=rng)
    for number, image in enumerate(test):
        by_l2 = sorted(float((image - other).norm()) for other in good)
        by_cosine = sorted(1 - float(torch.cosine_similarity(image, other, dim=0)) for other in good)
        for metric, distances in (("l2", by_l2), ("cosine", by_cosine)):
            found = pixel_scores(good, test, 3, metric)[number]
            assert float(found) == pytest.approx(sum(distances[:3]) / 3, abs=1e-5)


def test_floors_are_measured_without_training(root):
    for metric in ("cosine", "l2"):
        one = tiny_plan(**{"features": "pixels", "training.epochs": 0, "memory.metric": metric})[0]
        made([one], root)
        record, data = record_of(root, one), load(SANDAL)
        view = prepare(one.recipe, data, torch.arange(len(data.train)), seed=0).task.preprocessing.test_view
        scores = pixel_scores(view(data.train).flatten(1), view(data.test).flatten(1), 1, metric)
        assert record["final"]["s_con k=1"]["value"] == pytest.approx(auroc(scores, data.anomalous), abs=1e-4)
        assert (record["steps"], record["probes"], record["diagnostics"]) == (0, [], None)


def test_probes_of_a_reduced_test_compare_with_few_references(root, monkeypatch):
    compared = []
    monkeypatch.setattr(semantic, "REFERENCES", 5)
    features = semantic.reference_features
    monkeypatch.setattr(
        semantic,
        "reference_features",
        lambda e, how, good, turns: compared.append(len(good)) or features(e, how, good, turns),
    )
    for reduced, probed in ((20, 5), (0, 6)):
        compared.clear()
        made([replace(tiny_plan()[0], test_images=reduced)], root)
        assert set(compared[:2]) == {probed}
        assert 6 in compared  # the final scores compare with all


def test_other_images_outdate_a_run(root):
    (one,) = tiny_plan()
    made([one], root)
    assert made([one], root, outdated=True) == []
    record = record_of(root, one)
    changed = record | {"data": record["data"] | {"train": "others"}}
    record_path(root / "results", one).write_text(json.dumps(changed))
    assert made([one], root) == []
    assert len(made([one], root, outdated=True)) == 1
    assert record_of(root, one)["data"] == record["data"]


def test_a_protocol_is_decided_by_its_own_file_and_what_all_share(monkeypatch):
    def digests() -> dict[str, str]:
        code_digest.cache_clear()
        return {protocol: code_digest(protocol) for protocol in PROTOCOLS}

    read, before = Path.read_text, digests()
    shared = {"semantic", "frozen"}  # whole images
    parts = set(PROTOCOLS) - shared
    for changed, touched in (
        ("few.py", {"few"}),
        ("semantic.py", shared),
        ("knn.py", set(PROTOCOLS)),
        ("patch_bank.py", parts),
    ):

        def edited(path: Path, name: str = changed, **options: Any) -> str:
            return read(path, **options) + ("\nedited = 1\n" if path.name == name else "")

        monkeypatch.setattr(Path, "read_text", edited)
        assert {name for name, digest in digests().items() if digest != before[name]} == touched
        monkeypatch.undo()
    assert set(runner.OF_PROTOCOL) == set(PROTOCOLS)
    code_digest.cache_clear()


def test_what_a_run_lacks_is_named(root):
    (one,) = tiny_plan()
    assert missing(one) == ""
    assert missing(replace(one, data="cifar10:bird")) == "cifar10:bird"
    assert missing(replace(one, data="mvtec:screw")) == "mvtec:screw"
    assert missing(replace(one, data="my_parts")) == "my_parts"
    assert missing(replace(one, data="drawn:plate")) == ""
    assert missing(tiny_plan(**{"outliers": Exposure(path="nowhere.npy")})[0]) == "nowhere.npy"
    assert missing(tiny_plan(**{"outliers": Sia(folder="nowhere")})[0]) == "nowhere"


def test_runs_of_other_code_are_confirmed_by_one_that_is_repeated(root):
    runs = tiny_plan(2)
    made(runs, root)

    def confirm() -> list[str]:
        return list(confirm_outdated(runs, root / "results", root / "work"))

    def stored(one: Experiment, **changes: object) -> None:
        record_path(root / "results", one).write_text(json.dumps(record_of(root, one) | changes))

    assert confirm() == []
    for one in runs:
        stored(one, code="before")
    assert all(is_outdated(record_of(root, one)) for one in runs)
    (line,) = confirm()  # one of the two is repeated
    assert "2 runs confirmed" in line
    for one in runs:
        assert record_of(root, one)["code"] == "before"
        assert is_confirmed(record_of(root, one))
        assert not is_outdated(record_of(root, one))
    for one in runs:  # other numbers stay outdated
        stored(one, code="before", confirmed={"code": "older", "by": one.key}, steps=7)
    (line,) = confirm()
    assert "not equal to its record in steps" in line
    assert all(is_outdated(record_of(root, one)) for one in runs)


UNDECIDING = {  # what runs of whole images call, and nothing there can change a number
    "detector/fit.py": "drives the loop",
    "detector/generate.py": "asks whether images are to be made by diffusion",
    "images/crop.py": "checks the crop of files, which these runs do not have",
    "detector/read.py": "holds seed, device and folder",
    "scoring/patch_grid.py": "is asked whether patches are compared",
}
RUNS_ANYTHING = ("runtime", "research", "errors.py")


def called(run: Callable[[], object]) -> dict[str, set[str]]:
    """The modules of the package whose functions a run calls, with their names; checks of settings decide nothing."""
    found, package = defaultdict[str, set[str]](set), Path(firm.__file__).parent

    def on_call(frame: FrameType, event: str, _: object) -> None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and name not in ("<module>", "__post_init__") and file.is_relative_to(package):
            found[file.relative_to(package).as_posix()].add(name)

    sys.setprofile(on_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("protocol", ["semantic", "frozen"])
def test_all_that_decides_a_run_of_whole_images_is_in_its_digest(root, protocol):
    one = tiny_plan()[0]
    if protocol == "frozen":
        recipe = recipe_named("semantic", **{"size": 64, "training.epochs": 1, "outliers": "rotations"})
        one = Experiment(protocol=protocol, data=SANDAL, recipe=recipe, seed=0, test_images=48)
    modules = called(lambda: made([one], root))
    assert {"training/loop.py", "scoring/knn.py", "detector/prepare.py"} <= set(modules)
    deciding = runner.OF_PROTOCOL[protocol]
    missed = {
        module: names
        for module, names in modules.items()
        if module not in deciding
        and not module.startswith(tuple(f"{place}/" for place in deciding))
        and not module.startswith(RUNS_ANYTHING)
        and module not in UNDECIDING
    }
    assert missed == {}
