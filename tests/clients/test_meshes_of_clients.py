"""Grids and tensor parallelism by way of accelerate, Trainer and Lightning: values as those of one process, and what is
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from client_cases import (
    QUIET,
    as_torchrun,
    assert_like_adamw,
    close,
    forget_accelerator,
    needs,
    run_client_ranks,
    silent,
    taking_meshes,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training_cases import assert_bitwise

# Sums of slices are rounded in another order, and of the smallest gradients Adam would make that large.
LR, EPS, STEPS, BATCH = 1e-2, 1e-3, 3, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def cut(model: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def batches(data_ranks: int) -> DataLoader:
    """Of each rank's batches, those that so many ranks have at once come one after another."""
    x = torch.randn(data_ranks * STEPS * BATCH, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=BATCH)


def expected(data_ranks: int, data: list[Any] | None = None, *, clip: bool = True) -> list[Tensor]:
    """By ``torch.optim.AdamW`` in one process: a step takes the batches of all data-parallel ranks."""
    model, data = build(), list(batches(data_ranks)) if data is None else data
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        x, y = (torch.cat(part) for part in zip(*data[step * data_ranks : (step + 1) * data_ranks], strict=True))
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def whole(model: nn.Module) -> list[Tensor]:
    """Collective. Parameters, put together."""
    state = zero_optim.full_model_state_dict(model, rank=None)
    return [state[name] for name, _ in model.named_parameters()]


# -- accelerate ----------------------------------------------------------------------------------------------------


def accelerator_of(**sizes: int) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    forget_accelerator()
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), rng_types=[])


def accelerated(stage: int, data_ranks: int, folder: str, **sizes: int) -> dict[str, Any]:
    """Weights after training, and what each step has sent, by kind."""
    from zero_optim.integrations.accelerate import data_parallel_mesh, prepare

    accelerator = accelerator_of(**sizes)
    plain, mesh = build().to(accelerator.device), data_parallel_mesh(accelerator)
    if sizes.get("tp_size", 1) > 1:
        cut(plain, accelerator.torch_device_mesh["tp"])
    if stage == 3:
        zero_optim.shard_module(plain, units=(nn.Linear,), mesh=mesh)
    inner = zero_optim.ShardedAdamW(
        plain.named_parameters(), lr=LR, eps=EPS, stage=stage, mesh=mesh if stage < 3 else None
    )
    groups = [id(parameter) for parameter in inner.param_groups[0]["params"]]
    model, optimizer, loader = prepare(accelerator, plain, inner, batches(data_ranks))
    assert [id(parameter) for parameter in inner.param_groups[0]["params"]] == groups
    before = inner.stats()["collectives"]
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    after = inner.stats()["collectives"]
    none = {"bytes": 0}
    sent = {kind: (after[kind]["bytes"] - before.get(kind, none)["bytes"]) // STEPS for kind in after}
    found = {"weights": whole(plain), "sent": sent}
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in plain.parameters() if stage < 3 else ():
            parameter.zero_()
    accelerator.load_state(folder)
    assert_bitwise(whole(plain), found["weights"], f"loaded at stage {stage}")
    state = accelerator.get_state_dict(model)
    if dist.get_rank() == 0:
        assert_bitwise([state[name] for name, _ in plain.named_parameters()], found["weights"], "state dict")
    inner.close()
    return found


def refused_by_accelerate() -> dict[str, str]:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from zero_optim.integrations.accelerate import prepare

    def message(accelerator: Any, model: nn.Module, mesh: Any = None) -> str:
        optimizer = zero_optim.ShardedAdamW(model.parameters(), mesh=mesh)
        with pytest.raises(ValueError) as raised:
            prepare(accelerator, model, optimizer)
        optimizer.close()
        return str(raised.value)

    found = {"no grid": message(accelerator_of(dp_replicate_size=2, dp_shard_size=2), build())}
    both = accelerator_of(dp_shard_size=2, tp_size=2)
    found["not cut"] = message(both, build(), both.torch_device_mesh["dp_shard"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    forget_accelerator()
    found["not told"] = message(Accelerator(cpu=True), cut(build(), mesh["tp"]), mesh["dp"])
    for name in ("cp_size", "sp_size"):
        with pytest.raises(zero_optim.ZeroOptimError) as raised:
            prepare(accelerator_of(dp_shard_size=2, **{name: 2}), build())
        found[name] = str(raised.value)
    return found


# Data-parallel ranks, and sizes of the mesh.
MESHES = {
    "grid": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "cut": (2, {"dp_shard_size": 2, "tp_size": 2}),
    "cut over all": (1, {"tp_size": 4}),
}
CELLS = [("grid", 2), ("cut", 3), ("cut over all", 2)]


def _accelerate(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    with as_torchrun(rank, world_size), taking_meshes():
        dist.barrier()  # importing accelerate takes longer on some ranks
        found: dict[Any, Any] = {"refused": refused_by_accelerate()}
        for name, stage in CELLS:
            data_ranks, sizes = MESHES[name]
            found[name, stage] = accelerated(stage, data_ranks, f"{folder}/{name}/{stage}", **sizes)
        return found


@pytest.mark.slow
@needs("accelerate")
def test_accelerate_by_a_parallelism_config(tmp_path: Any) -> None:
    """Each mesh, and each stage: face/test_rules_on_topologies.py has every pair of them."""
    per_rank = run_client_ranks(4, _accelerate, str(tmp_path), timeout=180, collective_timeout=60)
    for found in per_rank:
        refused = found["refused"]
        assert "mesh=data_parallel_mesh(accelerator)" in refused["no grid"]
        assert "no parameter of the optimizer is cut: call parallelize_module" in refused["not cut"]
        assert "parallelism_config=ParallelismConfig(dp_shard_size=..., tp_size=2)" in refused["not told"]
        assert all("_flatten('dp_cp')" in refused[name] and name in refused[name] for name in ("cp_size", "sp_size"))
        for name, stage in CELLS:
            if name == "grid":  # 8 rows of 128 fp32 with padding; half of them are a shard
                sent = found[name, stage]["sent"]
                assert (sent["reduce_scatter"], sent["all_reduce"]) == (4096, 2048)
                assert sent["all_gather"] == (stage - 1) * 4096
            assert_like_adamw(found[name, stage]["weights"], expected(MESHES[name][0]), LR, STEPS)


# -- transformers --------------------------------------------------------------------------------------------------


def llama(kind: str = "Llama") -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 32, "head_dim": 4}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


def cut_by_plan(model: Any, mesh: dist.DeviceMesh) -> None:
    """By transformers' plan for it, and torch's styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    parallelize_module(model, mesh, {name: styles[style] for name, style in model.tp_plan.items()})


def trained(
    kind: Any, model: Any, folder: str, batch: int, config: Any = None, resume: str | None = None, **how: Any
) -> tuple[Any, list[float]]:
    """The Trainer after two micro-batches a step, and the norms of gradients that it has logged."""
    from transformers import TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo", "seed": 1}
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        learning_rate=LR,
        adam_epsilon=EPS,
        weight_decay=0.1,
        max_grad_norm=0.5,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=2,
        save_strategy="no" if config is None else "steps",
        parallelism_config=config,
        **quiet,
    )
    tokens = [(torch.arange(16) * 7 + start * start) % 64 for start in range(64)]
    trainer = kind(model, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in tokens], **how)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [logged["grad_norm"] for logged in trainer.state.log_history[:-1]]


def _one_process(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size):
        from transformers import Trainer

        model = llama(kind)
        model.save_pretrained(folder)
        trainer, norms = trained(Trainer, model, f"{folder}/run", 4)
        names = [name for name, _ in trainer.model.named_parameters()]
        return {"weights": weights(trainer.model), "names": names, "norms": norms}


def _trainer(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), taking_meshes():
        from accelerate.utils import ParallelismConfig
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig
        from zero_optim.integrations.transformers import ShardedTrainer

        dist.barrier()  # importing takes longer on some ranks
        found = {}

        def keep(name: str, trainer: Any, norms: list[float]) -> None:
            assert trainer.optimizer.optimizer.stats()["steps"] == STEPS
            found[name] = {"weights": whole(trainer.model), "norms": norms}
            trainer.save_model(f"{folder}/{name}")
            close(trainer.optimizer.optimizer)

        def trained_cut(how: dict[str, Any], place: str, **options: Any) -> tuple[Any, list[float]]:
            forget_accelerator()
            config = ParallelismConfig(dp_shard_size=2, tp_size=2)
            model = llama("Qwen3")
            cut_by_plan(model, config.get_device_mesh("cpu")["tp"])
            return trained(ShardedTrainer, model, place, 2, config, **how, **options)

        for stage, how in ((2, {"stage": 2}), (3, {"units": ("Qwen3DecoderLayer",)})):
            keep(f"Qwen3 {stage}", *trained_cut(how, f"{folder}/run{stage}"))
        resumed, _ = trained_cut({"stage": 2}, f"{folder}/again", resume=f"{folder}/run3/checkpoint-2")
        assert_bitwise(whole(resumed.model), found["Qwen3 3"]["weights"], "resumed at stage 2")
        close(resumed.optimizer.optimizer)
        forget_accelerator()
        loaded = AutoModelForCausalLM.from_pretrained(
            f"{folder}/Llama", distributed_config=DistributedConfig(tp_size=4)
        )
        keep("Llama 2", *trained(ShardedTrainer, loaded, folder, 4))
        for name, sizes in (("Qwen3", {"tp_size": 4}), ("Llama", {"tp_size": 2, "fsdp_size": 2})):
            forget_accelerator()
            loaded = AutoModelForCausalLM.from_pretrained(
                f"{folder}/{name}", distributed_config=DistributedConfig(**sizes)
            )
            with pytest.raises(zero_optim.ParameterError) as raised:
                trained(ShardedTrainer, loaded, folder, 2)
            found[f"refused {name}"] = str(raised.value)
        return found


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_trainer_with_models_that_are_cut(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    wanted = {
        kind: run_client_ranks(1, _one_process, str(tmp_path / kind), kind, timeout=180)[0]
        for kind in ("Llama", "Qwen3")
    }
    for found in run_client_ranks(4, _trainer, str(tmp_path), timeout=240, collective_timeout=120):
        for name in ("Llama 2", "Qwen3 2", "Qwen3 3"):
            one = wanted[name.split()[0]]
            assert_like_adamw(found[name]["weights"], one["weights"], LR, STEPS)
            assert found[name]["norms"] == pytest.approx(one["norms"], rel=1e-5)
            saved = load_file(tmp_path / name / "model.safetensors")
            assert_bitwise([saved[key] for key in one["names"]], found[name]["weights"], f"saved: {name}")
        assert "SequenceParallel(sequence_dim=2" in found["refused Qwen3"] and "q_norm" in found["refused Qwen3"]
        assert "DistributedConfig(fsdp_size=2)" in found["refused Llama"]


# -- Lightning -----------------------------------------------------------------------------------------------------


def module_class() -> type[Any]:
    import lightning

    class Module(lightning.LightningModule):
        """Its optimizer is for the mesh of the strategy; at stage 3 the optimizer takes the model's."""

        def __init__(self, stage: int, is_cut: bool = True) -> None:
            super().__init__()
            self.stage, self.is_cut, self.layers = stage, is_cut, None
            self.seen: list[Any] = []

        def configure_model(self) -> None:
            if self.layers is None:
                self.layers = build()
                if self.is_cut:
                    cut(self.layers, self.device_mesh["tensor_parallel"])

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.seen.append(batch)
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("validation", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            options = {"mesh": self.device_mesh["data_parallel"]} if self.stage < 3 else {}
            return zero_optim.ShardedAdamW(self.parameters(), lr=LR, eps=EPS, stage=self.stage, **options)

    return Module


def fitted(strategy: Any, module: Any, folder: str, resume: str | None = None, **options: Any) -> Any:
    """The Trainer after an epoch, and a validation."""
    import lightning

    settings = {"accelerator": "cpu", "devices": 4, "max_epochs": 1, "num_sanity_val_steps": 0, **QUIET}
    trainer = lightning.Trainer(strategy=strategy, default_root_dir=folder, **settings, **options)
    trainer.fit(module, batches(2), batches(2), ckpt_path=resume)
    return trainer


def _lightning(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with as_torchrun(rank, world_size), silent():
        from lightning.pytorch.strategies import ModelParallelStrategy
        from zero_optim.integrations.lightning import ShardedStrategy

        def sharded(stage: int) -> Any:
            units = (nn.Linear,) if stage == 3 else None
            return ShardedStrategy(units=units, tensor_parallel_size=2, process_group_backend="gloo")

        dist.barrier()  # importing lightning takes longer on some ranks
        kind, found = module_class(), {}
        for stage in (2, 3):
            place = f"{folder}/{stage}"
            trainer = fitted(sharded(stage), kind(stage), place, gradient_clip_val=0.1)
            trainer.save_checkpoint(f"{place}/last.ckpt")
            found[f"{stage}"], found["seen"] = whole(trainer.lightning_module), trainer.lightning_module.seen
            validated = trainer.callback_metrics["validation"]
            close(trainer.optimizers[0])
            again = fitted(sharded(stage), kind(stage), place, f"{place}/last.ckpt")  # there is nothing left to train
            assert_bitwise(whole(again.lightning_module), found[f"{stage}"], f"resumed at stage {stage}")
            assert again.validate(again.lightning_module, batches(2), verbose=False)[0]["validation"] == validated
            close(again.optimizers[0])
        theirs = ModelParallelStrategy(2, 2, save_distributed_checkpoint=False, process_group_backend="gloo")
        trainer = fitted(theirs, kind(2), folder, enable_checkpointing=False)
        found["theirs"], found["seen by theirs"] = whole(trainer.lightning_module), trainer.lightning_module.seen
        close(trainer.optimizers[0])
        with pytest.raises(ValueError) as raised:
            fitted(sharded(2), kind(2, is_cut=False), folder)
        return {**found, "refused": str(raised.value)}


@pytest.mark.slow
@needs("lightning")
def test_lightning_with_tensor_parallel_ranks(tmp_path: Any) -> None:
    per_rank = run_client_ranks(4, _lightning, str(tmp_path), timeout=240, collective_timeout=120)
    for found in per_rank:
        for name, kind in (("2", "seen"), ("3", "seen"), ("theirs", "seen by theirs")):
            seen = [rank[kind] for rank in per_rank]
            inputs = [torch.cat([x for x, _ in batch]) for batch in seen]
            assert torch.equal(inputs[0], inputs[1]) and torch.equal(inputs[2], inputs[3])
            assert not torch.equal(inputs[0], inputs[2])
            in_turn = [batch for step in zip(seen[0], seen[2], strict=True) for batch in step]
            assert_like_adamw(found[name], expected(2, in_turn, clip=name != "theirs"), LR, STEPS)
        assert "tensor_parallel_size=2, and no parameter of the optimizer is cut" in found["refused"]
