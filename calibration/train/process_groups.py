"""Process groups of one rank of a job: one along each way in which its layout splits the work."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from simulator.config.parallelism import Parallelism


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of this rank, None where it would be alone; ``tp``, ``dp``, ``pp`` are its places."""

    place: dict[str, int]
    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None
    model: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None

    @property
    def all(self) -> list[dist.ProcessGroup]:
        """The process groups that this rank has."""
        groups = (self.tensor, self.data, self.pipeline, self.expert, self.model, self.everyone)
        return [group for group in groups if group is not None]

    def close(self) -> None:
        """Give up the communicators."""
        for group in self.all:
            dist.destroy_process_group(group)

    @classmethod
    def from_layout(cls, layout: Parallelism, rank: int) -> ProcessGroups | None:
        """Collective over all processes; None on those that the layout does not use. Ranks count tp first, then dp,
        then pp (Megatron-LM's default order)."""
        sizes = {"tp": layout.tp, "dp": layout.dp, "pp": layout.pp}
        used = layout.model_parallel * layout.dp

        def coordinates(number: int) -> dict[str, int]:
            data_rank = number // layout.tp % layout.dp
            return {"tp": number % layout.tp, "dp": data_rank, "pp": number // (layout.tp * layout.dp)}

        def along(name: str, *axes: str) -> dist.ProcessGroup | None:
            """The group of ranks that differ from this one in ``axes`` alone."""
            if all(sizes[axis] == 1 for axis in axes):
                return None
            families: dict[tuple[int, ...], list[int]] = {}
            for other in range(used):
                key = tuple(place for axis, place in coordinates(other).items() if axis not in axes)
                families.setdefault(key, []).append(other)
            groups = [(members, dist.new_group(members, group_desc=name)) for members in families.values()]
            return next((group for members, group in groups if rank in members), None)

        axes: dict[str, tuple[str, ...]] = {
            "tensor": ("tp",),
            "data": ("dp",),
            "pipeline": ("pp",),
            "expert": ("tp", "dp") if layout.ep > 1 else (),
            "model": ("tp", "pp"),
            "everyone": ("tp", "dp", "pp"),
        }
        groups = {name: along(name, *names) for name, names in axes.items()}
        return cls(coordinates(rank), **groups) if rank < used else None
