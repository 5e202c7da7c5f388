"""IDX files, the drawn digits, and datasets that answer for whole batches."""

import gzip
import hashlib
import struct
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tandem.data import datasets, digits
from tandem.data.datasets import TensorImages, TensorRows, find_idx_folder, idx_datasets, random_crop_flip
from tandem.errors import ConfigError

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)


def write_set(folder: Path, count: int = 6, side: int = 28) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for images, labels in (datasets.NAMES[:2], datasets.NAMES[2:]):
        datasets.write_idx(folder / images, torch.randint(256, (count, side, side), dtype=torch.uint8))
        datasets.write_idx(folder / labels, torch.arange(count, dtype=torch.uint8) % 10)
    return folder


def test_idx_is_read_as_written_raw_and_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "images"
    datasets.write_idx(path, IMAGES)
    assert path.read_bytes()[:4] == b"\0\0\x08\x03"
    assert torch.equal(datasets.read_idx(path, datasets.IMAGES), IMAGES)
    (tmp_path / "images.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(datasets.read_idx(tmp_path / "images.gz", datasets.IMAGES), IMAGES)


WHOLE = struct.pack(">HBB3I", 0, 8, 3, 2, 3, 4) + bytes(24)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", b"", "empty"),
        ("a", b"<html>", "3c 68 74 6d"),
        ("a", WHOLE[:10], "a header of 16 bytes, got 10 bytes"),
        ("a", WHOLE[:-1], "expected 40 bytes for 2 x 3 x 4, got 39 bytes"),
        ("a", WHOLE + b"!", "got 41 bytes"),
        ("a", WHOLE[:3] + b"\x01" + WHOLE[4:], "magic 0x0803), got magic 0x0801"),
        ("a", b"\0\0\x0d" + WHOLE[3:], "got magic 0x0d03"),
        ("a", struct.pack(">HBB3I", 0, 8, 3, 0, 3, 4), "at least one element"),
        ("a.gz", WHOLE, "a complete gzip file"),
        ("a.gz", gzip.compress(WHOLE, mtime=0)[:-9], "a complete gzip file"),
    ],
)
def test_a_broken_file_is_named_with_what_was_expected(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        datasets.read_idx(tmp_path / name, datasets.IMAGES)
    assert says in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    labels = write_set(tmp_path) / datasets.NAMES.train_labels
    datasets.write_idx(labels, torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="6 labels"):
        idx_datasets(tmp_path, 0.1, 0.3)
    datasets.write_idx(labels, torch.full((6,), 10, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="a label 10"):
        idx_datasets(tmp_path, 0.1, 0.3)


def test_the_first_complete_folder_is_found(tmp_path: Path) -> None:
    write_set(tmp_path / "b")
    (write_set(tmp_path / "a") / datasets.NAMES.train_labels).unlink()
    assert find_idx_folder([tmp_path / "none", tmp_path / "a", tmp_path / "b"]) == tmp_path / "b"
    assert find_idx_folder([tmp_path / "a"]) is None


def test_digits_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        images, labels = digits.draw(500, seed=3)
        torch.set_num_threads(2)
        again, _ = digits.draw(500, seed=3)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(images, again)
    assert images.shape == (500, 28, 28) and images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))
    assert not torch.equal(images, digits.draw(500, seed=4)[0])


def test_the_strokes_of_digits_are_the_same_bytes_everywhere() -> None:
    glyphs = digits._glyphs()
    assert hashlib.sha256(glyphs.numpy().tobytes()).hexdigest()[:16] == "e79a19325bc27b11"
    assert not glyphs[:, [0, -1]].any() and not glyphs[:, :, [0, -1]].any(), "it stands for all outside"
    assert len({glyph.numpy().tobytes() for glyph in glyphs}) == 60


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "TRAIN_SAMPLES", 60)
    monkeypatch.setattr(digits, "EVALUATION_SAMPLES", 10)


def draw_few(folder: Path) -> None:
    """What a process of its own runs: draws few pictures."""
    digits.TRAIN_SAMPLES, digits.EVALUATION_SAMPLES = 60, 10
    digits.prepare_digits(folder)


@pytest.mark.slow
def test_digits_are_drawn_once_by_many_processes(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "digits"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(draw_few, [folder] * 4))
    assert not datasets.missing_idx(folder)
    assert {path.name for path in folder.parent.iterdir()} == {"digits", ".digits.lock"}
    written = (folder / datasets.NAMES.train_images).stat()
    digits.prepare_digits(folder)
    assert (folder / datasets.NAMES.train_images).stat().st_mtime_ns == written.st_mtime_ns
    assert len(idx_datasets(folder, 0.2, 0.2).train) == 60


@pytest.mark.usefixtures("few_digits")
def test_whoever_comes_second_without_a_lock_leaves_the_first_ones_files(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    digits._draw_into(folder)
    written = (folder / datasets.NAMES.train_images).stat()
    digits._draw_into(folder)
    assert (folder / datasets.NAMES.train_images).stat().st_mtime_ns == written.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


@pytest.mark.usefixtures("few_digits")
def test_an_incomplete_digits_folder_is_completed(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    digits.prepare_digits(folder)
    (folder / datasets.NAMES.train_labels).unlink()
    digits.prepare_digits(folder)
    assert not datasets.missing_idx(folder)


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        digits.prepare_digits(tmp_path / "file" / "digits")


def test_images_of_a_batch_are_those_of_single_samples() -> None:
    images = torch.randint(256, (20, 5, 6, 3), dtype=torch.uint8)
    dataset = TensorImages(images, torch.arange(20), mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    batch, labels = dataset.__getitems__([7, 3, 7])
    assert batch.shape == (3, 3, 5, 6) and batch.dtype == torch.float32 and labels.tolist() == [7, 3, 7]
    for place, index in enumerate([7, 3, 7]):
        assert torch.equal(batch[place], dataset[index][0])
    expected = images[3].permute(2, 0, 1) / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    expected /= torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    torch.testing.assert_close(batch[1], expected)


def test_rows_are_given_as_they_are() -> None:
    rows = TensorRows(torch.arange(6.0).view(3, 2), torch.arange(3))
    inputs, targets = rows.__getitems__(torch.tensor([2, 0]))
    assert inputs.tolist() == [[4, 5], [0, 1]] and targets.tolist() == [2, 0]
    assert len(rows) == 3 and rows[1][1] == 1


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    images = torch.randint(256, (50, 8, 8, 3), dtype=torch.uint8)
    dataset = TensorImages(images, torch.arange(50), [0.5] * 3, [0.5] * 3, random_crop_flip)
    together, _ = dataset.augmented(torch.arange(50), 1, 7)
    apart = torch.cat([dataset.augmented(torch.tensor([index]), 1, 7)[0] for index in range(50)])
    assert torch.equal(together, apart)
    assert not torch.equal(together, dataset.augmented(torch.arange(50), 2, 7)[0])
    assert not torch.equal(together, dataset.augmented(torch.arange(50), 1, 8)[0])
    assert torch.equal(dataset.__getitems__([4])[0], dataset.__getitems__([4])[0])


def test_crops_are_shifted_and_flipped_pictures() -> None:
    picture = torch.arange(1, 37, dtype=torch.uint8).view(6, 6, 1)
    keys = torch.randint(2**62, (400,), generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(10, 10, 1, dtype=torch.uint8)
    padded[2:8, 2:8] = picture
    crops = [padded[top : top + 6, left : left + 6] for top in range(5) for left in range(5)]
    possible = {bytes(crop.flatten().tolist()) for crop in crops}
    possible |= {bytes(crop.flip(1).flatten().tolist()) for crop in crops}
    made = random_crop_flip(picture.expand(400, 6, 6, 1), keys, padding=2)
    seen = {bytes(crop.flatten().tolist()) for crop in made}
    assert seen == possible
