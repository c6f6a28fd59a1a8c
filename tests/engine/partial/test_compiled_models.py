"""A compiled model breaks its graph at each scope, and the scope replays."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.engine.partial.graphs import Graphs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * 2
        for layer in self.layers:
            hidden = torch.sin(layer(hidden))
        return self.head(hidden)


def graph(net: nn.Module) -> Graphs:
    return moe_graphs.graph(net, GraphConfig(scopes="layers.*", on_capture_error="error"))


def compile_first(net: nn.Module) -> tuple[nn.Module, Graphs]:
    return torch.compile(net, backend="eager"), graph(net)


def graph_first(net: nn.Module) -> tuple[nn.Module, Graphs]:
    graphs = graph(net)
    return torch.compile(net, backend="eager"), graphs


def compile_in_place(net: nn.Module) -> tuple[nn.Module, Graphs]:
    graphs = graph(net)
    net.compile(backend="eager")
    return net, graphs


def train(make: Callable[[nn.Module], tuple[nn.Module, Graphs]] | None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    model, graphs = make(net) if make is not None else (net, None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(8):
        tokens = torch.randint(32, (2, 4))
        if step == 6 and graphs is not None:
            [first, second] = graphs.report().scopes
            assert first.eager_calls == second.eager_calls == {"warmup": 3}
            assert first.matched == second.matched == 3
            graphs.release()
        with contextlib.nullcontext() if graphs is None or step >= 6 else graphs.step():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *net.state_dict().values()]


# dynamo looks at .grad of what a compiled part hands on, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [compile_first, graph_first, compile_in_place])
def test_a_compiled_model_replays_its_scopes_and_trains_as_eager_does(
    make: Callable[[nn.Module], tuple[nn.Module, Graphs]],
) -> None:
    assert all(map(torch.equal, train(make), train(None)))


def test_without_gradients_a_compiled_model_is_whole() -> None:
    torch._dynamo.reset()
    net, tokens = Net(), torch.randint(32, (2, 4))
    expected, graphs = net(tokens), graph(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(tokens), expected)
    assert not any(scope.eager_calls for scope in graphs.report().scopes)
    graphs.release()


def test_fullgraph_is_refused_by_the_scope_name() -> None:
    torch._dynamo.reset()
    net = Net()
    graphs = graph(net)
    model = torch.compile(net, backend="eager", fullgraph=True)
    unsupported = torch._dynamo.exc.Unsupported
    with graphs.step(), pytest.raises(unsupported, match="scope 'layers.0' has graphs"):
        model(torch.randint(32, (2, 4)))
