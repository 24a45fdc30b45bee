"""Discovery of a model's architecture from the computation graph of one forward pass.

    y = x + u(N(x))      a sum is residual if x is an ancestor of u and matrices lie between them
    y = N(x + u(x))      likewise for post-norm; also N(u), and sums of several u

There is no table of architectures. Each call of a torch function becomes a node whose parents are its tensor arguments.
A sublayer consists of the nodes between the two operands of a residual sum. It is an attention sublayer if a call of
attention is among them, otherwise feed-forward. A norm is a module without matrices whose output is invariant to the
scale of its input.

Read next: capturing.py, which records the tensors of a batch at the same sites.
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
from .architecture import Architecture, FeedForward, Norm, Sublayer, SumSite
from .embeddings import unembedding_of
from .events import LayerCall
from .feed_forward import MatrixCall, feed_forward_of
from .hooks import Running, evaluation_mode, module_hooks, operands, tensors, without_cache, writes
from .norms import norm_of
from .reprojection import layer_call_of, reproduces

ROWS, TOKENS = 64, 3  # size of the discovery batch: many rows to read off a matrix in few passes, few tokens for a mask


def discover(model: nn.Module, inputs: Mapping[str, Any], *, layers: str = LAYERS) -> Architecture:
    """Return the architecture of a model, discovered in one pass over a small batch made from these inputs."""
    small = cut(inputs)
    graph = _Graph()
    receiver = _Calls(graph)
    with torch.no_grad(), evaluation_mode(model):
        with module_hooks(model, graph), graph, Interception(model, receiver, layers=layers):
            model(**small, **without_cache(model))
        parted = frozenset(name for name, projected in receiver.projected.items() if _parted(*projected, layers))
    if not receiver.calls:
        remedy = "If its attention layers have unusual class names, pass a pattern for them as layers=."
        raise InputRuntimeError("discover", "model", "no attention was found in a forward pass of the model", remedy)
    return _architecture(graph, receiver, unembedding_of(model))._replace(parted=parted)


def cut(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the same kind as these inputs, with many rows of few tokens and no padding."""
    large = any(isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1 for t in inputs.values())
    rows = 8 if large else ROWS  # images and audio cannot be shortened
    batch: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            batch[name] = value
        elif value.ndim == 2 and not value.is_floating_point():  # tokens: a decoder's are fewer than an encoder's
            n = min(TOKENS - name.startswith("decoder"), value.shape[1])
            if "mask" in name:
                batch[name] = torch.ones(rows, n, dtype=value.dtype, device=value.device)
            elif "position" in name:
                batch[name] = torch.arange(n, device=value.device).expand(rows, n)
            else:
                kinds = value.flatten().unique()
                batch[name] = kinds[torch.arange(rows * n, device=value.device) % len(kinds)].reshape(rows, n)
        else:
            few = value[:1].expand(rows, *value.shape[1:])
            noise = torch.Generator(device="cpu").manual_seed(0)
            batch[name] = few + torch.randn(few.shape, generator=noise).to(few) if few.is_floating_point() else few
    return batch


# The graph of one forward pass ----------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    here: tuple[str, int]
    nodes: tuple[int, int]
    result: int


class _Ran(NamedTuple):
    """A call of a module, with the nodes of its first tensor argument and of its result."""

    name: str
    call: int
    module: nn.Module
    input: int | None
    result: int


class _Graph(TorchFunctionMode):
    """Graph of a pass: each call of a torch function is a node, numbered in the order of computation."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[tuple[int, ...]] = []
        self.matrix: list[bool] = []  # whether a matrix parameter is an argument of the node
        self.values: list[Tensor] = []
        self.alive: list[Tensor] = []  # tensors modified in place, referenced so that their ids are not reused
        self.weights: set[int] = set()  # ids of tensors computed from parameters alone, such as transposes
        self.node: dict[int, int] = {}
        self.written: dict[int, int] = {}  # last node that wrote into a storage
        self.sums: list[_Sum] = []
        self.ran: list[_Ran] = []
        self.arguments: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]] = {}  # those of the last call
        self.running = Running()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(tensors((args, kwargs)))
        weights = [t for t in arguments if isinstance(t, nn.Parameter) or id(t) in self.weights]
        before = [self.node_of(t) for t in arguments if not isinstance(t, nn.Parameter)]
        summed = operands(func, args)
        nodes = None if summed is None else (self.node_of(summed[0]), self.node_of(summed[1]))
        written = writes(func) and bool(arguments)
        if written:
            self._keep(arguments[0])
        result = func(*args, **kwargs)
        made = [args[0]] if func is Tensor.__setitem__ else list(tensors(result))
        for t in made:
            self._make(t, before, any(w.ndim >= 2 for w in weights), written=written)
            if weights and len(weights) == len(arguments):
                self.weights.add(id(t))
        if nodes is not None:
            here = self.running.stack[-1] if self.running.stack else ("", 1)
            self.sums.append(_Sum(here, nodes, self.node_of(made[0])))
        return result

    def node_of(self, t: Tensor) -> int:
        """Return the node of a tensor, or of the last function that wrote into it."""
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
        """Store a copy of the values of a tensor that is about to be modified in place."""
        for node, value in enumerate(self.values):
            if _storage(value) == _storage(t) and not isinstance(value, nn.Parameter):
                self.values[node] = value.clone()
                self.alive.append(value)

    def between(self, first: int, last: int) -> set[int] | None:
        """Return the nodes on paths from `first` (excluded) to `last`; None if no path contains a matrix."""
        reached = {first}
        for node in range(first + 1, last + 1):  # parents precede their children
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
        """Return whether two nodes have equal values, as a tensor and its copy do."""
        if a is None:
            return False
        x, y = self.values[a], self.values[b]
        return a == b or (x.numel() == y.numel() and x.dtype == y.dtype and torch.equal(x.flatten(), y.flatten()))

    def root(self, node: int) -> int:
        """Return the node of which this one is a copy, such as the output of a disabled dropout."""
        while len(self.parents[node]) == 1 and self.same(self.parents[node][0], node):
            node = self.parents[node][0]
        return node

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the beginning of a module call and its arguments."""
        self.running.enter(name)
        self.arguments[name] = (module, args, kwargs)

    def leave(self, name: str, module: nn.Module, argument: Tensor | None, result: Tensor | None) -> None:
        """Record the end of a module call; a result without a node becomes a child of the module's argument."""
        call = self.running.leave(name)[1]
        if result is None:
            return
        if id(result) not in self.node:
            matrix = any(p.ndim >= 2 for p in module.parameters())
            self._make(result, [] if argument is None else [self.node_of(argument)], matrix)
        node = None if argument is None else self.node_of(argument)
        self.ran.append(_Ran(name, call, module, node, self.node_of(result)))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout == torch.strided and t.numel() else id(t)


class _Calls(Receiver):
    """Receiver of the attention calls of the discovery pass: their nodes, outputs and layer arguments."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.calls: dict[str, set[int]] = {}
        self.outputs: dict[str, Tensor] = {}  # concatenated outputs of the heads
        self.projected: dict[str, tuple[LayerCall, Tensor]] = {}  # each layer call, and the queries it computed

    def begin(self) -> bool:
        """Intercept every pass."""
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention | None:
        """Record the call; the model computes it."""
        arguments = (met.call.logits,) if isinstance(met.call, Logits) else met.call[:3]
        name = numbered(layer, self.calls)
        self.calls[name] = {self.graph.node_of(t) for t in arguments}
        if isinstance(met.call, Call):
            with torch._C.DisableTorchFunction():
                self.outputs[name] = met.call.attend("none").output.transpose(1, 2).flatten(2)
            layer_arguments = self.graph.arguments.get(layer)
            layer_call = None if layer_arguments is None else layer_call_of(*layer_arguments, len(met.call.query))
            if layer_call is not None:
                self.projected[name] = (layer_call, met.call.query)
        return None

    def finish(self, missed: tuple[str, ...]) -> None:
        """Ignore layers whose calls were missed: they have no sublayer."""


# Reading the graph ---------------------------------------------------------------------------------------------------


class _Branch(NamedTuple):
    sum: _Sum
    stream: int  # index of the operand that is the residual stream
    start: int  # first node of the branch: the stream, before the update of a parallel branch is added
    nodes: set[int]  # nodes from the start to the update
    update: tuple[_Sum, int]  # the sum that has the update as an operand, and the operand's index

    @property
    def end(self) -> int:
        """Node of the update."""
        return self.update[0].nodes[self.update[1]]


def _architecture(graph: _Graph, receiver: _Calls, head: nn.Module | None) -> Architecture:
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
    sublayers: list[Sublayer] = []
    maps: dict[str, FeedForward] = {}
    for branch in branches:
        x, y = branch.sum.nodes[branch.stream], branch.sum.result
        layer = next((name for name, nodes in receiver.calls.items() if branch.nodes & nodes), None)
        name = numbered(_home(branch, graph), {s.name: s for s in sublayers}) if layer is None else layer
        kind: Literal["attention", "feed_forward"] = "feed_forward" if layer is None else "attention"
        after = [(ran, norm) for ran, norm in norms if graph.same(ran.input, y)]
        # The norm after a sum is a post-norm if the next residual sum has its result as the stream. The last sum has no
        # next one; there it is a post-norm if earlier sublayers have one.
        inner = [norm for ran, norm in after if any(graph.same(ran.result, s) for s in streams)]
        last = after and not any(graph.same(y, s) for s in streams) and any(s.follows for s in sublayers)
        follows = inner[0] if inner else after[0][1] if last else None
        sublayer = Sublayer(
            name,
            kind,
            next((n for ran, n in norms if graph.same(ran.input, branch.start) and ran.result in branch.nodes), None),
            next((n for ran, n in norms if graph.same(ran.result, branch.end)), None),
            follows,
            places[id(branch.sum)],
            branch.stream,
            (places[id(branch.update[0])], branch.update[1]),
            next((n for ran, n in norms if graph.same(ran.result, x)), None),
        )
        sublayers.append(sublayer)
        if kind == "feed_forward" and (form := _feed_forward(branch, graph)) is not None:
            maps[name] = form
    homes = {layer: _output_projection(graph, heads, width) for layer, heads in receiver.outputs.items()}
    outputs = {layer: home for layer, home in homes.items() if home is not None}
    return Architecture(
        tuple(sublayers), width, tuple(receiver.calls), outputs, frozenset(), maps, _unembedding(graph, norms, head)
    )


def _parted(layer_call: LayerCall, query: Tensor, layers: str) -> bool:
    """Return whether a layer, run on two tokens of each sequence at varying positions, reproduces their queries."""
    b, n = layer_call.tokens.shape[:2]
    index = (torch.arange(b, device=query.device).unsqueeze(-1) + torch.arange(2, device=query.device)) % n
    return query.shape[2] == n and reproduces(layer_call, query, index, layers=layers)


def _output_projection(graph: _Graph, heads: Tensor, width: int) -> str | None:
    """Return the name of the module that maps the concatenated outputs of the heads to the residual stream."""
    for ran in graph.ran:
        x = None if ran.input is None else graph.values[ran.input]
        if x is None or x.numel() != heads.numel() or x.shape[-1] != heads.shape[-1] or x.dtype != heads.dtype:
            continue
        mapped = graph.values[ran.result].shape[-1] == width and any(p.ndim >= 2 for p in ran.module.parameters())
        rounding = max(1e-5, 16 * torch.finfo(x.dtype).eps)  # some models compute softmax in float32 for every dtype
        near = (x.reshape(heads.shape) - heads).abs().max() <= rounding * heads.abs().max()
        if mapped and not any(True for _ in ran.module.children()) and bool(near):
            return ran.name
    return None


def _places(graph: _Graph, width: int) -> dict[int, SumSite]:
    """Return the site of each sum, numbered among the sums of the stream's width in its module."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    sites = {}
    for sum_ in graph.sums:
        if graph.values[sum_.result].shape[-1] == width:
            counts[sum_.here] += 1
            sites[id(sum_)] = SumSite(*sum_.here, counts[sum_.here])
    return sites


def _branches(graph: _Graph, attention: set[int]) -> Iterator[_Branch]:
    """Yield the residual branches of a pass."""
    origin: dict[int, int] = {}  # result of a residual sum: start of its branch, since a parallel branch may follow
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
    """Split an update that is the sum of attention and a parallel feed-forward map into the two."""
    sum_ = plain.get(graph.root(update[0].nodes[update[1]]))
    regions = [] if sum_ is None else [graph.between(start, node) for node in sum_.nodes]
    if sum_ is None or None in regions or len({bool(r & attention) for r in regions if r is not None}) < 2:
        return [update]
    return [(sum_, 0), (sum_, 1)]


def _home(branch: _Branch, graph: _Graph) -> str:
    """Return the name of the smallest module that contains the matrices of a branch."""
    names = [
        r.name for r in graph.ran if r.result in branch.nodes and any(p.ndim >= 2 for p in r.module.parameters(False))
    ]
    if not names:
        return branch.sum.here[0]
    paths = [name.split(".") for name in names]
    shared = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _feed_forward(branch: _Branch, graph: _Graph) -> FeedForward | None:
    """Return the modules of a feed-forward branch, None if its form is not recognised."""
    calls = [
        MatrixCall(r.name, graph.values[r.input], graph.values[r.result])
        for r in graph.ran
        if r.result in branch.nodes and r.input is not None and any(p.ndim >= 2 for p in r.module.parameters(False))
    ]
    starts = [graph.values[branch.start]]
    normed = [r.result for r in graph.ran if r.result in branch.nodes and graph.same(r.input, branch.start)]
    return feed_forward_of(calls, starts + [graph.values[node] for node in normed])


def _unembedding(
    graph: _Graph, norms: list[tuple[_Ran, Norm]], head: nn.Module | None
) -> tuple[str, Norm | None] | None:
    """Return the name of the unembedding and the norm that it reads; None if it did not run."""
    ran = next((r for r in graph.ran if r.module is head and r.input is not None), None)
    if ran is None:
        return None
    return ran.name, next((norm for r, norm in norms if graph.same(ran.input, r.result)), None)


def _norm(ran: _Ran, graph: _Graph, width: int) -> Norm | None:
    """Return the norm of the residual stream that a module call computes, None if it computes none."""
    if ran.input is None or graph.same(ran.input, ran.result):
        return None
    x, y = graph.values[ran.input], graph.values[ran.result]
    if x.shape != y.shape or not x.is_floating_point() or x.shape[-1] != width:
        return None
    parts = norm_of(ran.module, x)
    return None if parts is None else Norm(ran.name, ran.call, *parts)
