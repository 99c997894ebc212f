"""docs/zero3.md: its snippets run as they stand, in their order, on two ranks; its links and counts hold."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch._dynamo  # before ``torch.compile`` is patched
import torch.distributed as dist
from training import ROOT

PAGE = (ROOT / "docs" / "zero3.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run_snippets(rank: int, world_size: int, folder: str) -> tuple[str, dict[str, float], list[int]]:
    """Returns what they print, the optimizer's collectives, and the model's parameters: all, the root's, a block's."""
    page: dict[str, Any] = {"__name__": "page"}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(folder)
        patch.setattr(dist, "init_process_group", lambda backend: None)  # the harness has one
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # in seconds less
        torch.manual_seed(rank)
        for number, snippet in enumerate(SNIPPETS):
            exec(compile(snippet, f"docs/zero3.md, snippet {number}", "exec"), page)
    calls = {kind: traffic["calls"] for kind, traffic in page["optimizer"].stats()["collectives"].items()}
    parts = [page["model"], page["model"].blocks]
    whole, blocks = (sum(parameter.numel() for parameter in part.parameters()) for part in parts)
    page["optimizer"].close()
    return said.getvalue(), calls, [whole, whole - blocks, blocks // 4]


@pytest.mark.slow
def test_its_snippets_run(tmp_path: Path) -> None:
    (said, calls, _), (other, *_) = harness.run_ranks(2, run_snippets, str(tmp_path), timeout=180)
    assert re.search(r"^norm of the head \d+\.\d{3}$", said, re.MULTILINE)
    assert said == other  # rank 0's values, whole on both
    # Three steps, and a forward and backward by parts.
    assert calls["all_gather"] == 4 * (1 + 2 * 4) and calls["reduce_scatter"] == 4 * (1 + 4)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [
        "step-0"
    ]  # the page has not trained yet


def test_what_it_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in PAGE.splitlines() if line.startswith("#")}  # fmt: skip
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
