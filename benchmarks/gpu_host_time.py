"""The host's microseconds for a bucket on this device: `bucket_parts`, within a process group of 8 fake ranks.

python benchmarks/gpu_host_time.py --out host_time.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import bucket_parts
import torch
from bench_scale import fake_ranks

ROUNDS = 200


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="microseconds of the host a bucket, by part")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    with fake_ranks(bucket_parts.RANKS):
        parts = bucket_parts.measure(ROUNDS, torch.device(options.device))
    if options.out:
        about = {"device": options.device, "buckets": bucket_parts.BUCKETS, "gradients": bucket_parts.GRADIENTS}
        options.out.write_text(json.dumps({**about, "microseconds": parts}, indent=1) + "\n")
    told = ", ".join(f"{part} {microseconds:.1f}" for part, microseconds in parts.items())
    print(f"a bucket of {bucket_parts.GRADIENTS} gradients: {told}; in all {sum(parts.values()):.1f} µs of the host")


if __name__ == "__main__":
    main()
