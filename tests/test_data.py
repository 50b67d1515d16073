"""Readers against small files in exactly the official formats, and against the real sets where they are."""

import ast
import gzip
import hashlib
import io
import struct
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from firm.data import cats_vs_dogs, cifar, fashion_mnist
from firm.data.registry import DATASETS, data_root, load
from firm.drawn.render import PRODUCTS
from firm.errors import DataError

RNG = np.random.default_rng(0)
SUPERCLASSES = DATASETS["cifar100-super"].classes
REAL_CIFAR10 = data_root() / "cifar10" / "cifar-10-batches-bin"


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def cifar_file(*labels):
    """Records as published: the label bytes, then 3072 bytes of red, green and blue planes."""
    images = pixels(len(labels[0]), 3 * 32 * 32)
    return np.hstack([np.stack(labels, 1).astype(np.uint8), images]).tobytes(), images.reshape(-1, 3, 32, 32)


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def archive(file, files):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def save(file, shape=(10, 12), **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pixels(*shape, 3)
    Image.fromarray(image).save(file, **options)
    return image


@pytest.fixture
def cifar10_files():
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: cifar_file(np.arange(20) % 10)[0] for name in names}


# CIFAR-10


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-bin", "cifar10"])
def test_cifar10_is_found_where_people_put_it(tmp_path, cifar10_files, place):
    write(tmp_path / place, cifar10_files)
    task = load("cifar10:bird", tmp_path)
    assert task.name == "cifar10:bird"
    assert task.train.shape == (5 * 2, 3, 32, 32)
    assert task.test.shape == (20, 3, 32, 32)
    assert task.train.dtype == task.test.dtype == torch.uint8
    assert task.size == 32
    assert task.anomalous.tolist() == [i % 10 != 2 for i in range(20)]


def test_cifar10_pixels_keep_their_place_and_order(tmp_path):
    files, images = {}, {}
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        files[name], images[name] = cifar_file(np.array([3, 1, 3]))
    write(tmp_path / "cifar10", files)
    task = load("cifar10:3", tmp_path)
    expected = np.concatenate([images[f"data_batch_{i}.bin"][[0, 2]] for i in range(1, 6)])
    np.testing.assert_array_equal(task.train, expected)
    np.testing.assert_array_equal(task.test, images["test_batch.bin"])


def test_cifar10_is_read_from_its_archive_without_unpacking(tmp_path, cifar10_files):
    write(tmp_path / "loose" / "cifar10", cifar10_files)
    packed = {f"cifar-10-batches-bin/{name}": content for name, content in cifar10_files.items()}
    archive(tmp_path / "packed" / "cifar10" / "cifar-10-binary.tar.gz", packed | {"../../evil": b"!"})
    loose, packed = (load("cifar10:7", tmp_path / kind) for kind in ("loose", "packed"))
    assert torch.equal(loose.train, packed.train)
    assert torch.equal(loose.test, packed.test)
    assert [file.name for file in tmp_path.rglob("*") if "evil" in file.name] == []


def test_a_damaged_archive_is_a_sentence(tmp_path, cifar10_files):
    file = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    archive(file, dict(list(cifar10_files.items())[:-1]))
    with pytest.raises(DataError, match=r"lacks test_batch.bin; fetch it again"):
        load("cifar10:1", tmp_path)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not an archive"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is damaged .* fetch it again"):
            load("cifar10:1", tmp_path)


@pytest.mark.parametrize(
    "file", ["cifar10/cifar-10-batches-py/data_batch_1", "cifar10/data_batch_1", "cifar10/cifar-10-python.tar.gz"]
)
def test_pickles_are_not_read(tmp_path, file):
    write((tmp_path / file).parent, {Path(file).name: b"\x80\x02"})
    with pytest.raises(DataError, match=r"pickle.*https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"):
        load("cifar10:1", tmp_path)


def test_missing_cifar10_tells_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match=rf"{tmp_path}.cifar10; .*firm fetch cifar10.*https://.*cifar-10-binary.tar.gz"):
        load("cifar10:1", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3073 * 2 - 1), "6145 bytes, not a whole number of 3073-byte records"),
        (b"", "0 bytes, not a whole number"),
        (bytes([10]) + bytes(3072), "a label beyond its 10 classes"),
    ],
)
def test_damaged_cifar10_names_the_file(tmp_path, cifar10_files, content, message):
    write(tmp_path / "cifar10", cifar10_files | {"data_batch_3.bin": content})
    with pytest.raises(DataError, match=rf"data_batch_3.bin has {message}"):
        load("cifar10:1", tmp_path)


def test_a_class_without_train_images_is_an_error(tmp_path, cifar10_files):
    files = {name: cifar_file(np.zeros(2))[0] for name in cifar10_files}
    write(tmp_path / "cifar10", files)
    with pytest.raises(DataError, match="no image of class 1"):
        load("cifar10:1", tmp_path)


# CIFAR-100 by superclass


def test_the_superclasses_part_the_hundred_classes():
    assert sorted(fine for members in DATASETS["cifar100-super"].classes.values() for fine in members) == list(
        range(100)
    )
    assert all(len(members) == 5 for members in DATASETS["cifar100-super"].classes.values())
    assert list(DATASETS["cifar100-super"].classes).index("people") == 14


def every_fine_label():
    coarse = {fine: number for number, members in enumerate(SUPERCLASSES.values()) for fine in members}
    return np.array([coarse[fine] for fine in range(100)]), np.arange(100)


@pytest.mark.parametrize("place", ["cifar100-super", "cifar-100-binary"])
def test_cifar100_is_one_superclass_against_the_rest(tmp_path, place):
    train, images = cifar_file(*every_fine_label())
    write(tmp_path / place, {"train.bin": train, "test.bin": cifar_file(*every_fine_label())[0]})
    task = load("cifar100-super:people", tmp_path)
    np.testing.assert_array_equal(task.train, images[[2, 11, 35, 46, 98]])
    assert np.flatnonzero(~task.anomalous).tolist() == [2, 11, 35, 46, 98]
    assert task.name == load("cifar100-super:14", tmp_path).name == "cifar100-super:people"


def test_cifar100_is_read_from_its_archive(tmp_path):
    content, _ = cifar_file(*every_fine_label())
    files = {"cifar-100-binary/train.bin": content, "cifar-100-binary/test.bin": content}
    archive(tmp_path / "cifar100-super" / "cifar-100-binary.tar.gz", files)
    assert len(load("cifar100-super:large natural outdoor scenes", tmp_path).train) == 5


def test_a_wrong_superclass_is_not_learnt_in_silence(tmp_path):
    coarse, fine = every_fine_label()
    coarse[36] = 14  # hamsters are no people
    content, _ = cifar_file(coarse, fine)
    write(tmp_path / "cifar100-super", {"train.bin": content, "test.bin": content})
    with pytest.raises(DataError, match=r"record 36 of train.bin puts fine label 36 in superclass 14, not 16"):
        load("cifar100-super:0", tmp_path)


# Fashion-MNIST


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


@pytest.fixture
def fashion_files(monkeypatch):
    monkeypatch.setattr(fashion_mnist, "DEBIAN", Path("/nonexistent"))
    arrays = {}
    for split, n in (("train", 30), ("t10k", 20)):
        arrays[f"{split}-images-idx3-ubyte"] = pixels(n, 28, 28)
        arrays[f"{split}-labels-idx1-ubyte"] = (np.arange(n) % 10).astype(np.uint8)
    return arrays


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_keeps_its_size_and_channel(tmp_path, fashion_files, zipped):
    files = {
        f"{name}.gz" if zipped else name: gzip.compress(idx(a)) if zipped else idx(a)
        for name, a in fashion_files.items()
    }
    write(tmp_path / "fashion-mnist", files)
    task = load("fashion-mnist:sandal", tmp_path)
    np.testing.assert_array_equal(task.train[:, 0], fashion_files["train-images-idx3-ubyte"][5::10])
    np.testing.assert_array_equal(task.test[:, 0], fashion_files["t10k-images-idx3-ubyte"])
    assert task.anomalous.tolist() == [i % 10 != 5 for i in range(20)]
    assert (task.size, task.train.shape[1:]) == (32, (1, 28, 28))
    assert task.statistics == DATASETS["fashion-mnist"].statistics


def test_damaged_fashion_mnist_names_the_file(tmp_path, fashion_files):
    write(tmp_path / "fashion-mnist", {name: idx(a) for name, a in fashion_files.items()})
    images, labels = (tmp_path / "fashion-mnist" / f"train-{part}-ubyte" for part in ("images-idx3", "labels-idx1"))
    whole = images.read_bytes()
    for damaged in (whole[:-1], whole + b"!", b"\x00\x00\x0d\x03" + whole[4:], whole[:9], b""):
        images.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{images} is not a whole IDX file"):
            load("fashion-mnist:0", tmp_path)
    images.write_bytes(idx(pixels(29, 28, 28)))
    with pytest.raises(DataError, match=r"has shape \(29, 28, 28\), not \(n, 28, 28\) for the 30 labels"):
        load("fashion-mnist:0", tmp_path)
    images.write_bytes(whole)
    labels.write_bytes(idx(np.full(30, 10, dtype=np.uint8)))
    with pytest.raises(DataError, match="holds label 10"):
        load("fashion-mnist:0", tmp_path)
    (tmp_path / "fashion-mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b\x08 damaged")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz is damaged"):
        load("fashion-mnist:0", tmp_path)


@pytest.mark.usefixtures("fashion_files")
def test_missing_fashion_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"apt-get install dataset-fashion-mnist.*train-images-idx3-ubyte.gz"):
        load("fashion-mnist:0", tmp_path)


# Cats-vs-Dogs


def kaggle(root, n):
    for kind in ("cat", "dog"):
        for i in range(n):
            save(root / "cats-vs-dogs" / "train" / f"{kind}.{i}.jpg", (70, 90))


def petimages(root, n):
    for kind in ("Cat", "Dog"):
        for i in range(n):
            save(root / "cats-vs-dogs" / "PetImages" / kind / f"{i}.jpg", (90, 70))


@pytest.mark.parametrize("layout", [kaggle, petimages])
def test_both_layouts_of_cats_vs_dogs(tmp_path, layout):
    layout(tmp_path, 10)
    with pytest.warns(UserWarning, match=r"\[10, 10\] cats and dogs, not 12500 each: split 80/20"):
        task = load("cats-vs-dogs:dog", tmp_path)
    assert task.train.shape == (8, 3, 64, 64)
    assert task.test.shape == (4, 3, 64, 64)
    assert task.anomalous.tolist() == [True, True, False, False]
    assert task.size == 64


def test_cats_vs_dogs_splits_the_sorted_names_by_one_legacy_stream(tmp_path):
    kaggle(tmp_path, 12)  # sorted as text: 0, 1, 10, 11, 2, ...
    with pytest.warns(UserWarning, match="80/20"):
        train, test = cats_vs_dogs.read_cats_vs_dogs([tmp_path / "cats-vs-dogs"])
    legacy, n = np.random.RandomState(0), 12 * 4 // 5
    cats, dogs = legacy.permutation(12), legacy.permutation(12)
    names = sorted(str(i) for i in range(12))
    files = [f"cat.{names[i]}.jpg" for i in cats[:n]] + [f"dog.{names[i]}.jpg" for i in dogs[:n]]
    for file, image in zip(files, train[0], strict=True):
        decoded = np.asarray(Image.open(tmp_path / "cats-vs-dogs" / "train" / file))
        np.testing.assert_array_equal(image.transpose(1, 2, 0), cats_vs_dogs.shrink(decoded, 64))
    assert train[1].tolist() == [0] * n + [1] * n
    assert len(test[1]) == 24 - 2 * n


def test_the_full_competition_set_gives_the_published_split_without_a_word():
    records = np.zeros(25_000, dtype=np.dtype([("usable", "?"), ("label", "u1"), ("image", "u1", (2,))]))
    records["label"][12_500:] = 1
    records["image"] = np.arange(25_000, dtype=np.uint16).view(np.uint8).reshape(-1, 2)  # each its own number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train, test = cats_vs_dogs._split(records)
    legacy = np.random.RandomState(0)
    cats, dogs = legacy.permutation(12_500), legacy.permutation(12_500) + 12_500
    np.testing.assert_array_equal(train[0].view(np.uint16)[:, 0], np.concatenate([cats[:10_000], dogs[:10_000]]))
    np.testing.assert_array_equal(test[0].view(np.uint16)[:, 0], np.concatenate([cats[10_000:], dogs[10_000:]]))


def test_damaged_cats_are_counted_and_left_out(tmp_path):
    petimages(tmp_path, 5)
    write(tmp_path / "cats-vs-dogs" / "PetImages" / "Cat", {"666.jpg": b"", "667.jpg": b"Rar!"})
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match="80/20"), pytest.warns(UserWarning, match="2 of 12 files"):
            assert len(load("cats-vs-dogs:cat", tmp_path).train) == 4


@pytest.mark.filterwarnings("ignore:.*split 80/20")
def test_decoding_is_kept_and_renewed_when_the_files_change(tmp_path, monkeypatch):
    kaggle(tmp_path, 5)
    monkeypatch.setenv("FIRM_CACHE", str(tmp_path / "cache"))
    decode, calls = cats_vs_dogs._decode, []
    monkeypatch.setattr(cats_vs_dogs, "_decode", lambda files: calls.append(1) or decode(files))
    first, again = load("cats-vs-dogs:cat", tmp_path), load("cats-vs-dogs:cat", tmp_path)
    assert len(calls) == 1
    assert torch.equal(first.train, again.train)
    save(tmp_path / "cats-vs-dogs" / "train" / "cat.5.jpg", (70, 90))
    load("cats-vs-dogs:cat", tmp_path)
    assert len(calls) == 2
    for cache in (tmp_path / "cache").glob("*.npy"):
        cache.write_bytes(b"damaged")
    load("cats-vs-dogs:cat", tmp_path)
    assert len(calls) == 3
    assert [path.name for path in (tmp_path / "cats-vs-dogs").iterdir()] == ["train"]  # nothing among the data
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.delenv("FIRM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    load("cats-vs-dogs:cat", tmp_path)
    assert len(list((tmp_path / ".cache" / "firm").iterdir())) == 1


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("disk full")

    kaggle(tmp_path, 5)
    monkeypatch.setattr(cats_vs_dogs.np, "save", full)
    with pytest.warns(UserWarning, match="80/20"), pytest.warns(UserWarning, match="could not be cached"):
        assert len(load("cats-vs-dogs:cat", tmp_path).train) == 4


def test_missing_cats_vs_dogs_says_where_they_are(tmp_path):
    with pytest.raises(DataError, match=r"cats-vs-dogs; unpack there .*kaggle.com.*PetImages.*microsoft.com"):
        load("cats-vs-dogs:cat", tmp_path)


@given(st.integers(1, 200), st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_shrinking_keeps_the_centre_square(height, width):
    ramp = np.broadcast_to(np.linspace(0, 255, width, dtype=np.uint8)[None, :, None], (height, width, 3))
    small = cats_vs_dogs.shrink(np.ascontiguousarray(ramp), 64)
    assert small.shape == (64, 64, 3)
    if width >= 32:
        assert abs(float(small.mean()) - 127.5) < 6


def test_shrinking_averages_areas():
    image = pixels(128, 192, 3)
    exact = image.reshape(64, 2, 96, 2, 3).mean((1, 3))[:, 16:80]
    assert np.abs(cats_vs_dogs.shrink(image, 64) - exact).max() <= 0.5


# names


def test_every_data_set_has_its_facts():
    counts = {name: len(facts.classes) for name, facts in DATASETS.items()}
    semantic = {"cifar10": 10, "cifar100-super": 20, "fashion-mnist": 10, "cats-vs-dogs": 2}
    assert counts == semantic | {"mvtec": 15, "visa": 12, "btad": 3, "mpdd": 6, "drawn": 3}
    assert tuple(DATASETS["drawn"].classes) == tuple(PRODUCTS)
    for facts in DATASETS.values():
        assert all(name == name.lower() and " " not in name for name in facts.classes)


def test_names_that_are_wrong_list_those_that_are_right(tmp_path):
    for name in ("cifar10", "cifar10:", "cifar10:10", "cifar10:-1", "cifar10:unicorn"):
        with pytest.raises(DataError, match=r"cifar10:CLASS .*0 airplane, 1 automobile, 2 bird"):
            load(name, tmp_path)
    with pytest.raises(DataError, match=r"'imagenet' .* cifar10, cifar100-super, fashion-mnist"):
        load("imagenet")


def test_a_folder_is_known_by_its_slash_or_by_being_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "parts" / "a.png")
    save(tmp_path / "cifar10" / "a.png")
    assert load("parts").name == "parts"
    assert len(load("./cifar10").train) == 1
    with pytest.raises(DataError, match="has no class"):
        load("cifar10")


def test_drawn_parts_need_no_files():
    task = load("drawn:plate", side=32)
    assert (task.name, task.size) == ("drawn:plate", 32)
    assert task.anomalous.any()
    assert task.test.shape[-2:] == task.truth.masks.shape[-2:] == (32, 32)
    assert torch.equal(task.truth.masks.flatten(1).any(1), task.anomalous)
    assert (DATASETS["drawn"].size, DATASETS["drawn"].side) == (64, 128)


def test_readers_are_loaded_with_their_data_set():
    """A fit of a folder starts without the code that draws parts and reads other sets."""
    script = (
        "import sys, firm.detector.fit; print([n for n in sys.modules if n.startswith(('firm.drawn', 'firm.data'))])"
    )
    loaded = ast.literal_eval(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.decode()
    )
    unneeded = {"cats_vs_dogs", "cifar", "download", "drawn_parts", "fashion_mnist", "industrial"}
    assert not {name.rpartition(".")[2] for name in loaded} & unneeded
    assert not [name for name in loaded if name.startswith("firm.drawn")]


# the real ones


@pytest.mark.skipif(not fashion_mnist.DEBIAN.is_dir(), reason="needs the Debian package dataset-fashion-mnist")
def test_real_fashion_mnist(tmp_path):
    unpacked = {  # of the official files; Debian compresses them anew
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    }
    for name, md5 in unpacked.items():
        content = gzip.decompress((fashion_mnist.DEBIAN / f"{name}.gz").read_bytes())
        assert hashlib.md5(content).hexdigest() == md5
    train, test = fashion_mnist.read_fashion_mnist([tmp_path])
    assert np.bincount(train[1]).tolist() == [6000] * 10
    assert np.bincount(test[1]).tolist() == [1000] * 10
    statistics = DATASETS["fashion-mnist"].statistics
    assert abs(train[0].mean() / 255 - statistics.mean[0]) < 1e-4
    task = load("fashion-mnist:5", tmp_path)
    assert (len(task.train), int(task.anomalous.sum())) == (6000, 9000)


@pytest.mark.skipif(not REAL_CIFAR10.is_dir(), reason="needs CIFAR-10 in the folder named by FIRM_DATA")
def test_real_cifar10():
    train, test = cifar.read_cifar10([REAL_CIFAR10])
    assert np.bincount(train[1]).tolist() == [5000] * 10
    assert np.bincount(test[1]).tolist() == [1000] * 10
    mean = train[0].mean((0, 2, 3), dtype=np.float64) / 255
    np.testing.assert_allclose(mean, DATASETS["cifar10"].statistics.mean, atol=1e-4)
    task = load("cifar10:bird")
    assert (len(task.train), int(task.anomalous.sum())) == (5000, 9000)
