"""Activations: what a forward keeps for its backward, by formula."""

from __future__ import annotations

from dataclasses import dataclass

from .decoders import Width


@dataclass(frozen=True)
class Batch:
    """The batch that a rank computes at a time.

    Attributes:
        sequences, tokens: of a micro-batch, and in each of its sequences.
        checkpointing: a layer keeps its input alone, and is computed again in backward.
        flash: attention keeps no matrix of [tokens, tokens], as ``scaled_dot_product_attention`` does where it can.
    """

    sequences: int
    tokens: int
    checkpointing: bool = False
    flash: bool = True


def activation_bytes(width: Width, batch: Batch, itemsize: int, *, in_flight: int = 1, head: bool = True) -> int:
    """Count the bytes that a decoder transformer keeps for backward, at most at a time.

    Args:
        in_flight: micro-batches whose forward is over and whose backward is not; see ``in_flight``.
        head: whether norm and head are on this rank.

    By Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1, without
    tensor parallelism. With s tokens, b sequences, width h, a heads, v rows of the head, in 16 bits:

    - a layer s·b·h·(34 + 5·a·s/h); with ``flash`` without the second term, which is of [s, s] matrices;
    - after the layers 4·s·b·h·(1 + v/h): inputs of norm and head, logits in fp32.

    All layers are counted, or, with ``checkpointing``, the input of each (2·s·b·h) and what one layer keeps. For
    another ``itemsize`` its bytes take the place of 2, but for dropout's masks, of one byte. It is an estimate: a model
    without dropout, with another MLP or with fused ops keeps something else.
    """
    positions = batch.sequences * batch.tokens
    layer_input = positions * width.hidden * itemsize
    layer = positions * width.hidden * (16 * itemsize + 2)
    if not batch.flash:
        layer += width.heads * positions * batch.tokens * (2 * itemsize + 1)
    after = 2 * layer_input + 4 * positions * width.vocabulary
    after = after if head else 0
    if batch.checkpointing:
        return in_flight * (width.layers * layer_input + after) + layer
    return in_flight * (width.layers * layer + after)


def in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """Count the micro-batches that ``stage``, from 0, of a pipeline keeps at a time by the schedule 1F1B.

    Before its first backward a stage runs a forward for each stage behind it, and one of its own: so the first keeps as
    many as there are stages, and the last keeps one. By Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (2021), section 2.2.1.
    """
    return min(stages - stage, micro_batches)
