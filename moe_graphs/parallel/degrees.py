"""Degrees of parallelism: what is known of each, and how it divides a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch.distributed.device_mesh import DeviceMesh

from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.model_stage import ModelStage
from moe_graphs.registry import DEGREES


class Degree:
    """A degree of a layout, and all that meshes, checks, plans and the command know of it.

    The names in ``registry.DEGREES`` are fields of ``ParallelConfig``. Their order is that of the
    mesh's dimensions, outermost first, and of divisions of a model.

    Attributes:
        is_factor: whether its ranks are a dimension of the mesh. If not, they are taken out of
            others.
        has_batches: whether its ranks have batches of their own.
        has_tokens: whether its ranks have tokens of their own: other batches, or other parts.
        hides_documents: whether a rank may lack the tokens that its documents begin with.
        messages: what a plan calls the bytes that its ranks send in a microbatch.
    """

    is_factor: ClassVar[bool] = True
    has_batches: ClassVar[bool] = False
    has_tokens: ClassVar[bool] = False
    hides_documents: ClassVar[bool] = False
    messages: ClassVar[str] = ""

    @classmethod
    def check(
        cls, layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
    ) -> None:
        """Check that the ranks can share such a model, and sequences of this length.

        Raises:
            ValueError: they cannot.
        """

    @classmethod
    def share(cls, model: LanguageModel | ModelStage, ranks: DeviceMesh) -> None:
        """Divide a model or a stage over ``ranks``, one dimension of the mesh, in place.

        FSDP2 shards what is left, and ``parallelize`` divides experts.
        """


class DataReplicas(Degree):
    has_batches = has_tokens = True


class DataShards(Degree):
    has_batches = has_tokens = True


def problems_of(
    layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
) -> Iterator[str]:
    """Reasons why ranks cannot share a model in this layout, one for each degree."""
    for name, size in layout.degrees().items():
        if size > 1:
            try:
                DEGREES[name].check(layout, model, sequence_length)
            except ValueError as error:
                yield str(error)


def check_degrees(
    layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
) -> None:
    """Check that ranks can share a model in this layout.

    Raises:
        ValueError: the first of ``problems_of``.
    """
    for problem in problems_of(layout, model, sequence_length):
        raise ValueError(problem)
