"""A GPT trained as nanoGPT's script does it. before.py: DDP and torch's AdamW. after.py: the same with zero_optim.

python examples/nanogpt/SCRIPT.py [--data FILE] [--out FOLDER] [--resume]
torchrun --standalone --nproc-per-node 2 examples/nanogpt/SCRIPT.py

Mixed precision, loss scaling, accumulation, clipping, a cosine schedule, evaluation, checkpoints and resuming. Each of
the two goes on from the other's checkpoint.
"""

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import zero_optim
from model import GPT, Text
from zero_optim.integrations.ddp import DistributedDataParallel as DDP

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("model.py"), help="a text; model.py")
    parser.add_argument("--out", type=Path, help="a folder for ckpt.pt")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/ckpt.pt")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation; weights are fp32")
    parser.add_argument("--steps", type=int, default=100, help="where the schedule ends")
    parser.add_argument("--stop", type=int, help="stop after this step; the last one")
    parser.add_argument("--eval-interval", type=int, default=25)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0, help="of the norm of the gradients; 0: do not")
    for name, size in {"layers": 2, "width": 64, "heads": 2, "window": 64, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Up in a straight line for a tenth of the steps, then down to a tenth of it along a cosine."""
    warmup = args.steps // 10
    if step < warmup:
        return args.lr * (step + 1) / (warmup + 1)
    way = min(1.0, (step - warmup) / max(1, args.steps - warmup))
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: Text, autocast: contextlib.AbstractContextManager) -> dict[str, float]:
    """The mean loss on a few batches of each part."""
    model.eval()
    losses = {}
    for part in text.parts:
        with autocast:
            losses[part] = sum(model(*text.draw(part)).item() for _ in range(4)) / 4
    model.train()
    return losses


def start() -> tuple[int, int, torch.device]:
    """This rank, the number of ranks, and the device: what torchrun has started, else one rank."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, int(os.environ.get("WORLD_SIZE", "1")), device


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rank, ranks, device = start()
    master, ddp = rank == 0, dist.is_initialized()
    micro_batches = max(1, args.accumulate // ranks)

    torch.manual_seed(1337)
    model = GPT(args.window, args.layers, args.width, args.heads).to(device)
    raw_model = model
    text = Text(args.data, args.window, args.batch, device)
    optimizer = zero_optim.ShardedAdamW(model.groups(0.1), lr=args.lr, betas=(0.9, 0.95), eps=args.eps)
    scaler = zero_optim.GradScaler(device.type, enabled=args.dtype == "float16")
    autocast = torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32")

    first, best = 0, math.inf
    if args.resume:
        checkpoint = torch.load(args.out / "ckpt.pt", map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        first, best = checkpoint["step"], checkpoint["best"]
    if ddp:
        model = DDP(model, device_ids=[device] if device.type == "cuda" else None)

    torch.manual_seed(1337 + rank + 1000 * first)  # each rank draws its own windows, and a resumed run new ones
    last = min(args.steps, args.stop or args.steps)
    for step in range(first, last + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)

        evaluating = step % args.eval_interval == 0 or step == last
        optimizer_state = zero_optim.full_state_dict(optimizer) if evaluating else None  # of all ranks
        if evaluating and master:
            losses = evaluate(raw_model, text, autocast)
            print(f"step {step}  " + "  ".join(f"{part} {loss:.4f}" for part, loss in losses.items()), flush=True)
            best = min(best, losses["held out"])
            if args.out and step > first:
                args.out.mkdir(parents=True, exist_ok=True)
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer_state,
                    "scaler": scaler.state_dict(),
                    "step": step,
                    "best": best,
                }
                torch.save(checkpoint, args.out / "ckpt.pt")
        if step == last:
            break

        for micro_batch in range(micro_batches):
            if ddp:  # gradients are averaged in the last backward alone
                model.require_backward_grad_sync = micro_batch == micro_batches - 1
            with autocast:
                loss = model(*text.draw("train")) / micro_batches
            scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
