"""How a model is built, found by following its tensors through one pass.

    y = x + u(N(x))      a sum is residual if x is an ancestor of u and matrices lie between them
    y = N(x + u(x))      the same with the norm behind it; also N(u), and sums of several u

No table of architectures is asked. Every function of torch that is called makes a node, whose parents are its tensors;
a sublayer is what lies between the two operands of a residual sum: attention where a call of attention does,
else feed-forward. A norm is a module of vectors alone whose output does not change when its input is made longer.

Read next: capturing.py, which looks at the same places in a batch.
"""

import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._errors import sentence
from .._typing import Float, Tensor
from ..attention.calls import Call, Logits
from ..attention.observation import LAYERS, numbered
from ..attention.result import Attention
from ..attention.watching import Met, Receiver, Watch

SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
ROWS, TOKENS = 64, 3  # of the traced batch: rows enough to find a matrix in few passes, tokens enough for a mask


class Place(NamedTuple):
    """A sum inside a pass: the innermost module that runs, which call of it, and which of its sums of that width."""

    module: str
    call: int
    sum: int


class Norm(NamedTuple):
    """A normalisation of tokens, gain * x / |x| + bias, the mean of the features taken off first if it `centres`."""

    name: str
    call: int
    centres: bool
    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]


class Sublayer(NamedTuple):
    """One residual branch of a model.

    name: of the attention layer, or of the smallest module that holds the matrices of a feed-forward map; numbered from
        the second call on, as in `observe`.
    reads: the norm before it; closes: the norm of its update; follows: the norm after the sum.
    sum, stream: where the sum is made, and which operand is the stream.
    update: where the update is found: an operand of that sum, or of one before it where branches are parallel.
    norm_of_stream: of a post-norm model, the norm whose output the stream is.
    """

    name: str
    kind: Literal["attention", "feed_forward"]
    reads: Norm | None
    closes: Norm | None
    follows: Norm | None
    sum: Place
    stream: int
    update: tuple[Place, int]
    norm_of_stream: Norm | None

    @property
    def placement(self) -> str:
        """Where the norms are: "pre", "post", "sandwich" (before and after the map) or "none"."""
        if self.closes is not None:
            return "sandwich" if self.reads is not None else "inner"
        return "pre" if self.reads is not None else "post" if self.follows is not None else "none"


class Layout(NamedTuple):
    """The sublayers of a model in the order of computation, and the width of its stream.

    attention: the layers of attention in the order of computation, whether or not their branch was recognised.
    outputs: of each layer the module that takes the heads' outputs side by side and returns vectors of the stream.
    """

    sublayers: tuple[Sublayer, ...]
    width: int
    attention: tuple[str, ...]
    outputs: dict[str, str]

    def of(self, layer: str) -> Sublayer | None:
        """The branch of an attention layer; None if it is not one of a residual stream."""
        return next((s for s in self.sublayers if s.kind == "attention" and s.name == layer), None)


def trace(model: nn.Module, inputs: Mapping[str, Any], *, layers: str = LAYERS) -> Layout:
    """The layout of a model, from one pass over a small batch that is cut from these inputs."""
    small = cut(inputs)
    graph = _Graph()
    receiver = _Calls(graph)
    with torch.no_grad(), settled(model), watched(model, graph), graph, Watch(model, receiver, layers=layers):
        model(**small, **without_cache(model))
    if not receiver.calls:
        remedy = "If its classes are named otherwise, pass their pattern as layers=."
        raise RuntimeError(sentence("trace", "the model must compute attention", "a pass without any", remedy))
    return _layout(graph, receiver)


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


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The option by which a model computes its keys anew, where it has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """The model without dropout, and as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# The graph of one pass -----------------------------------------------------------------------------------------------


class Running:
    """Which modules run, and how often each ran in this pass."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []
        self.times: dict[str, int] = defaultdict(int)
        self.sums: dict[tuple[str, int], int] = defaultdict(int)

    def clear(self) -> None:
        """Begin a pass."""
        self.stack.clear()
        self.times.clear()
        self.sums.clear()

    def enter(self, name: str) -> None:
        """A module begins."""
        self.times[name] += 1
        self.stack.append((name, self.times[name]))

    def leave(self, name: str) -> tuple[str, int]:
        """A module has ended; its name and which call of it that was."""
        while self.stack and self.stack[-1][0] != name:
            self.stack.pop()  # left by an error that was caught
        return self.stack.pop()

    def summed(self) -> Place:
        """The place of the sum that is made now."""
        here = self.stack[-1] if self.stack else ("", 1)
        self.sums[here] += 1
        return Place(*here, self.sums[here])


def operands(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The two tensors of a sum of tensors of one shape."""
    if func not in SUMS or len(args) < 2:
        return None
    a, b = args[:2]
    whole = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.ndim >= 2
    return (a, b) if whole and a.is_floating_point() else None


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
        self.running = Running()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        weights = [t for t in given if isinstance(t, nn.Parameter) or id(t) in self.weights]
        before = [self.of(t) for t in given if not isinstance(t, nn.Parameter)]
        summed = operands(func, args)
        nodes = None if summed is None else (self.of(summed[0]), self.of(summed[1]))
        written = writes(func) and bool(given)
        if written:
            self._keep(given[0])
        result = func(*args, **kwargs)
        made = [args[0]] if func is Tensor.__setitem__ else list(_tensors(result))
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


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument, by torch's way of naming."""
    return (
        re.fullmatch(r"__setitem__|__i(add|sub|mul|truediv|pow|and|or)__|.*[a-z]_", getattr(func, "__name__", ""))
        is not None
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


@contextmanager
def watched(model: nn.Module, follower: Any) -> Iterator[None]:
    """Tell `follower` when each module of a model begins, with its arguments, and when it ends, with its result."""
    hooks = []
    for name, module in model.named_modules():  # a tied module has the name under which it comes first

        def enter(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            follower.enter(name, m, args, kwargs)

        def leave(m: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            follower.leave(name, m, next(_tensors((args, kwargs)), None), next(_tensors(result), None))

        hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Calls(Receiver):
    """The attention calls of the traced pass, as nodes."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.calls: dict[str, set[int]] = {}
        self.outputs: dict[str, Tensor] = {}  # of the heads, side by side

    def begin(self) -> bool:
        """Every pass is looked at."""
        return True

    def receive(self, layer: str, met: Met, *, again: bool) -> Attention | None:
        """Leave the call to the model."""
        given = (met.call.logits,) if isinstance(met.call, Logits) else met.call[:3]
        name = numbered(layer, self.calls)
        self.calls[name] = {self.graph.of(t) for t in given}
        if isinstance(met.call, Call):
            with torch._C.DisableTorchFunction():
                self.outputs[name] = met.call.attend("none").output.transpose(1, 2).flatten(2)
        return None

    def unfused(self, layer: str) -> None:
        """It is computed as any other."""

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


def _layout(graph: _Graph, receiver: _Calls) -> Layout:
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
    return Layout(tuple(found), width, tuple(receiver.calls), outputs)


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


def _places(graph: _Graph, width: int) -> dict[int, Place]:
    """The place of each sum, counted among those of the width of the stream in its module."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    found = {}
    for sum_ in graph.sums:
        if graph.values[sum_.result].shape[-1] == width:
            counts[sum_.here] += 1
            found[id(sum_)] = Place(*sum_.here, counts[sum_.here])
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


def norm_of(module: nn.Module, like: Tensor) -> tuple[bool, Tensor, Tensor] | None:
    """Whether a norm centres, its gain and its bias; None if a module is no norm.

    It is one if it has no matrices and no parts, does not change when its input is made longer, and is a multiple of
    the token divided by its length, feature by feature.
    """
    parameters = list(module.parameters())
    if any(p.ndim > 1 for p in parameters) or any(True for _ in module.children()):
        return None
    if like.dtype in (torch.float16, torch.bfloat16):  # too coarse to tell p from 1 + p
        module, like = copy.deepcopy(module).float(), like.float()
    width = like.shape[-1]
    eps = max(torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps)  # many compute in float32 at any rate
    generator = torch.Generator().manual_seed(0)
    size = 0.03 / eps**0.5  # at which what a norm adds to the variance is lost in rounding
    tokens = size * torch.randn(4 * ROWS, width, generator=generator, dtype=torch.float64)

    def out(z: Tensor) -> Tensor:
        return module(z.to(like)).double().cpu()

    with torch.no_grad():
        once, longer, moved, turned = out(tokens), out(4.0 * tokens), out(tokens + 8.0 * size), out(-tokens)
    error = 64 * eps * float(once.abs().max())
    if float((once - longer).abs().max()) > error or float((once - turned).abs().max()) <= error:
        return None
    centres = float((once - moved).abs().max()) <= 10 * error
    z = tokens.to(like.dtype).double()
    z = z - z.mean(-1, keepdim=True) if centres else z
    z = z / z.square().mean(-1, keepdim=True).sqrt()
    about = z - z.mean(0)
    gain = (about * once).sum(0) / about.square().sum(0)
    bias = once.mean(0) - gain * z.mean(0)
    if float((gain * z + bias - once).abs().max()) > 8 * error:
        return None  # it divides by another length than that of the token
    for p in parameters:  # exactly what is stored, where it is stored
        for exact in (p.detach().double().cpu(), 1.0 + p.detach().double().cpu()):
            if exact.shape == gain.shape and float((exact - gain).abs().max()) <= 8 * error:
                gain = exact
            elif exact.shape == bias.shape and float((exact - bias).abs().max()) <= 8 * error:
                bias = exact
    return centres, gain, torch.where(bias.abs() <= 8 * error, 0.0, bias)
