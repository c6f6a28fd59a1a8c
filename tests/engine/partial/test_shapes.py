"""Graphs of several shapes: a batch of another shape captures its own, the rarest one leaves."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import moe_graphs
from moe_graphs import GraphConfig, GraphWarning
from moe_graphs.engine.backends.cpu import CpuRecorder
from moe_graphs.engine.partial.recording import CallSite
from training_runs import DEVICES, VOCABULARY, tiny_model
from two_scopes import build, data, scopes, update

SHAPES = (4, 4, 4, 6, 4, 2, 6, 2, 4, 6)


def trained(device, rows, microbatches=1, held=None, between=None, **options):
    """All that training leaves, and the report. ``rows``: of the batch of each step."""
    model = build(device)
    graphs = moe_graphs.graph(model, scopes(**options) if options else GraphConfig(impl="none"))
    torch.manual_seed(1)
    left, outputs = [], []
    for number, each in enumerate(rows):
        model.zero_grad()
        given = {} if between is None else between(model, number)
        with graphs.step():
            for shift in range(microbatches):
                x = data(device, each + shift).requires_grad_()
                output = model(x, **given)
                output.square().mean().backward()
                left += [output.detach().clone(), x.grad]
                if held is not None:
                    outputs.append((output, output.detach().clone()))
        left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        update(model)
        assert all(torch.equal(*pair) for pair in outputs[-3:])
    left += [*model.parameters(), *model.buffers(), torch.rand(4, device=device)]
    return [tensor.detach().clone() for tensor in left], graphs


def compared(device="cpu", rows=SHAPES, microbatches=1, held=None, between=None, **options):
    # Eager calls of scopes that recompute run under torch's checkpoint.
    anew = {"recompute": True, "warmup_steps": 99} if options.get("recompute") else {}
    eager, _ = trained(device, rows, microbatches, between=between, **anew)
    given = {"warmup_steps": 2, "shapes": 3, **options}
    found, graphs = trained(device, rows, microbatches, held, between, **given)
    assert len(found) == len(eager)
    assert all(map(torch.equal, found, eager))
    return graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", [False, True])
def test_each_shape_is_captured_when_it_first_comes(device, recompute):
    graphs = compared(device, recompute=recompute, on_mismatch="error")
    report = graphs.report()
    assert report.eager_calls == {"warmup": 2 * 2}
    assert report.matched == 2 * (len(SHAPES) - 2)
    assert (report.shapes, report.shapes_left) == (3, 0)
    assert [scope.forward_graphs for scope in report.scopes] == [3, 3]
    assert "graphs of 3 shapes" in str(report)
    assert graphs.state == "captured"


@pytest.mark.parametrize("device", DEVICES)
def test_microbatches_of_one_step_have_several_shapes(device):
    """Gradients that one shape has left are added to by another one."""
    graphs = compared(device, (4, 4, 4, 4, 5, 5), 3, shapes=4, audit_every=None)
    report = graphs.report()
    assert report.replayed > 2 * 3 * 2
    assert report.eager_calls.keys() == {"warmup"}
    copied = report.scopes[0].copied_gradients
    assert copied["several_shapes"] == 2 * 3


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_that_are_held_keep_their_values(device):
    compared(device, held=True, audit_every=None)


def test_outputs_of_a_later_shape_have_memory_of_their_own():
    """Graphs of an earlier shape may work where they lie, in a pool of a GPU."""
    model = build("cpu")
    config = scopes(warmup_steps=2, shapes=3, audit_every=None)
    graphs, handed = moe_graphs.graph(model, config), {}
    for rows in (4, 4, 4, 6, 2, 6, 4, 2):
        with graphs.step():
            output = model(data("cpu", rows))
            output.sum().backward()
        handed[rows] = output.data_ptr()
    slots = graphs.captured.chunks[-1].slots
    static = [output.data_ptr() for slot in slots for output in slot.sites[-1].forward.outputs]
    assert [handed[rows] == at for rows, at in zip((4, 6, 2), static, strict=True)] == [
        True, False, False,
    ]  # fmt: skip


# ---- memory that shapes share


def poison(graphs):
    """Fills what a later microbatch may overwrite: static inputs, and outputs that are lent."""
    sites = graphs.captured.sites if graphs.captured is not None else ()
    for site in sites:
        if site.has_forward:
            lent = site.forward.outputs if site.has_lent else ()
            for tensor in (*site.forward.targets, *lent):
                tensor.data.fill_(float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("audit_every", [None, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_that_shapes_share_is_read_in_another_step(device, recompute, audit_every):
    """Values that a caller holds, and those that a replay needs, lie elsewhere."""
    runs = []
    for graphed in (False, True):
        model = build(device)
        anew = {"recompute": recompute, "warmup_steps": 2 if graphed else 99}
        config = scopes(shapes=3, audit_every=audit_every, on_mismatch="error", **anew)
        graphs, left, held = moe_graphs.graph(model, config), [], []
        torch.manual_seed(1)
        for rows in SHAPES:
            model.zero_grad()
            with graphs.step():
                x = data(device, rows).requires_grad_()
                output = model(x)
                output.square().mean().backward()
            held += [output, x.grad, *(p.grad for p in model.parameters())]
            poison(graphs)
            left += [tensor.detach().clone() for tensor in held[-6:]]
            update(model)
        runs.append([*left, *held, *model.parameters()])
    assert all(map(torch.equal, *runs))
    assert any(site.has_lent for site in graphs.captured.sites)
    assert all(site.has_lent for site in graphs.captured.sites) == recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_shorter_shapes_take_the_static_memory_of_the_longest(recompute):
    def static_bytes(rows):
        return compared(rows=rows, recompute=recompute).report()

    alone, several = static_bytes((6,) * 5), static_bytes((6, 6, 6, 4, 2, 4, 6, 2))
    assert several.shapes == 3
    assert several.static_bytes == alone.static_bytes
    # A longer shape that comes later has memory of its own.
    assert static_bytes((6, 6, 6, 8)).static_bytes > alone.static_bytes


def test_outputs_that_are_lent_keep_no_memory_alive(monkeypatch):
    """A tape is the only holder here; on a GPU the pool gets the memory back."""

    def borrow(self, tensor):
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.data_ptr(), tensor.device, tensor.nbytes
        )
        return torch.empty(0).set_(storage, 0, tensor.shape, tensor.stride())

    monkeypatch.setattr(CpuRecorder, "borrow", borrow)
    made = []

    def lend(self, borrow):
        made.extend(StorageWeakRef(each.untyped_storage()) for each in self.forward.outputs)
        lend_outputs(self, borrow)

    lend_outputs = CallSite.lend_outputs
    monkeypatch.setattr(CallSite, "lend_outputs", lend)
    graphs = compared(recompute=True)
    assert len(made) == 2 * 3
    assert not any(each.expired() for each in made)
    for site in graphs.captured.sites:
        for graph in site.graphs():
            graph.release()
    assert all(each.expired() for each in made)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_the_pool_of_several_shapes_is_that_of_the_longest(recompute):
    """Eight layers of 16 MiB; the longest shape comes first."""

    def taken(rows):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(8)]
        model = torch.nn.Sequential(*layers).cuda()
        config = GraphConfig(["[0-9]"], warmup_steps=2, shapes=3, recompute=recompute)
        graphs = moe_graphs.graph(model, config)
        for each in rows:
            with graphs.step():
                model(torch.randn(each, 512, device="cuda")).square().mean().backward()
            model.zero_grad()
        report = graphs.report()
        graphs.release()
        return report.pool_bytes + report.static_bytes, report.shapes

    (alone, _), (several, shapes) = taken((8192,) * 4), taken((8192, 8192, 8192, 6144, 4096))
    assert shapes == 3
    # Outputs of a first shape that does not recompute are no copies, and nobody gets their memory.
    assert several < (1.2 if recompute else 1.8) * alone


def test_the_rarest_shape_leaves_for_one_that_comes_more_often():
    rows = (4, 4, 4, 6, 6, 2, 2, 2, 6, 2, 2, 4)
    graphs = compared(rows=rows, shapes=2)
    report = graphs.report()
    # At first the shape of 2 rows came as rarely as that of 4, which is the rarer one at the end.
    assert (report.shapes, report.shapes_left) == (2, 1)
    assert report.eager_calls == {"warmup": 2 * 2, "shape": 2 * 2}
    assert report.matched == 2 * (len(rows) - 2 - 2)
    assert f"{report.shapes_left} left since others came more often" in str(report)
    assert report.captured == 2 * 2


def test_one_shape_is_the_default():
    with pytest.warns(GraphWarning, match=r"\(shape\)"):
        report = compared(shapes=1).report()
    assert report.shapes == 1
    assert report.eager_calls["shape"] == 2 * SHAPES[2:].count(6) + 2 * SHAPES[2:].count(2)


def test_other_differences_are_no_shapes():
    def between(model, number):
        return {"scale": 2.0} if number == 5 else {}

    report = compared(rows=(4, 4, 4, 4, 6, 6, 6), between=between).report()
    assert report.eager_calls == {"warmup": 2 * 2, "constant": 2}
    assert report.shapes == 2


def test_a_shape_whose_capture_fails_runs_eagerly_and_the_others_stay():
    def between(model, number):
        model.first.inside = reads_on_the_host
        return {}

    with pytest.warns(GraphWarning, match="batches of this shape run eagerly: .*first"):
        report = compared(between=between).report()
    assert report.eager_calls["capture_failed"] == 2
    assert report.eager_calls["shape"] == 2 * (SHAPES[2:].count(6) - 1)
    assert report.shapes == 2
    assert report.state == "captured"


def reads_on_the_host(x):
    return x * x.sum().item() if len(x) == 6 else x


def test_release_frees_the_graphs_of_all_shapes():
    graphs = compared()
    assert graphs.report().static_bytes > 0
    graphs.release()
    assert graphs.report().static_bytes == 0


@pytest.mark.parametrize("wrong", [{"shapes": 0}, {"shapes": 2, "memory_limit": 1 << 20}])
def test_wrong_options_are_named(wrong):
    with pytest.raises(ValueError, match=r"shapes=\d: at least 1, and 1 with a memory_limit"):
        GraphConfig(**wrong)


@pytest.mark.parametrize(
    "chosen", ["full", pytest.param("attn,moe_router,moe_preprocess", marks=pytest.mark.long)]
)
def test_rows_of_our_own_model_have_several_lengths(chosen):
    """Graphs of stages end within a layer, and routers have losses and biases."""
    runs = []
    for graphed in (False, True):
        model = tiny_model("cpu", "moe").train()
        config = GraphConfig(chosen, shapes=3, warmup_steps=2, on_mismatch="error")
        graphs = moe_graphs.graph(model, config if graphed else GraphConfig(impl="none"))
        torch.manual_seed(1)
        left = []
        for length in (16, 16, 16, 24, 8, 24, 16, 8):
            tokens = torch.randint(VOCABULARY, (2, length + 1))
            model.zero_grad()
            with graphs.step():
                output = model(tokens[:, :-1], tokens[:, 1:])
                loss = output.loss + output.aux_loss
                loss.backward()
            left += [loss.detach(), *(p.grad for p in model.parameters())]
            update(model)
        runs.append([*left, *(b.clone() for b in model.buffers())])
    assert len(runs[0]) == len(runs[1])
    assert all(map(torch.equal, *runs))
    report = graphs.report()
    assert report.shapes == 3
    assert report.matched == 6 * len(report.scopes)
