"""Reads a checkpoint by its documented format alone: with json, safetensors and google-crc32c."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import safe_open
from torch import Tensor

BLOCK = 2**20


def read_contents(folder: Path) -> dict[str, Any]:
    """The contents of ``index.json``."""
    return json.loads((folder / "index.json").read_text())["contents"]


def read_tensors(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor by kind and name, put together of its pieces; each element must be in one piece, its sums right."""
    tensors = {}
    for entry in read_contents(folder)["tensors"]:
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        parts = [torch.empty(0, dtype=dtype)]
        end = 0
        for piece in entry["pieces"]:
            assert piece["start"] == end, entry
            end += piece["length"]
            with safe_open(folder / piece["file"], "pt") as file:
                parts.append(file.get_tensor(f"{entry['kind']}:{entry['name']}:{piece['start']}"))
            nbytes = piece["length"] * dtype.itemsize
            data = (folder / piece["file"]).read_bytes()[piece["offset"] : piece["offset"] + nbytes]
            blocks = [data[start : start + BLOCK] for start in range(0, nbytes, BLOCK)]
            assert piece["crc32c"] == [f"{google_crc32c.value(block):08x}" for block in blocks]
        tensors[entry["kind"], entry["name"]] = torch.cat(parts).reshape(shape)
    return tensors


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Of each parameter its values, by name."""
    return {name: tensor for (kind, name), tensor in read_tensors(folder).items() if kind == "parameter"}
