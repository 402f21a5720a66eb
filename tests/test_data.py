"""Text files, and batches that depend on a seed and a step alone."""

import numpy as np
import pytest

from shaderdsl import data
from shaderdsl.errors import DataError


def test_default_text_is_the_same_each_time_and_is_text():
    text = data.default_text()
    assert text == data.default_text()
    assert len(text) > 200_000
    assert "assert" in text.decode()


def test_files_are_joined(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("zwö\n")
    assert data.read_text([tmp_path / "a", tmp_path / "b"]) == "one\n\nzwö\n".encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ab\0c", "zero byte at offset 2"),
        (b"ab\xffc", "0xff at offset 2"),
        (b"", "is empty"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"\x89PNG\r\n\x1a\n\0\0", "not text"),
    ],
)
def test_what_is_not_text_is_refused_with_its_place(tmp_path, content, said):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        data.read_text([path])
    assert str(path) in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        data.read_text([tmp_path / "nothing"])
    with pytest.raises(DataError, match="cannot read"):
        data.read_text([tmp_path])


def test_split_keeps_the_last_tenth_apart():
    first, last = data.split(np.arange(1005))
    assert len(last) == 100
    assert np.array_equal(np.concatenate([first, last]), np.arange(1005))


def test_a_batch_is_a_function_of_seed_and_step():
    tokens = np.arange(10_000) % 251
    one = data.Batches(tokens, size=4, length=64, seed=3)
    other = data.Batches(tokens, size=4, length=64, seed=3)
    for step in range(200):
        one(step)
    assert one(150).shape == (4, 65)
    assert one(150).dtype == np.int32
    assert np.array_equal(one(150), other(150))
    unlike = data.Batches(tokens, size=4, length=64, seed=4)
    assert not np.array_equal(one(150), unlike(150))


@pytest.mark.parametrize("total", [65, 66, 127, 128, 129, 1000, 4097])
def test_an_epoch_visits_every_window_once(total):
    batches = data.Batches(np.arange(total), size=1, length=64, seed=0)
    for epoch in range(3):
        first = epoch * batches.windows
        rows = [batches(first + i)[0] for i in range(batches.windows)]
        starts = sorted(row[0] for row in rows)
        assert all(np.array_equal(row, row[0] + np.arange(65)) for row in rows)
        assert np.all(np.diff(starts) == 64)
    assert batches.windows >= (total - 64) // 64


def test_too_little_text_is_refused():
    with pytest.raises(DataError, match="64 tokens are too few"):
        data.Batches(np.zeros(64, np.uint8), size=1, length=64)
    with pytest.raises(DataError, match="1 held-out tokens"):
        data.windows(np.zeros(1, np.uint8), 64)


@pytest.mark.parametrize("total", [2, 64, 65, 66, 200])
def test_windows_judge_every_token_once(total):
    tokens = np.arange(total)
    inputs, labels = data.windows(tokens, 64)
    counted = labels != -100
    assert np.array_equal(labels[counted], tokens[1:])
    assert np.array_equal(inputs[counted], tokens[:-1])
    assert inputs.shape == labels.shape == (-(-(total - 1) // 64), 64)


def test_token_files(tmp_path):
    np.save(tmp_path / "good.npy", np.arange(5, dtype=np.uint16))
    assert data.read_tokens(tmp_path / "good.npy")[3] == 3
    np.save(tmp_path / "flat.npy", np.zeros((2, 3), np.int32))
    np.save(tmp_path / "real.npy", np.zeros(3))
    (tmp_path / "no.npy").write_text("text")
    for name, said in [
        ("flat", "one axis"),
        ("real", "float64"),
        ("no", "as tokens"),
        ("gone", "cannot read"),
    ]:
        with pytest.raises(DataError, match=said):
            data.read_tokens(tmp_path / f"{name}.npy")
