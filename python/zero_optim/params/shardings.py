"""The sharding of each parameter: as a rule one for all; experts are shared by the ranks that have the same ones."""

from __future__ import annotations

from collections.abc import Container, Mapping

from ..comm.sharding import Sharding
from ..errors import ParameterError
from .parameter_set import ParameterSet
from .tensor_slice import is_cut, is_distributed


class Shardings:
    """The sharding of each parameter, by its group.

    Attributes:
        main: the sharding of all parameters that are no experts.
        of_groups: the shardings of groups of experts, by the group's number.
    """

    def __init__(
        self, parameters: ParameterSet, main: Sharding, of_groups: Mapping[int, Sharding] | None = None
    ) -> None:
        self._parameters, self.main, self.of_groups = parameters, main, dict(of_groups or {})

    def of(self, index: int) -> Sharding:
        """Find the sharding of a parameter."""
        if not self.of_groups:  # as a rule
            return self.main
        return self.of_groups.get(self._parameters.group_of[index], self.main)

    def is_apart(self, index: int) -> bool:
        """Whether other ranks have other experts under the same name, and no whole of them is known. A ``DTensor`` of
        experts is one parameter, of which each rank has a slice: it is not apart."""
        sharding = self.of(index)
        return sharding.of_experts and sharding.slice_count > 1 and not is_distributed(self._parameters.all[index])

    def places_of_use(self, index: int) -> tuple[int, int]:
        """Count the parameters with this index on all ranks together, and number this rank's among them."""
        if not self.of_groups:
            return 1, 0
        sharding = self.of(index)
        return (sharding.slice_count, sharding.slice_index) if self.is_apart(index) else (1, 0)

    def slice_of(self, index: int) -> tuple[int, int]:
        """Number this rank's slice of a parameter, or of experts, and count the slices; (0, 1) for a parameter that all
        ranks have alike."""
        sharding = self.of(index)
        cut = is_cut(self._parameters.all[index]) or sharding.of_experts
        return (sharding.slice_index, sharding.slice_count) if cut else (0, 1)

    def check_joined(self, where: str) -> None:
        """Raise ParameterError for the first plain slice: ``where`` takes what ranks have under one name for parts of
        one tensor, and would keep one slice."""
        for index, parameter in enumerate(self._parameters.all) if self.main.of_plain_slices else ():
            if is_cut(parameter):
                raise ParameterError(
                    f"{self._parameters.labels[index]} is a plain slice, of which other tensor-parallel ranks have "
                    f"others under the same name: {where} would keep one of them. Save by zero_optim.checkpoint.save; "
                    "or opt.state_dict() and model.state_dict() of each tensor-parallel rank, to a folder of its own"
                )

    def check_whole(self, where: str, ids: Container[int] | None = None) -> None:
        """Raise ParameterError for the first parameter that ``where`` would keep of one rank, and lose of the others.

        ``ids``: of the parameters that matter; None: all.
        """
        for index, parameter in enumerate(self._parameters.all) if self.of_groups else ():
            if (ids is None or id(parameter) in ids) and self.is_apart(index):
                raise ParameterError(
                    f"{self._parameters.labels[index]} is an expert, of which other ranks have others under the same "
                    f"name: {where} would keep those of one rank and lose the rest. Keep all experts in one parameter "
                    "of shape [experts, ...], a DTensor over the expert-parallel ranks, as "
                    "nn.Parameter(DTensor.from_local(those_of_this_rank, mesh['ep'], [Shard(0)])); or save "
                    "opt.state_dict() and model.state_dict() of each rank to a file of its own"
                )
