"""The places of the ranks that train one model, by arguments: which share, which repeat, which have which slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .collectives import Comm
from .grid import Rows
from .tensor_ranks import Row, with_tensor_ranks


@dataclass(frozen=True)
class Topology:
    """The places of the ranks, but for those of experts: of these each parameter group says its own.

    Attributes:
        rows: of the grid, see ``Grid``; None: all that average gradients share.
        columns: the ranks with the same slices, see ``TensorRanks``; None: nothing is cut.
        plain: whether slices are plain tensors, see ``Row``.
        told: whether the user has said which ranks have slices. Megatron marks slices also where nothing is cut.
    """

    rows: Rows | None = None
    columns: Rows | None = None
    plain: bool = False
    told: bool = False

    @property
    def slices(self) -> list[int]:
        """The ranks of this rank's row, one a slice; none where nothing is cut."""
        return own_row(self.columns or ())

    def sharing(self, everyone: Comm) -> int:
        """Count the ranks that share one state among them."""
        return len(self.rows[0]) if self.rows else everyone.world_size // len(self.columns or [0])

    def averaging(self, everyone: Comm) -> list[int]:
        """List the ranks of ``everyone`` that average gradients with this rank."""
        return next((list(column) for column in self.columns or () if dist.get_rank() in column), everyone.ranks)

    def described(self) -> dict[str, Any]:
        """Describe what all ranks have to agree on. Of a grid within a column that is its shape alone."""
        if self.columns is None:
            return {"mesh": self.rows}
        shape = None if self.rows is None else [len(row) for row in self.rows]
        return {"mesh": shape, "tensor-parallel ranks": len(self.columns)}


def read_topology(
    averaging: dist.ProcessGroup | None, row: Row | None, *, told: bool
) -> tuple[dist.ProcessGroup | None, Topology]:
    """Collective. Make the group of all ranks that train together, and read their places, but for a grid.

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
    """List the ranks of this rank's row, one of each column; none where it is in no column."""
    rows = zip(*columns, strict=True)
    return next((list(row) for row in rows if dist.get_rank() in row), [])
