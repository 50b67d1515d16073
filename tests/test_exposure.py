"""Outlier exposure sets: arrays that stay on disk, and folders decoded when taken."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from firm.data.registry import data_root
from firm.errors import DataError
from firm.outliers.whole_images import open_pool, pool_named

RNG = np.random.default_rng(0)
REAL_EXPOSURE = sorted((data_root() / "exposure").glob("*.npy"))


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(file, shape):
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pixels(*shape, 3)
    Image.fromarray(image).save(file)
    return image


def test_an_exposure_array_stays_on_disk_until_taken(tmp_path):
    images = pixels(20, 32, 32, 3)
    (tmp_path / "exposure").mkdir()
    np.save(tmp_path / "exposure" / "300K_random_images.npy", images)
    pool = open_pool("", tmp_path)
    assert isinstance(pool.images, np.memmap)
    assert len(pool) == 20
    for indices in ([3, 0, 3], np.array([3, 0, 3]), torch.tensor([3, 0, 3])):
        taken = pool.take(indices, 32)
        assert taken.dtype == torch.uint8
        np.testing.assert_array_equal(taken.permute(0, 2, 3, 1), images[[3, 0, 3]])
    assert pool.take([1], 64).shape == (1, 3, 64, 64)
    assert pool.take([], 32).shape == (0, 3, 32, 32)
    taken += 1  # taking gives copies, never the file
    with pytest.raises(IndexError):
        pool.take([20], 32)


def test_a_pool_is_found_in_any_folder_of_data(tmp_path, monkeypatch):
    for number, name in enumerate(("first.npy", "second.npy"), 1):
        (tmp_path / str(number) / "exposure").mkdir(parents=True)
        np.save(tmp_path / str(number) / "exposure" / name, pixels(number, 8, 8, 3))
    monkeypatch.setenv("FIRM_DATA", os.pathsep.join(str(tmp_path / str(number)) for number in (1, 2)))
    assert [len(pool_named(name)) for name in ("first.npy", "second.npy", "")] == [1, 2, 1]
    assert len(pool_named(str(tmp_path / "2" / "exposure" / "second.npy"))) == 2


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 8, 8, 3)), pixels(4, 3, 8, 8), pixels(4, 8, 8), pixels(0, 8, 8, 3)],
    ids=lambda a: str(a.shape),
)
def test_a_wrong_exposure_array_names_the_layout(tmp_path, array):
    np.save(tmp_path / "wrong.npy", array)
    with pytest.raises(DataError, match=r"wrong.npy holds .*\(n, h, w, 3\) of uint8.*300K_random"):
        open_pool(str(tmp_path / "wrong.npy"), tmp_path)


def test_pickled_damaged_or_missing_exposure_is_refused(tmp_path):
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "damaged.npy").write_bytes(b"\x93NUMPY")
    np.savez(tmp_path / "several.npz", a=pixels(1, 8, 8, 3))
    for name in ("pickled.npy", "damaged.npy", "several.npz", "absent.npy"):
        with pytest.raises(DataError, match=rf"{name}.*https://people.eecs.berkeley.edu/~hendrycks/300K"):
            open_pool(str(tmp_path / name), tmp_path)
    with pytest.raises(DataError, match=rf"not at {tmp_path}/exposure/300K_random_images.npy"):
        open_pool("", tmp_path)


def test_two_exposure_arrays_are_a_question(tmp_path):
    (tmp_path / "exposure").mkdir()
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / "exposure" / name, pixels(1, 8, 8, 3))
    with pytest.raises(DataError, match="holds 2 arrays"):
        open_pool("", tmp_path)


def test_an_exposure_folder_is_decoded_when_taken(tmp_path):
    images = [save(tmp_path / "deep" / f"{i}.png", (32, 32)) for i in range(3)]
    (tmp_path / "deep" / "3.png").write_bytes(b"damaged")
    (tmp_path / "notes.txt").write_text("no image")
    pool = open_pool(str(tmp_path), tmp_path)
    assert len(pool) == 4
    np.testing.assert_array_equal(pool.take([2, 1], 32).permute(0, 2, 3, 1), [images[2], images[1]])
    assert pool.take(torch.tensor([0]), 16).shape == (1, 3, 16, 16)
    assert pool.take([], 16).shape == (0, 3, 16, 16)
    with pytest.warns(UserWarning, match=r"3.png cannot be decoded.*the next file"):
        np.testing.assert_array_equal(pool.take([3], 32)[0].permute(1, 2, 0), images[0])
    with pytest.raises(IndexError):
        pool.take([4], 16)


def test_an_exposure_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no image file"):
        open_pool(str(tmp_path), tmp_path)
    (tmp_path / "one.png").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be decoded"), pytest.raises(DataError, match="no file in"):
        open_pool(str(tmp_path), tmp_path).take([0], 8)


@pytest.mark.skipif(not REAL_EXPOSURE, reason="needs an exposure array in the folder named by FIRM_DATA")
def test_real_exposure():
    pool = open_pool(str(REAL_EXPOSURE[0]), data_root())
    taken = pool.take(np.arange(0, len(pool), 100), 32)
    assert taken.shape[1:] == (3, 32, 32)
    assert taken.float().std() > 20
