"""The weights of the stages as whole Hugging Face tensors, one at a time, and back. See layout.py."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.megatron.groups import MegatronGroups
from rloom.engines.megatron.layout import Index, Parameter, ParameterLayout, RankPart

Values = Mapping[str, Tensor]  # by the parameter's name in the stage
ReadPart = Callable[[str, Index], Tensor]  # (name of a Hugging Face tensor, index) -> that part of it


class StageWeights:
    """One rank's part in it."""

    def __init__(self, layout: ParameterLayout, groups: MegatronGroups, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.layout, self.groups = layout, groups
        self.shapes = shapes  # shapes of the Hugging Face tensors
        self.stage = groups.pipeline.rank()
        self.part = RankPart(groups.tensor.rank(), groups.expert.rank(), groups.expert_tensor.rank())
        self.tensor_parts = [RankPart(rank) for rank in range(groups.tensor.size())]
        self.expert_parts = gather_objects(self.part, groups.expert_parts)

    def parts(self, parameter: Parameter) -> list[RankPart]:
        """The ranks that hold a parameter together, in the order of their group."""
        if parameter.is_expert:
            return self.expert_parts
        return self.tensor_parts if parameter.divided else [self.part]

    def names(self, stage: int) -> list[str]:
        """The Hugging Face tensors of a stage, in the order in which they are complete."""
        left = self.blocks_of(stage)
        found = []
        for parameter in self.exported(stage):
            for part in self.parts(parameter):
                for block in self.layout.blocks(stage, parameter, part):
                    left[block.name] -= 1
                    if not left[block.name]:
                        found.append(block.name)
        return found

    def exported(self, stage: int) -> list[Parameter]:
        return [parameter for parameter in self.layout.parameters(stage) if not parameter.duplicate]

    def blocks_of(self, stage: int) -> Counter[str]:
        """How many blocks each tensor consists of."""
        return Counter(
            block.name
            for parameter in self.exported(stage)
            for part in self.parts(parameter)
            for block in self.layout.blocks(stage, parameter, part)
        )

    def whole(self, values: Values) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this rank's stage. Collective over the ranks that divide it."""
        left = self.blocks_of(self.stage)
        pending: dict[str, Tensor] = {}
        for parameter in self.exported(self.stage):
            value = values[parameter.name].detach()
            for part, shard in zip(self.parts(parameter), self.shards(parameter, value), strict=True):
                for block in self.layout.blocks(self.stage, parameter, part):
                    if block.name not in pending:
                        pending[block.name] = value.new_empty(self.shapes[block.name])
                    pending[block.name][block.of] = shard[block.own]
                    left[block.name] -= 1
                    if not left[block.name]:
                        yield block.name, pending.pop(block.name)

    def shards(self, parameter: Parameter, value: Tensor) -> list[Tensor]:
        """The parameter on each of its `parts`."""
        if not parameter.divided:
            return [value]
        group = self.groups.expert_parts if parameter.is_expert else self.groups.tensor
        if group.size() == 1:
            return [value]
        shards = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(shards, value.contiguous(), group=group)
        return shards

    def stream(self, values: Values) -> Iterator[tuple[str, Tensor]]:
        """The tensors of all stages, on every rank. Collective over all ranks."""
        example = next(iter(values.values()))
        for stage in range(self.groups.pipeline.size()):
            if stage == self.stage:
                found = self.whole(values)
            else:
                found = ((name, example.new_empty(self.shapes[name])) for name in self.names(stage))
            for name, tensor in found:
                if self.groups.pipeline.size() > 1:
                    dist.broadcast(tensor, group=self.groups.pipeline, group_src=stage)
                yield name, tensor

    def read(self, parameter: Parameter, read_part: ReadPart) -> Tensor:
        """This rank's part of a parameter, in float32. Rows that pad the vocabulary are 0."""
        value = torch.zeros(parameter.shape)
        for block in self.layout.blocks(self.stage, parameter, self.part):
            value[block.own] = read_part(block.name, block.of).float()
        return value


def gather_objects(value: RankPart, group: dist.ProcessGroup) -> list[RankPart]:
    found: list[RankPart] = [value] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found
