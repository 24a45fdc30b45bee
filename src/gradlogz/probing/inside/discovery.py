"""How a model is built, found by following its tensors through one pass.

    y = x + u(N(x))      a sum is residual if x is an ancestor of u and matrices lie between them
    y = N(x + u(x))      the same with the norm behind it; also N(u), and sums of several u

There is no table of architectures. Every function of torch that is called makes a node, whose parents are its tensors;
a sublayer is what lies between the two operands of a residual sum: attention where a call of attention does,
else feed-forward. A norm is a module of vectors alone whose output does not change when its input is made longer.

Read next: capturing.py, which looks at the same places in a batch.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._errors import InputRuntimeError
from ..._typing import Tensor
from ...attention.in_models.intercepted_calls import Call, Logits
from ...attention.in_models.interception import LAYERS, InterceptedCall, Interception, Receiver, numbered
from ...attention.result import Attention
from .architecture import Architecture, Norm, Sublayer, SumSite
from .events import LayerCall
from .hooks import Running, operands, settled, tensors, watched, without_cache, writes
from .norms import norm_of
from .reprojection import layer_call_of, reproduces

ROWS, TOKENS = 64, 3  # of the traced batch: rows enough to find a matrix in few passes, tokens enough for a mask


def discover(model: nn.Module, inputs: Mapping[str, Any], *, layers: str = LAYERS) -> Architecture:
    """The architecture of a model, from one pass over a small batch that is cut from these inputs."""
    small = cut(inputs)
    graph = _Graph()
    receiver = _Calls(graph)
    with torch.no_grad(), settled(model):
        with watched(model, graph), graph, Interception(model, receiver, layers=layers):
            model(**small, **without_cache(model))
        parted = frozenset(name for name, projected in receiver.projected.items() if _parted(*projected, layers))
    if not receiver.calls:
        remedy = "If its classes are named otherwise, pass their pattern as layers=."
        raise InputRuntimeError("discover", "model", "the model must compute attention, got a pass without any", remedy)
    return _architecture(graph, receiver)._replace(parted=parted)


def cut(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of a few tokens and many rows, of the same kind as these inputs, without padding."""
    large = any(isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1 for t in inputs.values())
    rows = 8 if large else ROWS  # images and sounds cannot be cut
    found: dict[str, Any] = {}
    for name, given in inputs.items():
        if not isinstance(given, Tensor) or given.ndim == 0:
            found[name] = given
        elif given.ndim == 2 and not given.is_floating_point():  # tokens: a decoder's are fewer than an encoder's
            n = min(TOKENS - name.startswith("decoder"), given.shape[1])
            if "mask" in name:
                found[name] = torch.ones(rows, n, dtype=given.dtype, device=given.device)
            elif "position" in name:
                found[name] = torch.arange(n, device=given.device).expand(rows, n)
            else:
                kinds = given.flatten().unique()
                found[name] = kinds[torch.arange(rows * n, device=given.device) % len(kinds)].reshape(rows, n)
        else:
            few = given[:1].expand(rows, *given.shape[1:])
            noise = torch.Generator(device="cpu").manual_seed(0)
            found[name] = few + torch.randn(few.shape, generator=noise).to(few) if few.is_floating_point() else few
    return found


# The graph of one pass -----------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    here: tuple[str, int]
    nodes: tuple[int, int]
    result: int


class _Ran(NamedTuple):
    """A module that ran, its first tensor and its result as nodes."""

    name: str
    call: int
    module: nn.Module
    given: int | None
    result: int


class _Graph(TorchFunctionMode):
    """Every function of torch as a node, numbered in the order of computation."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[tuple[int, ...]] = []
        self.matrix: list[bool] = []  # whether a parameter that is a matrix went into the node
        self.values: list[Tensor] = []
        self.alive: list[Tensor] = []  # what was written into: an identity must not be used twice
        self.weights: set[int] = set()  # tensors made of parameters alone, as a transpose is
        self.node: dict[int, int] = {}
        self.written: dict[int, int] = {}  # the last node that wrote into a storage
        self.sums: list[_Sum] = []
        self.ran: list[_Ran] = []
        self.arguments: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = {}  # of the last call
        self.running = Running()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        weights = [t for t in given if isinstance(t, nn.Parameter) or id(t) in self.weights]
        before = [self.of(t) for t in given if not isinstance(t, nn.Parameter)]
        summed = operands(func, args)
        nodes = None if summed is None else (self.of(summed[0]), self.of(summed[1]))
        written = writes(func) and bool(given)
        if written:
            self._keep(given[0])
        result = func(*args, **kwargs)
        made = [args[0]] if func is Tensor.__setitem__ else list(tensors(result))
        for t in made:
            self._make(t, before, any(w.ndim >= 2 for w in weights), written=written)
            if weights and len(weights) == len(given):
                self.weights.add(id(t))
        if nodes is not None:
            here = self.running.stack[-1] if self.running.stack else ("", 1)
            self.sums.append(_Sum(here, nodes, self.of(made[0])))
        return result

    def of(self, t: Tensor) -> int:
        """The node of a tensor, or of the last function that wrote into it."""
        if id(t) not in self.node:
            self._make(t, [], False)
        return max(self.node[id(t)], self.written.get(_storage(t), -1))

    def _make(self, t: Tensor, parents: list[int], matrix: bool, *, written: bool = False) -> None:
        self.node[id(t)] = len(self.parents)
        if written:
            self.written[_storage(t)] = len(self.parents)
        self.parents.append(tuple(parents))
        self.matrix.append(matrix)
        self.values.append(t)

    def _keep(self, t: Tensor) -> None:
        """Remember the values of what is about to be written into."""
        for node, value in enumerate(self.values):
            if _storage(value) == _storage(t) and not isinstance(value, nn.Parameter):
                self.values[node] = value.clone()
                self.alive.append(value)

    def between(self, first: int, last: int) -> set[int] | None:
        """The nodes on paths from one to another, the last included; None without a path that has a matrix."""
        reached = {first}
        for node in range(first + 1, last + 1):  # parents come first
            if any(p in reached for p in self.parents[node]):
                reached.add(node)
        if first >= last or last not in reached:
            return None
        wanted, region = [last], set[int]()
        while wanted:
            node = wanted.pop()
            if node != first and node in reached and node not in region:
                region.add(node)
                wanted.extend(self.parents[node])
        return region if any(self.matrix[node] for node in region) else None

    def same(self, a: int | None, b: int) -> bool:
        """Whether two nodes have the same values, as a tensor and its copy have."""
        if a is None:
            return False
        x, y = self.values[a], self.values[b]
        return a == b or (x.numel() == y.numel() and x.dtype == y.dtype and torch.equal(x.flatten(), y.flatten()))

    def root(self, node: int) -> int:
        """The node of which this is a copy, as dropout makes where it drops nothing."""
        while len(self.parents[node]) == 1 and self.same(self.parents[node][0], node):
            node = self.parents[node][0]
        return node

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module begins."""
        self.running.enter(name)
        self.arguments[name] = (module, args, kwargs)

    def leave(self, name: str, module: nn.Module, given: Tensor | None, result: Tensor | None) -> None:
        """A module has ended; what it computed out of sight has its argument for parent."""
        call = self.running.leave(name)[1]
        if result is None:
            return
        if id(result) not in self.node:
            matrix = any(p.ndim >= 2 for p in module.parameters())
            self._make(result, [] if given is None else [self.of(given)], matrix)
        self.ran.append(_Ran(name, call, module, None if given is None else self.of(given), self.of(result)))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout == torch.strided and t.numel() else id(t)


class _Calls(Receiver):
    """The attention calls of the traced pass, as nodes."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.calls: dict[str, set[int]] = {}
        self.outputs: dict[str, Tensor] = {}  # of the heads, side by side
        self.projected: dict[
            str, tuple[LayerCall, Tensor]
        ] = {}  # the layers with their arguments, and the queries they made

    def begin(self) -> bool:
        """Every pass is looked at."""
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention | None:
        """Leave the call to the model."""
        given = (met.call.logits,) if isinstance(met.call, Logits) else met.call[:3]
        name = numbered(layer, self.calls)
        self.calls[name] = {self.graph.of(t) for t in given}
        if isinstance(met.call, Call):
            with torch._C.DisableTorchFunction():
                self.outputs[name] = met.call.attend("none").output.transpose(1, 2).flatten(2)
            given_to = self.graph.arguments.get(layer)
            layer_call = None if given_to is None else layer_call_of(*given_to, len(met.call.query))
            if layer_call is not None:
                self.projected[name] = (layer_call, met.call.query)
        return None

    def finish(self, missed: tuple[str, ...]) -> None:
        """Layers that were missed have no sublayer."""


# Reading the graph ---------------------------------------------------------------------------------------------------


class _Branch(NamedTuple):
    sum: _Sum
    stream: int  # which operand
    start: int  # the node that the branch begins with: the stream, or what it was before a parallel branch joined it
    nodes: set[int]  # from there to the update
    update: tuple[_Sum, int]  # the sum of which it is an operand, and which

    @property
    def end(self) -> int:
        """The node of the update."""
        return self.update[0].nodes[self.update[1]]


def _architecture(graph: _Graph, receiver: _Calls) -> Architecture:
    for name, nodes in receiver.calls.items():
        module, _, call = name.partition("#")
        nodes.update(ran.result for ran in graph.ran if ran.name == module and ran.call == int(call or 1))
    branches = list(_branches(graph, set().union(*receiver.calls.values())))
    widths = [graph.values[b.end].shape[-1] for b in branches]
    width = max(widths, key=widths.count, default=0)
    branches = sorted((b for b, w in zip(branches, widths, strict=True) if w == width), key=lambda b: b.end)
    places = _places(graph, width)
    norms = [(ran, norm) for ran in graph.ran if (norm := _norm(ran, graph, width)) is not None]
    streams = [b.sum.nodes[b.stream] for b in branches]
    found: list[Sublayer] = []
    for branch in branches:
        x, y = branch.sum.nodes[branch.stream], branch.sum.result
        layer = next((name for name, nodes in receiver.calls.items() if branch.nodes & nodes), None)
        name = numbered(_home(branch, graph), {s.name: s for s in found}) if layer is None else layer
        kind: Literal["attention", "feed_forward"] = "feed_forward" if layer is None else "attention"
        after = [(ran, norm) for ran, norm in norms if graph.same(ran.given, y)]
        # The norm after the sum is one of the stream if the next sum takes its result for the stream; of the last sum,
        # if it is so before.
        inner = [norm for ran, norm in after if any(graph.same(ran.result, s) for s in streams)]
        last = after and not any(graph.same(y, s) for s in streams) and any(s.follows for s in found)
        follows = inner[0] if inner else after[0][1] if last else None
        sublayer = Sublayer(
            name,
            kind,
            next((n for ran, n in norms if graph.same(ran.given, branch.start) and ran.result in branch.nodes), None),
            next((n for ran, n in norms if graph.same(ran.result, branch.end)), None),
            follows,
            places[id(branch.sum)],
            branch.stream,
            (places[id(branch.update[0])], branch.update[1]),
            next((n for ran, n in norms if graph.same(ran.result, x)), None),
        )
        found.append(sublayer)
    outputs = {layer: home for layer, o in receiver.outputs.items() if (home := _taker(graph, o, width)) is not None}
    return Architecture(tuple(found), width, tuple(receiver.calls), outputs, frozenset())


def _parted(layer_call: LayerCall, query: Tensor, layers: str) -> bool:
    """Whether a layer can be run on tokens alone: it makes the queries of two of each sequence, of any places."""
    b, n = layer_call.given.shape[:2]
    index = (torch.arange(b, device=query.device).unsqueeze(-1) + torch.arange(2, device=query.device)) % n
    return query.shape[2] == n and reproduces(layer_call, query, index, layers=layers)


def _taker(graph: _Graph, heads: Tensor, width: int) -> str | None:
    """The module that is given the outputs of the heads, side by side, and returns vectors of the stream."""
    for ran in graph.ran:
        x = None if ran.given is None else graph.values[ran.given]
        if x is None or x.numel() != heads.numel() or x.shape[-1] != heads.shape[-1] or x.dtype != heads.dtype:
            continue
        mapped = graph.values[ran.result].shape[-1] == width and any(p.ndim >= 2 for p in ran.module.parameters())
        rounding = max(1e-5, 16 * torch.finfo(x.dtype).eps)  # some models take their softmax in float32 at any rate
        near = (x.reshape(heads.shape) - heads).abs().max() <= rounding * heads.abs().max()
        if mapped and not any(True for _ in ran.module.children()) and bool(near):
            return ran.name
    return None


def _places(graph: _Graph, width: int) -> dict[int, SumSite]:
    """The place of each sum, counted among those of the width of the stream in its module."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    found = {}
    for sum_ in graph.sums:
        if graph.values[sum_.result].shape[-1] == width:
            counts[sum_.here] += 1
            found[id(sum_)] = SumSite(*sum_.here, counts[sum_.here])
    return found


def _branches(graph: _Graph, attention: set[int]) -> Iterator[_Branch]:
    """The residual sums of a pass, branch by branch."""
    origin: dict[int, int] = {}  # of a stream to which a parallel branch may still be added: what it began with
    plain: dict[int, _Sum] = {}
    for sum_ in graph.sums:
        for stream in (0, 1):
            x, u = sum_.nodes[stream], sum_.nodes[1 - stream]
            starts = (x, graph.root(x), origin.get(x))
            start = next((node for node in starts if node is not None and graph.between(node, u) is not None), None)
            if start is None:
                continue
            origin[sum_.result] = start
            for update in _parts(graph, plain, start, (sum_, 1 - stream), attention):
                yield _Branch(sum_, stream, start, graph.between(start, update[0].nodes[update[1]]) or set(), update)
            break
        else:
            plain[sum_.result] = sum_


def _parts(
    graph: _Graph, plain: dict[int, _Sum], start: int, update: tuple[_Sum, int], attention: set[int]
) -> list[tuple[_Sum, int]]:
    """An update that is the sum of attention and a parallel feed-forward map, as the two."""
    sum_ = plain.get(graph.root(update[0].nodes[update[1]]))
    regions = [] if sum_ is None else [graph.between(start, node) for node in sum_.nodes]
    if sum_ is None or None in regions or len({bool(r & attention) for r in regions if r is not None}) < 2:
        return [update]
    return [(sum_, 0), (sum_, 1)]


def _home(branch: _Branch, graph: _Graph) -> str:
    """The smallest module that holds the matrices of a branch."""
    own = [
        r.name for r in graph.ran if r.result in branch.nodes and any(p.ndim >= 2 for p in r.module.parameters(False))
    ]
    if not own:
        return branch.sum.here[0]
    first = [name.split(".") for name in own]
    shared = []
    for words in zip(*first, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _norm(ran: _Ran, graph: _Graph, width: int) -> Norm | None:
    """A module that ran as a norm of the stream, if it is one."""
    if ran.given is None or graph.same(ran.given, ran.result):
        return None
    x, y = graph.values[ran.given], graph.values[ran.result]
    if x.shape != y.shape or not x.is_floating_point() or x.shape[-1] != width:
        return None
    found = norm_of(ran.module, x)
    return None if found is None else Norm(ran.name, ran.call, *found)
