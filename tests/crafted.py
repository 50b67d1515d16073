"""Tiny files in the formats of the published data sets, so that every table can run: what is measured means nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from firm.data.registry import DATASETS
from firm.drawn.render import write_folder

GOOD, TEST = 12, 2  # images of each class
POOLS = ("300K_random_images.npy", "tiny_imagenet_10k_32.npy")
Pixels = npt.NDArray[np.uint8]


def craft(root: Path) -> None:
    """Semantic sets with all their classes, one category of MVTec-AD, and exposure pools."""
    rng = np.random.default_rng(0)
    _cifar10(root / "cifar10", rng)
    _cifar100(root / "cifar100-super", rng)
    _fashion_mnist(root / "fashion-mnist", rng)
    _cats_vs_dogs(root / "cats-vs-dogs" / "train", rng)
    write_folder(root / "mvtec" / "screw", "plate", size=128, train=40, good=4, bad=4)
    (root / "exposure").mkdir()
    for name in POOLS:
        np.save(root / "exposure" / name, rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8))


def stripes(labels: npt.NDArray[np.int64], side: int, rng: np.random.Generator) -> Pixels:
    """Images of stripes, as many as the label says and a little apart from each other."""
    phase, count = rng.uniform(0, 6, len(labels))[:, None, None], labels[:, None, None] + 1
    wave = np.sin(np.linspace(0, 6, side)[None, None, :] * count + phase) * np.linspace(0.5, 1, side)[None, :, None]
    return (128 + 100 * wave).astype(np.uint8)


def _of_all(classes: int, each: int) -> npt.NDArray[np.int64]:
    return np.tile(np.arange(classes), each)


def _records(labels: list[npt.NDArray[np.int64]], rng: np.random.Generator) -> bytes:
    planes = np.repeat(stripes(labels[0], 32, rng)[:, None], 3, axis=1).reshape(len(labels[0]), -1)
    return np.hstack([np.stack(labels, 1).astype(np.uint8), planes]).tobytes()


def _cifar10(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(_records([_of_all(10, 3)], rng))
    (folder / "test_batch.bin").write_bytes(_records([_of_all(10, TEST)], rng))


def _cifar100(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    fine = {number: numbers[0] for number, numbers in enumerate(DATASETS["cifar100-super"].classes.values())}
    for name, each in (("train.bin", GOOD), ("test.bin", TEST)):
        coarse = _of_all(20, each)
        (folder / name).write_bytes(_records([coarse, np.array([fine[int(label)] for label in coarse])], rng))


def _fashion_mnist(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for split, each in (("train", GOOD), ("t10k", TEST)):
        labels = _of_all(10, each)
        images = stripes(labels, 28, rng)
        header = struct.pack(">IIII", 0x803, len(labels), 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels_header = struct.pack(">II", 0x801, len(labels))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels_header + labels.astype(np.uint8).tobytes())


def _cats_vs_dogs(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for label, name in enumerate(("cat", "dog")):
        for number, image in enumerate(stripes(np.full(GOOD + 3, label), 64, rng)):
            Image.fromarray(image).convert("RGB").save(folder / f"{name}.{number}.jpg")
