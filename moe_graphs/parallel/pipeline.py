"""Pipeline parallelism: a language model divided into stages, and the schedule that runs them.

    stages = pipeline_stages(model, config, mesh)     # in place
    for stage in stages:
        parallelize(stage, config, mesh)
    pipeline = Pipeline(stages, mesh, microbatches=8, microbatch_shape=(2, 4096))
    loss, dropped = pipeline.forward_backward(inputs_BS, targets_BS)

Schedules and communication are those of ``torch.distributed.pipelining``.

Shapes: B sequences of a rank in a step, S sequence, D model, V vocabulary, M microbatches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule
from moe_graphs.kernels.precision import accumulation_dtype
from moe_graphs.layers import LanguageModel
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.degrees import Degree
from moe_graphs.parallel.model_stage import ModelStage, numbered_layers
from moe_graphs.parallel.vocabulary import vocabulary_group

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function from logits ``[B, S, V]`` and targets ``[B, S]`` to a 0-dim loss.

With ``tp`` the logits have this rank's columns; see ``vocabulary_cross_entropy``.
"""


class PipelineParallel(Degree):
    """Ranks with stages of the model, which ``pipeline_stages`` makes before ``parallelize``."""

    hides_documents = True  # only the first stage sees tokens


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """Numbers of the layers of every stage, divided as torchtitan does.

    Embedding and head count as a layer each, and the first stages get the remainder. Every stage
    has at least one layer.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"pp: {num_layers} layer(s) cannot be divided into {num_stages} stages of at least one "
            f"layer: lower pp, or the stages of a rank"
        )
    share, extra = divmod(num_layers + 2, num_stages)
    sizes = [share + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check_schedule(name: str, pp: int, stages_per_rank: int, microbatches: int) -> None:
    """Check that torch's schedule ``name`` can run these numbers of microbatches and stages.

    Raises:
        ValueError: it cannot; the message says which numbers it can run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule: {name!r} is not one of {', '.join(SCHEDULES)}")
    if (name == "interleaved_1f1b") != (stages_per_rank > 1):
        raise ValueError(
            f"schedule: {name!r} with {stages_per_rank} stage(s) on a rank: several stages are "
            f"run by 'interleaved_1f1b', and only by it"
        )
    if name == "1f1b" and microbatches < pp:
        raise ValueError(
            f"microbatches: 1f1b keeps {pp} stages busy with at least as many microbatches, got "
            f"{microbatches}: raise them, or take the schedule 'gpipe'"
        )
    rounds = max(1, microbatches // pp)
    if name == "interleaved_1f1b" and (microbatches < pp or microbatches % rounds):
        raise ValueError(
            f"microbatches: interleaved_1f1b runs them in rounds of at least pp={pp}, got "
            f"{microbatches}: choose a multiple of {pp}"
        )


def pipeline_stages(
    model: LanguageModel,
    config: ParallelConfig,
    mesh: DeviceMesh,
    *,
    stages_per_rank: int = 1,
    hidden_dtype: torch.dtype | None = None,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[ModelStage]:
    """Divide ``model`` in place: modules of other ranks' stages are taken out of it.

    The remaining parameters keep their names in the whole model, also in checkpoints.
    ``parallelize`` each stage, then make the optimizer of the model. Do not call the model itself
    any more.

    Args:
        mesh: the result of ``make_mesh(config, ...)``; stage ``i`` is on rank ``i % pp`` of "pp".
        hidden_dtype: dtype of hidden states between stages (default: the parameters' dtype). With
            FSDP2's mixed precision it is the policy's ``param_dtype``.
        autocast: makes a context for the forward of a stage. A context around a pipeline's whole
            step would be around its backwards, too.

    Raises:
        ValueError: fewer layers than stages, or a model that is divided already.
    """
    if model.embedding is None or model.head is None:
        raise ValueError("the model is divided into stages already: build it whole")
    parts = layers_of_stages(len(model.layers), config.pp * stages_per_rank)
    dtype = next(model.parameters()).dtype if hidden_dtype is None else hidden_dtype
    own = parts[mesh["pp"].get_local_rank() :: config.pp]
    stages = [ModelStage(model, part, hidden_dtype=dtype, autocast=autocast) for part in own]
    kept = {number: model.layers[number] for part in own for number in part}
    whole: Any = model  # its annotations say that it has an embedding, a norm and a head
    whole.layers = numbered_layers(kept)
    for name in ("embedding", "norm", "head"):
        if all(getattr(stage, name) is None for stage in stages):
            setattr(whole, name, None)
    return stages


class Pipeline:
    """The stages of this rank, run by a schedule; all ranks of "pp" call its methods alike.

    Gradients are those of the mean loss over the microbatches, aux losses included; with FSDP2 the
    mean is over the data-parallel ranks, too.

    Args:
        stages: the result of ``pipeline_stages``, in its order, after ``parallelize``.
        loss_fn: computes the mean loss of a microbatch from its logits. By default the last stage
            computes the cross entropy, as ``LanguageModel`` does, and logits are never whole. It
            makes the gradient of the head's weight in its forward, so with ``gpipe`` all
            microbatches hold one until their backward.
        evaluation_loss_fn: loss function of ``evaluate`` (default: ``loss_fn``; without one the
            sum over targets instead of the mean).
        microbatch_shape: number and length of a rank's sequences; with ``cp`` the length of its
            part.
        schedule: one of ``SCHEDULES``; several stages need "interleaved_1f1b".
        scale: multiplies losses before the backward (``DeviceStep.scale``).
        rule: what the loss of the last stage is besides cross entropy; ``evaluate`` has none of it.

    Attributes:
        memory: list of the buffers that receive messages, filled by the first step. Pass the list
            itself as ``state`` of a ``FullIteration`` around a step.

    Raises:
        ValueError: the schedule cannot run these numbers of microbatches and stages.
    """

    def __init__(
        self,
        stages: Sequence[ModelStage],
        mesh: DeviceMesh,
        loss_fn: Loss | None = None,
        *,
        microbatches: int,
        microbatch_shape: tuple[int, int],
        schedule: str = "1f1b",
        scale: Callable[[Tensor], Tensor] | None = None,
        evaluation_loss_fn: Loss | None = None,
        rule: LossRule = PLAIN,
    ) -> None:
        ranks = mesh["pp"]
        check_schedule(schedule, ranks.size(), len(stages), microbatches)
        if loss_fn is not None and not rule.is_plain:
            raise ValueError("rule: of the last stage's own loss: drop it, or loss_fn")
        if loss_fn is None and evaluation_loss_fn is not None:
            raise ValueError("evaluation_loss_fn: it takes logits, so pass a loss_fn, too")
        self.stages, self.microbatches = tuple(stages), microbatches
        self.device = next(stages[0].parameters()).device
        self._weight_M = torch.full((microbatches,), 1 / microbatches, device=self.device)
        self._scale = (lambda loss: loss) if scale is None else scale
        self._losses: list[Tensor] = []
        self._of_torch: list[PipelineStage] = []
        self.memory: list[Tensor] = []
        kinds: dict[str, Any] = {
            "1f1b": Schedule1F1B,
            "gpipe": ScheduleGPipe,
            "interleaved_1f1b": ScheduleInterleaved1F1B,
        }

        def run_by(kind: Any, loss: Loss) -> Any:
            given = len(stages), ranks, microbatch_shape, self.device
            made = [_stage_of_torch(stage, n, *given) for n, stage in enumerate(stages)]
            self._of_torch += made
            several = made if len(made) > 1 else made[0]
            return kind(several, microbatches, loss_fn=loss, scale_grads=False)

        for stage in stages:
            stage.returns_logits, stage.rule = loss_fn is not None, rule
        loss_of = loss_fn or _loss_of_stage

        def weighted(left: Tensor, targets_BS: Tensor) -> Tensor:
            return self._scale(self._noted(loss_of(left, targets_BS)) / microbatches)

        def evaluated(left: Tensor, targets_BS: Tensor) -> Tensor:
            return self._noted((evaluation_loss_fn or loss_of)(left, targets_BS))

        self.schedule = run_by(kinds[schedule], weighted)
        self._trained = list(self._of_torch)
        # The schedule of evaluation has stages of its own: torch 2.11 makes a stage's buffers once,
        # and those of training require gradients.
        forwards = ScheduleInterleaved1F1B if len(stages) > 1 else ScheduleGPipe
        self._evaluation = run_by(forwards, evaluated)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which computes the losses."""
        return self.stages[-1].head is not None

    def forward_backward(self, inputs_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Run forward and backward of all microbatches of a step.

        Returns:
            Two 0-dim tensors, to be summed over the ranks of "pp": the mean loss without aux losses
            (0 on all stages but the last), and the dropped tokens of this rank's stages.
        """
        target, weight_M = targets_BS if self.is_last else None, self._scale(self._weight_M)
        # Both branches call `schedule.step` directly and without `**`: if it were read first, whole
        # steps would compare every attribute `step`, also a trainer's counter.
        if self.stages[0].embedding is not None:
            tokens_BS = inputs_BS.contiguous()
            self.schedule.step(
                tokens_BS, target=target, return_outputs=False,
                aux_weight_1=weight_M, targets_BS=targets_BS,
            )  # fmt: skip
        else:
            self.schedule.step(
                target=target, return_outputs=False,
                aux_weight_1=weight_M, targets_BS=targets_BS,
            )  # fmt: skip
        losses = self._end()
        if not self.memory:
            received = [r for s in self._trained for r in _received_by(s)]
            self.memory += [self._weight_M, *received]
        dropped = torch.zeros((), dtype=torch.int64, device=self.device)
        for stage in self.stages:
            dropped = dropped + stage.take_dropped_tokens()
        return self._or_zero(losses, torch.Tensor.mean), dropped

    def evaluate(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run forwards only, in the mode (train or eval) of the model.

        Returns:
            The sum of the microbatches' losses by ``evaluation_loss_fn``, 0-dim; 0 on all stages
            but the last.
        """
        target = targets_BS if self.is_last else None
        data = (inputs_BS.contiguous(),) if self.stages[0].embedding is not None else ()
        options = {"aux_weight_1": self._weight_M, "summed_BS": targets_BS}
        with torch.no_grad():
            self._evaluation.eval(*data, target=target, return_outputs=False, **options)
        losses = self._end()
        for stage in self.stages:
            stage.take_dropped_tokens()
        return self._or_zero(losses, torch.Tensor.sum)

    def _end(self) -> list[Tensor]:
        """Free received gradients, and return the microbatches' losses, on the last stage."""
        for stage in self._of_torch:  # torch would keep these gradients until the next step
            stage.clear_runtime_states()
        losses, self._losses[:] = list(self._losses), []
        return losses

    def _noted(self, loss: Tensor) -> Tensor:
        self._losses.append(loss.detach())
        return loss

    def _or_zero(self, losses: list[Tensor], together: Callable[[Tensor], Tensor]) -> Tensor:
        return together(torch.stack(losses)) if losses else torch.zeros((), device=self.device)


def _loss_of_stage(loss: Tensor, targets_BS: Tensor) -> Tensor:
    """The loss that the last stage has computed itself."""
    return loss


def _stage_of_torch(
    stage: ModelStage,
    number: int,
    of_a_rank: int,
    ranks: DeviceMesh,
    shape: tuple[int, int],
    device: torch.device,
) -> PipelineStage:
    """Make torch's stage with shapes and dtypes of all messages.

    Without them torch would find the shapes by a forward of its own, in which routers would count
    tokens.
    """
    group = vocabulary_group(stage)
    shared_by = 1 if group is None else dist.get_world_size(group)
    hidden = (*shape, stage.config.hidden_size)
    logits = (*shape, stage.config.vocab_size // shared_by)

    def floats(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

    entered = left = floats(hidden, stage.hidden_dtype)
    if stage.embedding is not None:
        entered = torch.empty(shape, dtype=torch.int64, device="meta")
    if stage.head is not None:
        left = floats(logits, stage.logits_dtype(device))
    if stage.head is not None and not stage.returns_logits:
        left = floats((), accumulation_dtype(left))
    return PipelineStage(
        stage,
        ranks.get_local_rank() + number * ranks.size(),
        ranks.size() * of_a_rank,
        device,
        input_args=entered,
        output_args=left,
        group=ranks.get_group(),
    )


def _received_by(stage: PipelineStage) -> Iterator[Tensor]:
    for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        for info in infos:
            buffer = getattr(info, "buffer", None)  # the first stage's inputs have no buffer
            if buffer is not None:
                yield buffer
