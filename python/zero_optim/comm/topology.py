"""Which ranks train one model together: who of them shares, who repeats, and who has which slices. Arguments say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .collectives import Comm
from .grid import Rows
from .tensor_ranks import RowRanks, with_tensor_ranks


@dataclass(frozen=True)
class Topology:
    """The places of the ranks, but for those of experts: of these each parameter group says its own.

    Attributes:
        rows: of the grid, see ``Grid``; None: all that average gradients share.
        columns: the ranks with the same slices, see ``TensorRanks``; None: nothing is cut.
        plain: whether slices are plain tensors, see ``Row``.
        told: whether somebody has said which ranks have slices. Megatron marks slices also where nothing is cut.
    """

    rows: Rows | None = None
    columns: Rows | None = None
    plain: bool = False
    told: bool = False

    @property
    def slices(self) -> list[int]:
        """The ranks that have the slices, this one's among them, one each; none where nothing is cut."""
        return own_row(self.columns or ())

    def sharing(self, everyone: Comm) -> int:
        """How many of ``everyone`` share one state among them."""
        return len(self.rows[0]) if self.rows else everyone.world_size // len(self.columns or [0])

    def averaging(self, everyone: Comm) -> list[int]:
        """Those of ``everyone`` that average gradients with this rank."""
        return next((list(column) for column in self.columns or () if dist.get_rank() in column), everyone.ranks)

    def described(self) -> dict[str, Any]:
        """Give what all ranks have to agree on: of a grid within a column, its size alone."""
        if self.columns is None:
            return {"mesh": self.rows}
        shape = None if self.rows is None else [len(row) for row in self.rows]
        return {"mesh": shape, "tensor-parallel ranks": len(self.columns)}


def read_topology(
    averaging: dist.ProcessGroup | None, row: RowRanks | None, *, told: bool
) -> tuple[dist.ProcessGroup | None, Topology]:
    """Collective. The group of all ranks that train together, and their places; a grid among them is not read here.

    Args:
        averaging: the ranks that average gradients with this one; None: those of the default group.
        row: the ranks that have slices; None: nothing is cut.
        told: whether the user has said who has slices, or that nobody has.

    Raises ValueError where the two do not go together.
    """
    group, columns = with_tensor_ranks(averaging, row)
    plain = row is not None and row.plain
    return group, Topology(None, columns, plain, told or plain)


def own_row(columns: Rows) -> list[int]:
    """The ranks beside this one, one of each column; none where it is in no column."""
    rows = zip(*columns, strict=True)
    return next((list(row) for row in rows if dist.get_rank() in row), [])
