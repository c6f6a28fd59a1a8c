"""Tests of one lease: every state of the table in ``buffer_lease.py``, every transition."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from moe_graphs.engine import buffer_lease
from moe_graphs.engine.buffer_lease import BufferLease, Leases, references_of_the_engine
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)

VIEWS = {
    "view": lambda tensor: tensor.view(-1),
    "alias": lambda tensor: tensor.detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
}


def memory(device: str) -> Tensor:
    return torch.arange(4.0, device=device)


def gradient(device: str, **options) -> tuple[nn.Parameter, BufferLease]:
    parameter = nn.Parameter(torch.zeros(4, device=device))
    return parameter, BufferLease(memory(device), parameter=parameter, **options)


def written(lease: BufferLease) -> None:
    """Writes to the memory as a replay does."""
    lease._static.data.fill_(-1.0)


# ---- returned


def test_a_lease_that_nobody_was_given_is_returned(device):
    static = memory(device)
    lease = BufferLease(static)
    assert not lease.is_held()
    assert lease.reclaim()


def test_a_tensor_that_has_gone_returns_the_lease(device):
    lease = BufferLease(memory(device))
    tensor = lease.hand_out()
    assert lease.is_held()
    del tensor
    assert not lease.is_held()
    assert lease.reclaim()


def test_fewer_references_of_the_engine_are_noted(device):
    """References of callers would go unseen otherwise."""
    static = memory(device)
    of_engine = static.detach()
    lease = BufferLease(static)
    del of_engine
    lease.settle()
    kept = static.detach()
    assert lease.is_held()
    assert not lease.reclaim()
    del kept


def test_handing_out_and_reclaiming_note_fewer_references(device):
    for note in (BufferLease.hand_out, BufferLease.reclaim):
        static = memory(device)
        of_engine = static.detach()
        lease = BufferLease(static)
        del of_engine
        note(lease)
        kept = static.detach()
        assert lease.is_held(), note
        del kept


def test_what_a_capture_holds_belongs_to_the_engine(device):
    static = memory(device)
    lease, held_before = BufferLease(static), static.detach()
    with references_of_the_engine([lease]):
        assert not gc.isenabled()
        made, given_up = static.detach(), held_before
        del held_before
    assert gc.isenabled()
    assert lease.is_held()  # by ``given_up``, which the caller has had before
    del given_up
    assert lease.reclaim()
    with references_of_the_engine([lease]):
        del made
    kept = static.detach()
    assert lease.is_held()
    del kept


# ---- leased


def test_what_was_handed_out_has_a_version_of_its_own(device):
    lease = BufferLease(memory(device))
    tensor = lease.hand_out()
    version = tensor._version
    lease._static.add_(1.0)
    assert tensor._version == version
    assert tensor.data_ptr() == lease._static.data_ptr()


def test_an_output_is_known_by_its_object_until_it_is_reclaimed(device):
    static = memory(device)
    lease = BufferLease(static, outputs=(2, 5))
    tensors = [static[:2].detach(), static[2:].detach()]
    lease.note_handed(tensors)
    assert [lease.output_of(each) for each in tensors] == [2, 5]
    assert lease.output_of(tensors[0].detach()) is None
    assert lease.output_of("a constant") is None
    tensors[0].data, tensors[1].data = memory(device), memory(device)  # copies of it, say
    assert [lease.output_of(each) for each in tensors] == [2, 5]
    assert lease.reclaim()
    assert [lease.output_of(each) for each in tensors] == [None, None]


def test_references_that_autograds_thread_still_has_are_not_the_engines(device, monkeypatch):
    """Counted as the engine's, they would hide the caller that takes the tensor next."""
    lease, of_thread = BufferLease(memory(device)), []
    wait = buffer_lease.wait_for_autograd
    waited = lambda device: (wait(device), of_thread.clear())  # noqa: E731
    monkeypatch.setattr(buffer_lease, "wait_for_autograd", waited)
    with references_of_the_engine([lease]):
        of_thread.append(lease._static.detach())
    kept = lease._static.detach()
    assert lease.is_held()
    del kept
    assert not lease.is_held()


@pytest.mark.parametrize("inference", [False, True])
def test_waiting_for_autograd_leaves_nothing(device, inference):
    kind = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with torch.inference_mode(inference):
        assert buffer_lease.wait_for_autograd(kind) is None
        assert torch.is_inference_mode_enabled() == inference


# ---- moved


def test_a_tensor_that_is_held_moves(device):
    lease = BufferLease(memory(device))
    tensor = lease.hand_out()
    assert lease.reclaim()
    written(lease)
    assert torch.equal(tensor, memory(device))
    assert tensor.data_ptr() != lease._static.data_ptr()
    assert not lease.is_held()
    assert lease.handed == []


def test_tensors_on_one_storage_stay_on_one_storage(device):
    """One tensor is handed out twice; each keeps its offset and its strides."""
    static = torch.arange(6.0, device=device).view(2, 3)
    lease = BufferLease(static, outputs=(0, 1, 2))
    whole, turned = static.detach(), static[:, 1:].t()
    lease.note_handed([whole, turned, turned])
    assert lease.reclaim()
    written(lease)
    assert torch.equal(whole, torch.arange(6.0, device=device).view(2, 3))
    whole.zero_()
    assert turned.shape == (2, 2)
    assert not turned.any()
    assert turned.stride() == (1, 3)


def test_a_tensor_that_has_moved_by_itself_is_none_of_the_holders(device):
    lease = BufferLease(memory(device))
    tensor = lease.hand_out()
    alias = tensor.detach()
    tensor.data = torch.zeros(4, device=device)
    address = tensor.data_ptr()
    assert not lease.reclaim()
    assert tensor.data_ptr() == address
    del alias
    assert lease.reclaim()
    assert tensor.data_ptr() == address


# ---- a view is held


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("beside", [False, True])
def test_a_view_that_is_held_refuses(device, view, beside):
    """A view beside the tensor refuses, too, because a write to one of them shows in both."""
    lease = BufferLease(memory(device))
    tensor = lease.hand_out()
    held, address = VIEWS[view](tensor), tensor.data_ptr()
    if not beside:
        del tensor
    assert not lease.reclaim()
    assert lease.is_held()
    if beside:
        assert tensor.data_ptr() == address
    del held
    assert lease.reclaim()
    if beside:
        written(lease)
        assert torch.equal(tensor, memory(device))


def test_memory_that_somebody_has_freed_is_not_written(device):
    lease = BufferLease(memory(device))
    lease.hand_out().untyped_storage().resize_(0)
    assert not lease.reclaim()
    lease._storage.resize_(16)
    assert lease.reclaim()


# ---- in place as .grad


def test_a_gradient_that_is_grad_moves_and_stays_in_place_the_next_time(device):
    """Autograd makes another tensor of the one that it takes."""
    parameter, lease = gradient(device)
    assert lease.in_place
    assert lease.can_be_added
    for count in (1, 2):
        parameter.grad = lease.hand_out().detach()
        assert lease.reclaim()
        written(lease)
        assert torch.equal(parameter.grad, memory(device))
        assert lease.in_place
        assert lease.copied == {"still_held": count}
        lease._static.copy_(memory(device))


def test_a_gradient_that_was_dropped_costs_nothing(device):
    parameter, lease = gradient(device)
    parameter.grad = lease.hand_out().detach()
    parameter.grad = None
    assert lease.reclaim()
    assert not lease.copied


def test_a_grad_that_is_kept_when_it_is_none_again_was_noted(device):
    parameter, lease = gradient(device)
    parameter.grad = lease.hand_out().detach()
    lease.note_grad()
    kept = parameter.grad
    parameter.grad = None
    assert lease.reclaim()
    written(lease)
    assert torch.equal(kept, memory(device))


def test_a_grad_and_the_tensor_that_was_handed_out_move_together(device):
    parameter, lease = gradient(device)
    kept = lease.hand_out()
    parameter.grad = kept.detach()
    assert lease.reclaim()
    written(lease)
    kept += 1.0
    assert torch.equal(parameter.grad, memory(device) + 1.0)


def test_a_grad_that_lies_elsewhere_or_nowhere_is_not_noted(device):
    parameter, lease = gradient(device)
    tensor = lease.hand_out()
    others = [None, torch.ones(4, device=device), torch.ones(4, device=device).to_sparse()]
    for other in others:
        parameter.grad = other
        lease.note_grad()
        assert [ref() for ref in lease.handed] == [tensor]


def test_a_gradient_whose_view_was_held_is_copied_from_then_on(device):
    parameter, lease = gradient(device)
    parameter.grad = lease.hand_out().detach()
    view = parameter.grad.view(-1)
    assert not lease.reclaim()
    assert not lease.in_place
    del view
    assert lease.reclaim()
    assert not lease.in_place
    assert lease.copied == {"view_held": 1}


def test_a_gradient_that_never_stays_in_place_has_one_reason(device):
    _, lease = gradient(device, reason="used_twice")
    assert not lease.in_place
    tensor = lease.hand_out()
    assert lease.reclaim()
    written(lease)
    assert torch.equal(tensor, memory(device))
    assert lease.copied == {"used_twice": 1}


# ---- standing as .grad, as whole steps have it


def replayed(parameter: nn.Parameter, lease: BufferLease, value: float) -> bool:
    """A whole step's replay; returns False if it is refused."""
    if not lease.reclaim():
        return False
    lease._static.data.fill_(value)
    if parameter.grad is not lease.standing:
        parameter.grad = lease.standing
    return True


def test_a_standing_gradient_stays_the_same_tensor(device, monkeypatch):
    """Nobody but ``.grad`` holds the gradient; newer torch counts that as one of Python's."""
    parameter, lease = gradient(device, standing=True)
    assert not lease.in_place
    monkeypatch.setattr(buffer_lease, "_move_alone", None)
    for drops in (False, False, True, True):
        if drops:
            parameter.grad = None
        assert replayed(parameter, lease, 1.0)
        assert not lease.is_held()


@pytest.mark.parametrize("drops", [False, True])
def test_a_standing_gradient_that_is_kept_moves(device, drops):
    parameter, lease = gradient(device, standing=True)
    kept = []
    for value in (1.0, 2.0, 3.0):
        assert replayed(parameter, lease, value)
        kept.append(parameter.grad)
        if drops:
            parameter.grad = None
    assert [tensor.unique().tolist() for tensor in kept] == [[1.0], [2.0], [3.0]]
    assert len({tensor.data_ptr() for tensor in kept}) == 3


@pytest.mark.skipif(not hasattr(Tensor, "_use_count"), reason="this torch does not tell")
def test_a_standing_gradient_that_autograd_has_saved_moves(device):
    """A reference of autograd is no reference of Python."""
    parameter, lease = gradient(device, standing=True)
    scale = torch.ones((), device=device, requires_grad=True)
    replayed(parameter, lease, 1.0)
    product = (parameter.grad * scale).sum()
    assert replayed(parameter, lease, 2.0)
    product.backward()
    assert scale.grad == 4.0


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("beside", [False, True])
def test_a_view_of_a_standing_gradient_refuses(device, view, beside):
    parameter, lease = gradient(device, standing=True)
    replayed(parameter, lease, 1.0)
    held, kept = VIEWS[view](parameter.grad), parameter.grad
    if not beside:
        del kept
    address = parameter.grad.data_ptr()
    assert not replayed(parameter, lease, 2.0)
    assert parameter.grad.data_ptr() == address
    del held
    assert replayed(parameter, lease, 3.0)
    if beside:
        assert kept.unique().tolist() == [1.0]


class Wrapper(Tensor):
    """A tensor that wraps another one, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype,
                                             device=inner.device)  # fmt: skip
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None: ...

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return Wrapper(func(*given, **(kwargs or {})))


@pytest.mark.parametrize("levels", [1, 2])
def test_a_standing_gradient_that_stands_for_another_is_given_another(device, levels):
    parameter, static = nn.Parameter(Wrapper(memory(device))), memory(device)
    for _ in range(levels):
        static = Wrapper(static)
    lease = BufferLease(static, parameter=parameter, standing=True)
    assert not lease.can_be_added
    kept = lease.standing
    assert lease.reclaim()
    innermost = buffer_lease.unwrap(static)
    innermost.fill_(-1.0)
    assert torch.equal(buffer_lease.unwrap(kept), memory(device))
    assert isinstance(kept.inner, Wrapper) == (levels == 2)
    assert buffer_lease.unwrap(lease.standing).data_ptr() == innermost.data_ptr()


# ---- several leases


def out(device: str, leases: Leases, *positions: int) -> list[Tensor]:
    made = [BufferLease(memory(device)) for _ in positions]
    tensors = [lease.hand_out() for lease in made]
    for position, lease in zip(positions, made, strict=True):
        leases.add([lease], position)
    return tensors


def test_a_graph_reclaims_what_was_captured_with_it_or_later(device):
    leases = Leases()
    assert leases.reclaim()
    first, second, third = out(device, leases, 3, 4, 5)
    static = [lease._static.data_ptr() for lease in leases]
    assert leases.reclaim(4)
    assert [lease._static.data_ptr() for lease in leases] == static[:1]
    moved = [t.data_ptr() != at for t, at in zip((first, second, third), static, strict=True)]
    assert moved == [False, True, True]
    assert leases.reclaim()
    assert not list(leases)


def test_a_lease_that_is_held_stays_out(device):
    leases = Leases()
    tensors = out(device, leases, 3, 4, 5)
    view = tensors[1].detach()
    assert leases.reclaim(5)
    assert not leases.reclaim(4)
    assert not leases.reclaim()
    (left,) = leases  # all of them were tried, come what may
    assert left.is_held()
    assert leases.reclaim(5)
    del view
    assert leases.reclaim()


def test_leases_stay_out_if_there_is_no_memory_to_move_to(device, monkeypatch):
    leases = Leases()
    tensors = out(device, leases, 0, 0)

    def fails(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(buffer_lease, "_move_together", fails)
        with pytest.raises(torch.OutOfMemoryError):
            leases.reclaim()
    assert len(list(leases)) == 2
    assert leases.reclaim()
    assert len({tensor.data_ptr() for tensor in tensors}) == 2
