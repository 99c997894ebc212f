"""How many instructions a thread executes on a kernel's main path, from its machine code.

    python tests/cuda/executed.py zero_kernels/libzero_kernels_cuda.so encoded_step

The main path ends, takes no call, no trap and no branch backwards, and stores the most bytes in all threads alike; of
several the longest. So a block is whole, and no value is unusual.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);", re.M)
NEVER = ("CALL", "BPT", "WARPSYNC", "RET")


def executed(sass: str) -> int:
    """Count them in the code of one kernel, as cuobjdump prints it. Raises ValueError where no path ends."""
    lines = [(int(at, 16), bool(guard), name, rest) for at, guard, name, rest in LINE.findall(sass)]
    number = {at: index for index, (at, *_) in enumerate(lines)}
    best: list[tuple[int, int] | None] = [None] * (len(lines) + 1)  # from there on: bytes stored, instructions
    for index in reversed(range(len(lines))):
        at, guarded, name, rest = lines[index]
        operation = name.partition(".")[0]
        if operation in NEVER:
            continue
        follow: list[tuple[int, int] | None] = []
        if operation == "EXIT":
            follow.append((0, 0))
        if operation == "BRA":
            to = number.get(int(re.findall(r"0x([0-9a-f]+)", rest)[-1], 16), -1)
            follow.append(best[to] if to > index else None)
        conditional = guarded or ("BRA" in name and ".DIV" in name) or re.search(r"\b!?U?P\d", rest)
        if operation not in ("EXIT", "BRA") or conditional:
            follow.append(best[index + 1])
        ends = [path for path in follow if path is not None]
        if ends:
            stores, instructions = max(ends)
            width = 4 if name.endswith(".E") or ".STRONG" in name else 0
            width = next((int(bits) // 8 for bits in re.findall(r"\.[US]?(128|64|16|8)\b", name)), width)
            stored = width if operation == "STG" and not guarded else 0
            best[index] = stores + stored, instructions + 1
    if not lines or best[0] is None:
        raise ValueError("no path through the kernel ends")
    return best[0][1]


def kernels_in(sass: str) -> Iterator[tuple[str, str, str]]:
    """Yield architecture, mangled name and code of each kernel that cuobjdump -sass prints."""
    for part in sass.split("code for sm_")[1:]:
        arch = re.match(r"\d+", part)
        for function in part.split("Function : ")[1:]:
            name, _, body = function.partition("\n")
            yield arch[0] if arch else "", name.strip(), body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library")
    parser.add_argument("name", help="a part of the kernels' names")
    parser.add_argument("--elements", type=int, default=8, help="of a thread (8)")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    given = parser.parse_args()
    sass = subprocess.run([given.cuobjdump, "-sass", given.library], capture_output=True, text=True, check=True).stdout
    for arch, name, body in kernels_in(sass):
        if given.name in name:
            print(f"sm_{arch}  {executed(body) / given.elements:6.1f} an element  {name}")


if __name__ == "__main__":
    main()
