"""Pipeline parallelism on torch.distributed.pipelining: the blocks are split into stages, which ranks hold.

    pipeline = Pipeline(model, mesh.get_group("pp"), device, schedule="1f1b")
    loss = pipeline.accumulate(batches, scaling, F.cross_entropy)   # forward and backward of all micro batches
    pipeline.module                                                 # the model, with the weights of this rank only

The first stage also has the embedding, the last one the final norm and the head. A rank has one stage in the schedule
1F1B and two in the interleaved one, which are not neighbours: stages 0 and 2 of four on the first rank of two. All
ranks of a pipeline get the same micro batches; hidden states go to the next stage, their gradients to the one before.
"""

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, schedules

from cs336_systems.predict.rank_shards import STAGES_PER_RANK, stage_blocks

Loss = Callable[[Tensor, Tensor], Tensor]


class Absent(nn.Module):
    """Placeholder for a module of another stage; returns its input."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class Stage(nn.Module):
    """Runs the modules of a stage under the caller's autocast, also when a schedule calls it."""

    def __init__(self, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None):
        super().__init__()
        self.model = model
        self._device_type, self._compute_dtype = device.type, compute_dtype

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for block in cast(Any, self.model).layers if not isinstance(block, Absent)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self._device_type, self._compute_dtype) if self._compute_dtype else nullcontext():
            return self.model(x)


class Pipeline:
    """The stages of this rank, and the schedule that runs micro batches through the stages of all ranks.

    `sequence_parts`: ranks of a tensor-parallel group, which hold a part of the sequence each between blocks. The
    caller may shard `stages`, which have the same parameters as `module`, before they are first run.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        schedule: str = "1f1b",
        compute_dtype: torch.dtype | None = None,
        sequence_parts: int = 1,
    ):
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # an error is raised, no need to log all steps
        self._group, self._device, self._kind, self._sequence_parts = group, device, schedule, sequence_parts
        self._ranks = dist.get_world_size(group)
        self._count = self._ranks * STAGES_PER_RANK[schedule]
        embedding = cast(Any, model).token_embeddings
        self._width, self._vocabulary = embedding.embedding_dim, embedding.num_embeddings
        blocks = stage_blocks(len(cast(Any, model).layers), self._count)
        own = range(dist.get_rank(group), self._count, self._ranks)
        self._has_last = self._count - 1 in own

        def part(of_stages: Collection[int]) -> nn.Module:
            kept = [block for number in of_stages for block in blocks[number]]
            return part_of(model, kept, is_first=0 in of_stages, is_last=self._count - 1 in of_stages)

        self.stages = {number: Stage(part([number]), device, compute_dtype) for number in own}
        self.module = part(own)
        """The model with the modules of all stages of this rank, under their names in the whole model."""
        self._schedule: Any = None
        self._made_for: tuple[int, torch.Size] | None = None
        """Number and shape of the micro batches for which the schedule was created."""
        self._loss: Loss

    def accumulate(
        self, batches: Sequence[tuple[Tensor, Tensor]], scaling: Callable[[Tensor], Tensor], loss: Loss
    ) -> Tensor:
        """Add up the gradients of the scaled losses of micro batches of one size; return the mean loss, on all ranks.

        Sharded gradients are averaged over ranks once, after the last micro batch.
        """
        shapes = {inputs.shape for inputs, _ in batches}
        if len(shapes) > 1:
            sizes = ", ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"the micro batches of a pipeline must have one size, got {sizes}")
        losses: list[Tensor] = []

        def scaled_loss(logits: Tensor, targets: Tensor) -> Tensor:
            found = loss(logits, targets)
            losses.append(found.detach())
            return scaling(found)

        self._loss = scaled_loss
        schedule = self._schedule_for(len(batches), *shapes)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        try:
            schedule.step(*([inputs] if 0 in self.stages else []), target=targets, return_outputs=False)
        except RuntimeError as error:
            # The schedule hides errors of a stage, such as a broken connection, behind one of its own.
            raise error.__cause__ or error from None
        # Before its first step the schedule runs the stages once more, to learn the shapes of what they send.
        mean = torch.stack(losses[-len(batches) :]).mean() if losses else None
        return self.from_last(mean, ())

    def evaluate(self, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        """Return the loss of one micro batch, without gradients, on all ranks."""
        logits = self.forward(inputs)
        return self.from_last(None if logits is None else loss(logits, targets), ())

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor | None:
        """Return the logits on the rank with the last stage, None on the others. There are no gradients."""
        x = tokens
        shape = (tokens.shape[0], tokens.shape[1] // self._sequence_parts, self._width)
        for number, stage in self.stages.items():
            if number > 0:
                x = torch.empty(shape, device=self._device)
                dist.recv(x, group=self._group, group_src=(number - 1) % self._ranks)
            x = stage(x)
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # no backward pass will do it, and checkpoints hold shards
            if number + 1 < self._count:
                dist.send(x.float().contiguous(), group=self._group, group_dst=(number + 1) % self._ranks)
        return x if self._has_last else None

    def whole_logits(self, logits: Tensor | None, tokens: Tensor) -> Tensor:
        """Return, on all ranks, the logits of `forward` for these tokens; the last rank gives them."""
        return self.from_last(logits, (*tokens.shape, self._vocabulary))

    def from_last(self, value: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return, on all ranks of the pipeline, the fp32 tensor of the rank with the last stage."""
        found = torch.empty(shape, device=self._device) if value is None else value.float().contiguous()
        dist.broadcast(found, group=self._group, group_src=self._ranks - 1)
        return found

    def _schedule_for(self, count: int, shape: torch.Size) -> Any:
        """Return the schedule of micro batches of this number and shape: its buffers have fixed sizes."""
        if self._made_for != (count, shape):
            stages: list[Any] = [
                PipelineStage(stage, number, self._count, self._device, group=self._group)
                for number, stage in self.stages.items()
            ]
            options: dict[str, Any] = {"loss_fn": lambda *batch: self._loss(*batch), "scale_grads": False}
            self._schedule = (
                Schedule1F1B(stages[0], count, **options)
                if self._kind == "1f1b"
                else ScheduleInterleaved1F1B(stages, count, **options)
            )
            self._made_for = count, shape
        return self._schedule


def part_of(model: nn.Module, blocks: Collection[int], *, is_first: bool, is_last: bool) -> nn.Module:
    """Return a model with some of the blocks, with the embedding if it `is_first`, with norm and head if it `is_last`.

    It shares these modules with `model`, under the same names.
    """
    layers = cast(Any, model).layers
    absent = [layers[number] for number in range(len(layers)) if number not in blocks]
    absent += [] if is_first else [model.token_embeddings]
    absent += [] if is_last else [model.ln_final, model.lm_head]
    shared = [*layers, *(child for child in model.children() if child is not layers)]
    return copy.deepcopy(model, {id(module): Absent() if module in absent else module for module in shared})
