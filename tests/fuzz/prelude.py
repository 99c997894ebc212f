"""The words of a program's text, beside torch and zero_optim. A script that stands alone has them after ``world``."""

import contextlib
import copy  # noqa: F401  programs use it

import torch
import torch.distributed as dist
import zero_optim
from programs.world import Planned, boom
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def pattern(shape, p):
    """Odd multiples of 1/16: never zero, and sums of a few are exact in every dtype."""
    n = torch.Size(shape).numel()
    number = torch.arange(n)
    if len(shape) == 2 and min(shape) > 16:  # by turns, a large matrix would have rank 9 at most
        number = number * 2654435761 // 65536
    return ((2 * ((number * 5 + p) % 9) - 9) / 16).reshape(shape)


def start(shape, p):
    n = torch.Size(shape).numel()
    return (((torch.arange(n) * 3 + 5 * p) % 17 - 8) / 8).reshape(shape)


def mesh():
    """Two replicas of half the ranks."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def matrix():
    """Two rows that average, and two columns with a slice each: on the CPU, or the simulated GPU."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # it has meshes of programs before, whose groups are gone, and takes them for this one
    return init_device_mesh(torch.empty(0).device.type, (2, 2), mesh_dim_names=("dp", "tp"))


def cut(parameters, dims, mesh):
    """DTensors of these: cut along a dimension, or whole (-1); others stay plain (-2)."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made = []
    for p, dim in zip(parameters, dims, strict=True):
        if dim != -2:
            placement = Replicate() if dim == -1 else Shard(dim)
            whole = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None)
            p = nn.Parameter(whole, requires_grad=p.requires_grad)
        made.append(p)
    return made


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part(whole, like):
    """What this rank has of it, where ``like`` is a DTensor."""
    if not hasattr(like, "placements") or like.placements[0].is_replicate():
        return whole
    parts, rank = whole.chunk(2, like.placements[0].dim), like.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else parts[0].narrow(like.placements[0].dim, 0, 0)


def whole_on_row(parameter, p, c):
    """A gradient to assign."""
    value = (c * pattern(parameter.shape, p)).to(parameter.dtype)
    if not hasattr(parameter, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def make(shapes, dtype=torch.float32, frozen=()):
    made = [nn.Parameter(start(shape, p).to(dtype)) for p, shape in enumerate(shapes)]
    for p in frozen:
        made[p].requires_grad_(False)
    return made


def term(parameter, p, c):
    """Of a DTensor that both of two ranks have, the gradient comes in terms, of half each, where ``p`` is odd."""
    factor = part(c * pattern(parameter.shape, p), parameter).to(parameter.dtype)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import Partial

        terms = p % 2 == 1 and parameter.placements[0].is_replicate()
        parameter, factor = parameter.to_local(grad_placements=[Partial()] if terms else None), factor / (1 + terms)
    return (parameter * factor).float().sum()


def use(parameters, p, c):
    return lambda x: x + term(parameters[p], p, c)


class Block(nn.Module):
    def __init__(self, own):
        super().__init__()
        for p, parameter in own.items():
            setattr(self, f"p{p}", parameter)

    def forward(self, x, uses):
        for p, c in uses:
            x = x + term(getattr(self, f"p{p}"), p, c)
        return x * 1.0


class Net(nn.Module):
    """``units`` has the unit of each parameter, or -1: the root."""

    def __init__(self, parameters, units):
        super().__init__()
        by_unit = [{p: parameters[p] for p, u in enumerate(units) if u == k} for k in range(-1, max(units) + 1)]
        for p, parameter in by_unit[0].items():
            setattr(self, f"p{p}", parameter)
        self.blocks = nn.ModuleList(Block(own) for own in by_unit[1:])

    def forward(self, x, links):
        for link in links:
            if link == "boom":
                x = boom(x)
            elif link[0] == "unit":
                x = self.blocks[link[1]](x, link[2])
            else:
                x = x + term(getattr(self, f"p{link[1]}"), *link[1:])
        return x * 1.0

    def ordered(self):
        named = {int(name.rpartition("p")[2]): parameter for name, parameter in self.named_parameters()}
        return [named[p] for p in sorted(named)]


def call(net, *links):
    return lambda x: net(x, links)


def backward(links, no_sync=(), scaler=None, roots=1):
    """The value of a chain, after its backward; or where it raised. The chain is cut into one for each root."""
    with contextlib.ExitStack() as stack:
        for opt in no_sync:
            stack.enter_context(opt.no_sync())
        if links is None:
            return None
        try:
            ends, long = [], max(1, -(-len(links) // roots))
            for start in range(0, len(links) or 1, long):
                x = torch.full((), 0.0 if start else 1.0, requires_grad=True)
                for link in links[start : start + long]:
                    x = link(x)
                ends.append(x)
            torch.autograd.backward([scaler.scale(x) if scaler else x * 1.0 for x in ends])
            return float(sum(x.detach() for x in ends))
        except Planned as error:
            return str(error)


def step(opt, closure=(), before=(), after=()):
    def all_of(calls):
        def run(*_):
            for call in calls:
                call()

        return run

    hooks = opt.register_step_pre_hook(all_of(before)), opt.register_step_post_hook(all_of(after))
    opt.step(all_of(closure) if closure else None)
    for hook in hooks:
        hook.remove()


def evaluate(link):
    with torch.no_grad():
        return float(link(torch.ones(())))


def values(parameters):
    return [local(p.detach()).float().cpu().numpy().copy().reshape(-1) for p in parameters]


def whole(net):
    with zero_optim.gather_parameters(net):
        return values(net.ordered())


def look(opt, parameters):
    opt.stats()
    opt.state_dict()
    trained = [p for p in parameters if p.requires_grad]
    torch.autograd.grad(sum(p.float().sum() for p in trained), trained)


def grads(parameters):
    """For each parameter "none", "shard", or the values of a plain gradient."""
    return [kind(p) for p in (parameters.ordered() if isinstance(parameters, Net) else parameters)]


def kind(p):
    if p.grad is None:
        return "none"
    if isinstance(p.grad, zero_optim.FlatShard):
        return "shard" if p.grad.shape == p.shape and p.grad.dtype == p.dtype else "shard of another kind"
    return local(p.grad.detach()).float().cpu().clone().numpy().reshape(-1)  # an array of it would hold its memory


def module_of(parameters):
    return nn.ParameterList(parameters)


def full(state):
    """A full state: step and moments by index; None on the ranks that were not given it."""
    if not state:
        return None
    return {
        index: [
            float(entry["step"]),
            *(entry[k].float().cpu().numpy().copy().reshape(-1) for k in sorted(entry) if k not in APART),
        ]
        for index, entry in state["state"].items()
    }


APART = ("step", "master", "ema")


def averages(optimizer):
    """By number over all groups: at stage 3 parameters have names."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    number = {name: n for n, name in enumerate(names)}
    found = optimizer.ema_state_dict(rank=None).items()
    return {number.get(key, key): value.numpy().copy().reshape(-1) for key, value in found}


def within(optimizer, read):
    with optimizer.swap_to_ema():
        return read()


def own_sum(value, rank):
    tensor = torch.tensor(value * (rank + 1))
    dist.all_reduce(tensor)
    return float(tensor)
