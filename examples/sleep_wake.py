"""An actor that trains and generates in turns, as in RL: its optimizer leaves the GPU while the other engine has it.

python examples/sleep_wake.py [--rounds 3]
torchrun --standalone --nproc-per-node 2 examples/sleep_wake.py

``generate`` stands for an inference engine, which gets the new weights and then as much memory as there is.
docs/memory.md has what sleeps, and what does not.
"""

import argparse
import os

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn


def reward(actions: Tensor) -> Tensor:
    """For each of the actions [n]: how close it is to 3."""
    return -(actions - 3.0).abs()


def generate(weights: dict[str, Tensor], states: Tensor) -> Tensor:
    """Actions [n] for the states [n, 4]: the policy's mean and some noise."""
    mean = torch.tanh(states @ weights["0.weight"].T + weights["0.bias"]) @ weights["2.weight"].T + weights["2.bias"]
    return mean[:, 0] + torch.randn(len(states))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = zero_optim.ShardedAdamW(policy.named_parameters(), lr=3e-2)
    torch.manual_seed(rank)

    for number in range(arguments.rounds):
        weights = {name: value.clone() for name, value in policy.state_dict().items()}  # to the engine
        opt.sleep()  # state, gradients and buffers move to pinned host memory; on all ranks
        if rank == 0 and number == 0:
            print(f"asleep: {opt.stats()['sleep']['host']:,} bytes are on the host")
        states = torch.randn(64, 4)
        actions = generate(weights, states)
        opt.wake()  # bit for bit as before

        rewards = reward(actions)
        advantage = (rewards - rewards.mean()) / rewards.std()
        for _ in range(4):
            loss = (advantage * (actions - policy(states)[:, 0]).square()).mean() / 2  # of a normal policy
            loss.backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        if rank == 0:
            print(f"round {number}  mean reward {rewards.mean().item():.3f}")

    opt.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return rewards.mean().item()


if __name__ == "__main__":
    main()
