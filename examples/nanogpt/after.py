"""A GPT trained as nanoGPT's script does it. before.py: DDP and torch's AdamW. after.py: the same with zero_optim.

python examples/nanogpt/SCRIPT.py [--data FILE] [--out FOLDER] [--resume]
torchrun --standalone --nproc-per-node 2 examples/nanogpt/SCRIPT.py

Mixed precision, loss scaling, accumulation, clipping, a cosine schedule, evaluation, checkpoints and resuming. Each of
the two goes on from the other's checkpoint.
"""

import contextlib
import math

import torch
import torch.distributed as dist
import zero_optim
from model import DTYPES, GPT, Text, learning_rate, parse, start
from zero_optim.integrations.ddp import DistributedDataParallel as DDP


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


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, __doc__)
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
