"""MVTec-AD, VisA, BTAD and MPDD from small files in exactly their published layouts, and the real screw where it is."""

import csv
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from firm.data.folder import Reading, load_folder
from firm.data.registry import DATASETS, data_root, load
from firm.errors import DataError
from firm.types import Statistics

RNG = np.random.default_rng(0)
INDUSTRIAL = ("mvtec", "visa", "btad", "mpdd")
REAL_SCREW = data_root() / "mvtec_screw"
pytestmark = pytest.mark.filterwarnings("ignore:.*the published set")  # the small sets are all too small


def save(file, shape=(20, 24)):
    file.parent.mkdir(parents=True, exist_ok=True)
    image = RNG.integers(0, 256, (*shape, 3), dtype=np.uint8)
    Image.fromarray(image).save(file)
    return image


def mark(file, shape=(20, 24), value=255):
    """A mask with its upper left quarter marked."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mask = np.zeros(shape, np.uint8)
    mask[: shape[0] // 2, : shape[1] // 2] = value
    Image.fromarray(mask).save(file)


def mvtec(folder, train=2, kinds=("broken", "scratch")):
    for i in range(train):
        save(folder / "train" / "good" / f"{i:03}.png")
    save(folder / "test" / "good" / "000.png")
    for kind in kinds:
        save(folder / "test" / kind / "000.png")
        mark(folder / "ground_truth" / kind / "000_mask.png")


def btad(folder, image="bmp", mask="png"):
    for place in ("train/ok", "test/ok", "test/ko"):
        save(folder / place / f"0000.{image}")
    mark(folder / "ground_truth" / "ko" / f"0000.{mask}")


ROWS = [
    ["object", "split", "label", "image", "mask"],
    ["candle", "train", "normal", "candle/Data/Images/Normal/0000.JPG", ""],
    ["pcb1", "train", "normal", "pcb1/Data/Images/Normal/0002.JPG", ""],
    ["pcb1", "train", "normal", "pcb1/Data/Images/Normal/0000.JPG", ""],
    ["pcb1", "test", "normal", "pcb1/Data/Images/Normal/0001.JPG", ""],
    ["pcb1", "test", "anomaly", "pcb1/Data/Images/Anomaly/000.JPG", "pcb1/Data/Masks/Anomaly/000.png"],
]


def visa(root, rows=ROWS, table="split_csv/1cls.csv"):
    for i in range(3):
        save(root / "pcb1" / "Data" / "Images" / "Normal" / f"000{i}.JPG")
    save(root / "pcb1" / "Data" / "Images" / "Anomaly" / "000.JPG")
    mark(root / "pcb1" / "Data" / "Masks" / "Anomaly" / "000.png", value=1)  # as published: 1 is nearly black
    (root / table).parent.mkdir(parents=True)
    with (root / table).open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def silent(*names, **options):
    """Loaded without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(*names, **options)


def quarter(side):
    mask = torch.zeros(side, side, dtype=torch.bool)
    mask[: side // 2, : side // 2] = True
    return mask


# the facts


def test_the_table_adds_up_to_the_published_totals():
    def totals(name):
        counts = DATASETS[name].classes.values()
        return len(counts), *map(sum, zip(*counts, strict=True))

    assert totals("mvtec") == (15, 3629, 467, 1725 - 467)
    assert totals("visa") == (12, 8659, 962, 1200)
    assert totals("btad") == (3, 1799, 451, 741 - 451)
    assert totals("mpdd") == (6, 888, 176, 282)
    for name in INDUSTRIAL:
        assert (DATASETS[name].size, DATASETS[name].side) == (256, 256)
    assert DATASETS["mvtec"].statistics == Statistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# where they are


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ("mvtec:screw", "mvtec/screw"),
        ("mvtec:screw", "mvtec_screw"),
        ("mvtec:screw", "mvtec/mvtec_anomaly_detection/screw"),
        ("mvtec:screw", "screw"),
        ("mpdd:tubes", "MPDD/tubes"),
        ("visa:pcb1", "VisA_pytorch/1cls/pcb1"),
    ],
)
def test_the_layout_of_mvtec_is_found_where_people_put_it(tmp_path, task, place):
    mvtec(tmp_path / place)
    found = load(task, tmp_path)
    assert found.name == task
    assert found.train.shape == (2, 3, 256, 256)
    assert found.test.shape == (3, 3, 256, 256)
    assert found.size == 256
    assert found.statistics == DATASETS[task.partition(":")[0]].statistics
    assert found.truth.kinds == ("broken", "good", "scratch")
    assert found.anomalous.tolist() == [True, False, True]
    assert found.truth.known.all()
    assert torch.equal(found.truth.masks, torch.stack([quarter(256), torch.zeros(256, 256) > 0, quarter(256)]))


def test_the_most_expected_place_wins(tmp_path):
    mvtec(tmp_path / "mvtec_screw", train=1)
    mvtec(tmp_path / "mvtec" / "screw", train=3)
    (tmp_path / "mvtec" / "tile").mkdir()  # empty: not the category
    mvtec(tmp_path / "mvtec_tile", train=1)
    assert [len(load(f"mvtec:{name}", tmp_path, side=8).train) for name in ("screw", "tile")] == [3, 1]


def test_another_side_is_read_on_demand(tmp_path):
    mvtec(tmp_path / "mvtec" / "wood")
    small, large = (load("mvtec:wood", tmp_path, side=side) for side in (32, 300))
    assert (small.test.shape[-1], small.size) == (32, 32)
    assert (large.test.shape[-1], large.size) == (300, 256)
    assert torch.equal(small.truth.masks[0], quarter(32))
    folder = load_folder(tmp_path / "mvtec" / "wood", Reading(32))
    assert torch.equal(small.train, folder.train)
    assert torch.equal(small.test, folder.test)


def test_a_missing_category_tells_what_to_unpack_where(tmp_path):
    for name in INDUSTRIAL:
        published = DATASETS[name]
        task = f"{name}:{list(published.classes)[-1]}"
        with pytest.raises(DataError) as caught:
            load(task, tmp_path)
        for part in (task, str(tmp_path / name), published.marker, published.home):
            assert part in str(caught.value)


def test_classes_are_known_in_any_spelling(tmp_path):
    for written in ("metal_nut", "Metal-Nut", "METAL NUT", "7"):
        with pytest.raises(DataError, match=r"^mvtec:metal_nut is not in"):
            load(f"mvtec:{written}", tmp_path)
    with pytest.raises(DataError, match=r"^btad:01 is not in"):
        load("btad:01", tmp_path)
    for ambiguous in ("btad:1", "btad:0", "btad:4", "btad:"):
        with pytest.raises(DataError, match="01, 02, 03"):
            load(ambiguous, tmp_path)


# what is there


def test_other_counts_are_said_with_both_numbers(tmp_path):
    mvtec(tmp_path / "mvtec" / "screw")
    with pytest.warns(UserWarning, match=r"^mvtec:screw has 2 .* 1 good .* 2 .* published set 320 .* 41 good .* 119"):
        load("mvtec:screw", tmp_path, side=8)


def test_the_published_counts_are_no_news(tmp_path):
    folder = tmp_path / "mvtec" / "toothbrush"
    save(tmp_path / "part.png")
    for place, count in (("train/good", 60), ("test/good", 12), ("test/defective", 30)):
        (folder / place).mkdir(parents=True)
        for i in range(count):
            shutil.copy(tmp_path / "part.png", folder / place / f"{i:03}.png")
    task = silent("mvtec:toothbrush", tmp_path, side=8)
    assert (len(task.train), len(task.test)) == (60, 42)
    (folder / "train" / "good" / "059.png").unlink()
    with pytest.warns(UserWarning, match=r"^mvtec:toothbrush has 59 .* the published set 60"):
        load("mvtec:toothbrush", tmp_path, side=8)


@pytest.mark.parametrize(
    ("name", "image", "mask", "place"),
    [
        ("01", "bmp", "png", "btad"),
        ("02", "png", "png", "BTech_Dataset_transformed"),
        ("03", "bmp", "bmp", "btad/BTech_Dataset_transformed"),
    ],
)  # as published
def test_btad_has_ok_and_ko(tmp_path, place, name, image, mask):
    btad(tmp_path / place / name, image, mask)
    task = load(f"btad:{name}", tmp_path, side=16)
    assert (task.name, len(task.train)) == (f"btad:{name}", 1)
    assert task.truth.kinds == ("ko", "good")
    assert task.anomalous.tolist() == [True, False]
    assert task.truth.known.tolist() == [True, True]
    assert torch.equal(task.truth.masks, torch.stack([quarter(16), quarter(16) & False]))
    assert load_folder(tmp_path / place / name, Reading(16)).truth.kinds == ("ko", "good")


@pytest.mark.parametrize("place", ["visa", "VisA", "visa/VisA_20220922"])
def test_visa_is_split_by_its_table(tmp_path, place):
    visa(tmp_path / place)
    task = load("visa:pcb1", tmp_path, side=16)
    assert task.truth.kinds == ("good", "anomaly")
    assert task.anomalous.tolist() == [False, True]
    assert task.truth.known.tolist() == [True, True]
    assert torch.equal(task.truth.masks[1], quarter(16))
    normal = load_folder(tmp_path / place / "pcb1" / "Data" / "Images" / "Normal", Reading(16)).train
    assert torch.equal(task.train, normal[[2, 0]])
    assert torch.equal(task.test[0], normal[1])


def test_a_class_of_visa_may_be_copied_alone_with_the_table(tmp_path):
    visa(tmp_path / "all")
    shutil.copytree(tmp_path / "all" / "pcb1", tmp_path / "root" / "visa_pcb1")
    with pytest.raises(DataError, match=r"split_csv/1cls.csv.* cannot be read"):
        load("visa:pcb1", tmp_path / "root", side=16)
    shutil.copytree(tmp_path / "all" / "split_csv", tmp_path / "root" / "visa_pcb1" / "split_csv")
    assert len(load("visa:pcb1", tmp_path / "root", side=16).train) == 2


def test_what_visa_lacks_is_said(tmp_path):
    gone = [["pcb1", "train", "normal", "pcb1/Data/Images/Normal/0009.JPG", ""]]
    unmarked = [["pcb1", "test", "anomaly", "pcb1/Data/Images/Anomaly/000.JPG", "pcb1/Data/Masks/Anomaly/009.png"]]
    visa(tmp_path / "visa", ROWS[:-1] + gone + unmarked)
    with (
        pytest.warns(UserWarning, match=r"left out: .*0009.JPG does not exist"),
        pytest.warns(UserWarning, match=r"defective images without a mask: 1, for example .*Anomaly/000.JPG"),
        pytest.warns(UserWarning, match=r"masks without an image: 1, for example .*Masks/Anomaly/000.png"),
    ):
        task = load("visa:pcb1", tmp_path, side=16)
    assert (len(task.train), task.truth.known.tolist()) == (2, [True, False])


def test_visa_without_masks_has_nothing_to_say(tmp_path):
    visa(tmp_path / "visa")
    shutil.rmtree(tmp_path / "visa" / "pcb1" / "Data" / "Masks")
    assert load("visa:pcb1", tmp_path, side=16).truth.known.tolist() == [True, False]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row for row in ROWS if row[0] != "pcb1"], "lists no image of pcb1"),
        ([row[:4] for row in ROWS], "cannot be read .*mask"),
        ([*ROWS, ["pcb1", "train", "anomaly", "pcb1/Data/Images/Anomaly/000.JPG", ""]], "anomalous .* into train"),
        ([], "lists no image of pcb1"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, rows, message):
    visa(tmp_path / "visa", rows)
    with pytest.raises(DataError, match=rf"1cls.csv.*{message}"):
        load("visa:pcb1", tmp_path)


def test_a_table_that_is_no_text_is_refused(tmp_path):
    visa(tmp_path / "visa")
    (tmp_path / "visa" / "split_csv" / "1cls.csv").write_bytes(b"\x1f\x8b\xff\xfe")
    with pytest.raises(DataError, match=r"1cls.csv.* cannot be read"):
        load("visa:pcb1", tmp_path)


# the real one


@pytest.mark.skipif(not REAL_SCREW.is_dir(), reason="needs mvtec_screw in the folder named by FIRM_DATA")
def test_real_screw():
    task = silent("mvtec:screw")
    assert task.train.shape == (320, 3, 256, 256)
    assert task.test.shape == (160, 3, 256, 256)
    assert int(task.anomalous.sum()) == 119
    assert torch.equal(task.truth.known, ~task.anomalous)  # its masks are not there
    assert task.train.float().std() > 20
