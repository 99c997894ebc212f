"""Text is split by file, reproducibly, and windows are a pure function of the step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from zero_optim.train.loop import draw_windows, fixed_windows, load_corpus, split, unigram_entropy

TEXT = torch.arange(1000).remainder(251).to(torch.uint8)
WHERE = {"seed": 0, "step": 5}


def named(*sizes: int) -> list[tuple[str, bytes]]:
    return [(f"file{number}", bytes([number]) * size) for number, size in enumerate(sizes)]


def test_files_go_whole_to_one_side_but_for_one_in_any_order() -> None:
    texts = named(*range(50, 150))
    train, validation = split(texts)
    sides = [(text in train) + (text in validation) for _, text in texts]
    assert sides.count(0) <= 1 and sides.count(2) == 0
    total = sum(len(text) for _, text in texts)
    assert (len(train), len(validation)) == (total - total // 10, total // 10)
    assert split(texts[::-1]) == (train, validation)
    text = bytes(range(200))
    assert split([("one", text)]) == (text[:180], text[180:])


def test_a_folder_is_read_without_hidden_files_and_has_a_digest(tmp_path: Path) -> None:
    for name, text in ((".git/config", b"x" * 500), (".hidden", b"x" * 500), ("sub/b", b"b" * 400), ("a", b"a" * 300)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(str(tmp_path), seq=8)
    everything = bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist())
    assert sorted(everything) == sorted(b"a" * 300 + b"b" * 400)
    assert load_corpus(str(tmp_path), seq=8).digest == corpus.digest
    (tmp_path / "a").write_bytes(b"a" * 299 + b"c")
    assert load_corpus(str(tmp_path), seq=8).digest != corpus.digest


def test_the_default_text_is_the_standard_library() -> None:
    corpus = load_corpus(None, seq=256)
    assert b"class OrderedDict" in bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist())
    assert corpus.validation.numel() > 200_000


def test_windows_are_contiguous_text_and_a_function_of_seed_step_and_number() -> None:
    whole = draw_windows(TEXT, 32, range(12), **WHERE)
    assert whole.shape == (12, 33) and whole.dtype == torch.int64
    assert torch.equal((whole[:, 1:] - whole[:, :-1]).remainder(251), torch.ones(12, 32, dtype=torch.int64))
    assert whole.unique(dim=0).shape[0] > 9
    for size in (1, 2, 3, 6):  # over ranks and micro-batches
        parts = [draw_windows(TEXT, 32, range(first, first + size), **WHERE) for first in range(0, 12, size)]
        assert torch.equal(torch.cat(parts), whole)
    for name in WHERE:
        assert not torch.equal(draw_windows(TEXT, 32, range(12), **{**WHERE, name: WHERE[name] + 1}), whole)


def test_validation_windows_span_the_text_and_do_not_overlap() -> None:
    windows = fixed_windows(torch.arange(250, dtype=torch.uint8), 9, 20)
    assert windows.shape == (20, 10)
    assert windows[0, 0] == 0 and windows[-1, -1] == 249
    assert windows.unique().numel() == windows.numel()
    assert fixed_windows(torch.arange(25, dtype=torch.uint8), 9, 20).shape == (2, 10)


def test_entropy_against_its_formula() -> None:
    text = torch.tensor([0] * 4 + [1] * 2 + [2] * 2, dtype=torch.uint8)
    assert unigram_entropy(text) == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert unigram_entropy(torch.zeros(5, dtype=torch.uint8)) == 0.0
