"""How an experiment on parts is conducted: on their patches, or on what a threshold guarantees.

Each protocol goes through the steps of `detector.fit` and returns what it measured as plain JSON.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from firm.data.duplicates import group_by_part
from firm.data.splits import split_by_part
from firm.decision.drift import drift, light_drift, one_of_each
from firm.detector.detector import Detector
from firm.detector.evaluation import Labelled, evaluate
from firm.detector.fit import fit, train
from firm.detector.prepare import frozen_backbone, prepare
from firm.detector.read import Options, read_good
from firm.detector.remember import remember
from firm.detector.tune import EXPOSURE, Tuned, choose, choose_features
from firm.drawn.render import draw_dataset
from firm.images.preprocess import brightness, fingerprint, resize
from firm.metrics.image import auroc, rate_of
from firm.metrics.pixel import pixel_auroc
from firm.networks.backbone import Backbone
from firm.outliers.registry import KINDS, LOCAL, make_outliers, scene_of, stream_name
from firm.recipes.recipe import Recipe, change, to_json
from firm.research.experiment import Experiment
from firm.research.probes import Measured, left_by, probing, rounded
from firm.research.semantic import pixel_scores
from firm.runtime.listener import Listener
from firm.runtime.platform import peak_megabytes, reset_peak
from firm.runtime.random import stream
from firm.scoring.models import Located
from firm.scoring.patch_features import CHUNK, PIXELS
from firm.training.batches import steps_per_epoch
from firm.training.runs import Run
from firm.types import OneClass

Images = UInt8[Tensor, "_ c h w"]
Protocol = Callable[[Experiment, OneClass, Options, Listener], Measured]

KEPT_BACK, MIN_PARTS = 0.1, 40  # part of the good images that synthetic defects are measured on, and parts of them
JUDGED = 0.2  # part of the good images that a guarantee is measured on
DRAWN = 400  # good parts of a drawn product that a guarantee is measured on: few say little of a rate
DONORS = 60  # good images that lend their pixels to synthetic defects
COMMON_SEED = 0  # of what all rows and seeds share: the tuned settings, the images kept back and their defects
TUNED = ("conditioning", "tiling", "memory", "views", "size", "pretrained", "automatic")  # settings that tuning reads


def patches(experiment: Experiment, data: OneClass, options: Options, listener: Listener) -> Measured:
    """Tune, train with probes over CPU time, and evaluate every variant of scoring.

    Settings are tuned on the good images with one seed for every row, so that rows differ in nothing else. All good
    images are trained on, for no threshold is to be set, unless some are kept back.
    """
    started, kept = time.process_time(), data.train[:0]
    if experiment.keep_back:
        data, kept = _keep_back(data, KEPT_BACK, seed=COMMON_SEED, min_parts=MIN_PARTS)
    reset_peak()
    parts, backbone = group_by_part(data.name, data.train), frozen_backbone(experiment.recipe, options.device)
    tuned, saved = _tuned(experiment.recipe, data, parts, backbone, listener)
    recipe, seed = _lasting(experiment, tuned.recipe, data), options.seed
    prepared = prepare(
        recipe,
        data,
        parts,
        seed=seed,
        backbone=backbone,
        masks=tuned.masks,
        folder=options.folder,
        device=options.device,
        listener=listener,
    )
    prepare_seconds = saved + time.process_time() - started

    def detector(run: Run, recipe: Recipe) -> Detector:
        return Detector.of(remember(recipe, prepared, prepared.trained(run), {}, seed=seed))

    def probe(run: Run) -> Measured:
        return _probe(detector(run, recipe), data) | {"seconds": round(run.seconds, 1)}

    run = train(prepared, options, listener=listener, callbacks=[probing(experiment, probe)])
    recipe = choose_features(prepared, prepared.trained(run), seed=seed, listener=listener)
    ways = experiment.variants.items()
    final = {way: _evaluate(partial(detector, run, change(recipe, changes)), data, kept) for way, changes in ways}
    values = [f"{way} {100 * value['overall']['auroc']['value']:.1f}".strip() for way, value in final.items()]
    return {
        "summary": ", ".join(values),
        "recipe": to_json(recipe),
        **left_by(run, data),
        "final": final,
        "prepare_seconds": round(prepare_seconds, 1),
        "training_seconds": round(run.seconds, 1),
        "peak_megabytes": peak_megabytes(),
    }


def guarantees(experiment: Experiment, data: OneClass, options: Options, listener: Listener) -> Measured:
    """Fit as a user does, then judge good images the detector never saw: those of the test, or some kept back."""
    family, _, product = data.name.partition(":")
    if experiment.keep_back:
        data, unseen = _keep_back(data, JUDGED, seed=options.seed)
    elif family == "drawn":
        unseen = draw_dataset(product, size=experiment.side, train=0, good=DRAWN, bad=0).test
    else:
        unseen = data.test[~data.anomalous]
    detector = Detector.of(fit(read_good(data, experiment.recipe, options), listener))
    evaluation = evaluate(detector, Labelled(detector.locate(data.test), data.test, data.anomalous, data.truth))
    by, scores = detector.decides, detector.score(unseen)
    limits = {"review": by.review, "fail": by.fail}
    measured = {name: asdict(rate_of(int((scores > at).sum()), len(scores))) for name, at in limits.items()}
    return {
        "summary": f"{measured['review']['count']} of {len(scores)} good parts do not PASS, "
        f"at most {100 * by.reviewed.kept:.1f} % guaranteed",
        "recipe": to_json(experiment.recipe),
        "good_images": detector.origin["good_images"],
        "test_images": len(data.test),
        "calibration": {"images": by.images, "parts": by.parts},
        "guaranteed": {"review": by.reviewed.kept, "fail": by.failed.kept},
        "bound": {name: by.upper_bound(at) for name, at in limits.items()},
        "measured": measured,
        "drift": _drift(detector, unseen, scores, group_by_part(data.name, unseen)),
        "caught": {"share": evaluation.caught, "of": int(data.anomalous.sum())},
        "auroc": asdict(evaluation.overall.auroc),
    }


_tunings: dict[tuple[str, Recipe], tuple[Tuned, float]] = {}  # with the CPU seconds each took


def _tuned(
    given: Recipe, data: OneClass, parts: Int[Tensor, " n"], backbone: Backbone | None, listener: Listener
) -> tuple[Tuned, float]:
    """The recipe with its open settings tuned, and CPU seconds saved: rows that leave the same open share a tuning."""
    asked = replace(Recipe(), **{name: getattr(given, name) for name in TUNED})
    key, saved = (fingerprint(data.train), asked), 0.0
    if key in _tunings:
        tuned, saved = _tunings[key]
    else:
        started = time.process_time()
        tuned = choose(asked, data, parts, seed=COMMON_SEED, backbone=backbone, listener=listener)
        _tunings[key] = tuned, time.process_time() - started
    settings = {name: getattr(tuned.recipe, name) for name in TUNED if name != "size"}
    return Tuned(replace(given, **settings), tuned.masks), saved


def _lasting(experiment: Experiment, recipe: Recipe, data: OneClass) -> Recipe:
    """The recipe with as many epochs as come nearest to the steps asked for."""
    if not experiment.steps:
        return recipe
    epoch = steps_per_epoch(len(data.train), recipe.outliers.per_inlier, recipe.training.batch)
    return change(recipe, {"training.epochs": max(1, round(experiment.steps / epoch))})


def _probe(detector: Detector, data: OneClass) -> Measured:
    """Image and pixel AUROC without intervals."""
    located = _pixel_floor(detector, data) if _of_whole_pixels(detector) else detector.locate(data.test)
    values = {"auroc": auroc(located.scores, data.anomalous)}
    if data.truth is not None and located.maps.numel() and bool(data.truth.masks.any()):
        known = data.truth.known
        values["pixel_auroc"] = pixel_auroc(located.maps[known], data.truth.masks[known])
    return dict(rounded(values))


def _evaluate(remembered: Callable[[], Detector], data: OneClass, kept: Images) -> Measured:
    """All measures of one variant on the test images, and on synthetic defects in the images kept back."""
    times = [time.process_time()]
    detector = remembered()
    times.append(time.process_time())
    located = _pixel_floor(detector, data) if _of_whole_pixels(detector) else detector.locate(data.test)
    times.append(time.process_time())
    measured: Measured = asdict(evaluate(detector, Labelled(located, data.test, data.anomalous, data.truth)))
    if len(kept):
        measured["synthetic"] = _synthetic(detector, kept, data.train)
    return dict(rounded(measured)) | {
        "remember_seconds": round(times[1] - times[0], 1),
        "images_per_second": round(len(data.test) / (times[2] - times[1]), 2),
    }


def _of_whole_pixels(detector: Detector) -> bool:
    return detector.recipe.features == PIXELS and not detector.model.has_maps


def _pixel_floor(detector: Detector, data: OneClass) -> Located:
    """Whole images compared by the pixels that the encoder would be given."""
    model = detector.model
    good, test = (
        torch.cat([model.preprocessing.test_view(model.align(part).images).flatten(1) for part in images.split(CHUNK)])
        for images in (data.train, data.test)
    )
    return Located(pixel_scores(good, test, 1, detector.recipe.memory.metric), torch.empty(len(test), 0, 0))


def _synthetic(detector: Detector, kept: Images, learnt: Images) -> Measured:
    """AUROC of images and pixels on good images with and without defects of every kind, in varied brightness."""
    model, side = detector.model, detector.model.preprocessing.size
    images, donors = resize(kept, side), resize(learnt[:DONORS], side)
    scene = scene_of(images, donors, model.ignored, rule=detector.recipe.conditioning.foreground)
    plain = model.locate(_exposed(images, "good"))
    defective, nowhere = torch.arange(2 * len(images)) >= len(images), torch.zeros(plain.maps.shape, dtype=torch.bool)
    kinds = {}
    for kind in KINDS:
        made = make_outliers(LOCAL[kind], images, rng=stream(COMMON_SEED, "proof", stream_name(kind)), scene=scene)
        assert made.where is not None
        located = model.locate(_exposed(made.images, stream_name(kind)))
        of_image = auroc(torch.cat([plain.scores, located.scores]), defective)
        maps, masks = torch.cat([plain.maps, located.maps]), torch.cat([nowhere, made.where])
        kinds[kind] = (of_image, pixel_auroc(maps, masks, model.ignored))
    of_images, of_pixels = (sum(values) / len(values) for values in zip(*kinds.values(), strict=True))
    return {"good_images": len(images), "auroc": of_images, "pixel_auroc": of_pixels, "kinds": kinds}


def _exposed(images: Images, kind: str) -> Images:
    """Brighter or darker by as much as a camera may be."""
    drawn = torch.rand(len(images), 1, 1, 1, generator=stream(COMMON_SEED, "light", kind))
    return (images.float() * (1 + EXPOSURE * (2 * drawn - 1))).round().clamp(0, 255).to(torch.uint8)


def _keep_back(data: OneClass, share: float, *, seed: int, min_parts: int = 0) -> tuple[OneClass, Images]:
    """The data without some good parts, and the images of those."""
    learn, kept = split_by_part(group_by_part(data.name, data.train), share, seed=seed, min_parts=min_parts)
    return replace(data, train=data.train[learn]), data.train[kept]


def _drift(detector: Detector, images: Images, scores: Float[Tensor, " n"], parts: Int[Tensor, " n"]) -> Measured:
    """What an inspection would report of these images as a batch."""
    by, light = detector.decides, brightness(images, detector.model.ignored)
    good, usual = (torch.tensor(values, dtype=torch.float64) for values in (by.scores, by.light))
    known, count = torch.tensor(by.shown), len(images)
    moved = drift(one_of_each(scores, parts), good, parts=known, images=count)
    shift = light_drift(one_of_each(light, parts), usual, parts=known, images=count)
    return {"scores": moved.direction, "illumination": shift.direction, "by": round(shift.change, 4)}
