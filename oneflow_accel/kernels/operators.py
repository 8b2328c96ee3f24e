"""Operators that only the plug-in has, called from Python.

OneFlow generates its Python functions for its own operators. An operator that the plug-in adds
(`NewOperator` in C++) is described here once and then called like any function of tensors; it
goes through OneFlow's dispatcher, so it runs eagerly and in nn.Graph, on local and global tensors:

    _scale = Operator("oneflow_accel_scale", inputs=("x",), outputs=("y",),
                      attributes={"factor": "double"})
    (y,) = _scale(x, factor=2.0)

An operator has no gradient of its own: `differentiable` joins it with the one that computes it.
Models do not call these, but the entry of `oneflow_accel.kernels.registry` whose implementation
they are: it falls back to its reference where there is no plug-in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import oneflow as flow

# Types an attribute can have, as OneFlow names them, and the Python types of their values.
_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int32": (int,),
    "int64": (int,),
    "float": (float, int),
    "double": (float, int),
    "string": (str,),
}
_LISTS = {"list_int32": "int32", "list_int64": "int64", "list_float": "float"}


class Operator:
    """One operator of the plug-in, by the name that C++ registers: its inputs and outputs in the
    order of a call's arguments and results, the type of each attribute ("bool", "int32", "int64",
    "float", "double", "string", "list_int32", "list_int64" or "list_float"), and the inputs that
    may be None."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, str] | None = None,
        *,
        optional: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.attributes = dict(attributes or {})
        self.optional = frozenset(optional)
        unknown = set(self.attributes.values()) - set(_SCALARS) - set(_LISTS)
        if unknown or not self.optional <= set(self.inputs):
            raise ValueError(f"{name}: wrong attribute types or optional inputs: {unknown}")
        # Building an expression costs more than running a small operator.
        self._expressions: dict[tuple[Any, ...], Any] = {}

    def missing_reasons(self) -> list[str]:
        """Why this operator cannot run in this process, whatever the arguments; empty where it
        can."""
        state = plugin.state()
        if not state.loaded:
            return [f"there is no CPU plug-in: {state.reason}"]
        if self.name not in state.operators:
            return [f"the CPU plug-in has no operator {self.name}: build it again"]
        return []

    def __call__(self, *tensors: flow.Tensor | None, **attributes: Any) -> tuple[flow.Tensor, ...]:
        """Run the operator; returns a tuple of tensors.

        Raises:
            UserError: this process has no plug-in, or one without this operator.
            TypeError: a wrong number or type of arguments.
            RuntimeError: OneFlow or the operator refuses these tensors; the text says why.
        """
        if len(tensors) != len(self.inputs):
            raise TypeError(
                f"{self.name} takes {len(self.inputs)} tensors ({', '.join(self.inputs)}), "
                f"not {len(tensors)}"
            )
        present = tuple(tensor is not None for tensor in tensors)
        for name, tensor in zip(self.inputs, tensors, strict=True):
            if tensor is None and name in self.optional:
                continue
            if not isinstance(tensor, flow.Tensor):
                raise TypeError(f"{self.name}: {name} is not a tensor but {type(tensor).__name__}")
        expression = self._expression(present, attributes)
        return _runner()(expression, tuple(tensor for tensor in tensors if tensor is not None))

    def bound(self, **attributes: Any) -> Callable[..., tuple[flow.Tensor, ...]]:
        """The operator with these attributes as a function of its inputs, None for those that are
        missing, for callers that repeat a call: checks take longer than starting a small one."""
        run, expressions = _runner(), dict[tuple[bool, ...], Any]()

        def start(*tensors: flow.Tensor | None) -> tuple[flow.Tensor, ...]:
            present = tuple(tensor is not None for tensor in tensors)
            if present not in expressions:
                expressions[present] = self._expression(present, attributes)
            return run(expressions[present], tuple(t for t in tensors if t is not None))

        return start

    def _expression(self, present: tuple[bool, ...], attributes: dict[str, Any]) -> Any:
        if attributes.keys() != self.attributes.keys():
            raise TypeError(
                f"{self.name} takes the attributes {sorted(self.attributes)}, "
                f"not {sorted(attributes)}"
            )
        # In the order of their declaration, whatever the order of the call.
        values = tuple(
            tuple(attributes[name]) if kind in _LISTS else attributes[name]
            for name, kind in self.attributes.items()
        )
        # The types too: 1, 1.0 and True are equal.
        key = (present, values, tuple(map(type, values)))
        if key not in self._expressions:
            missing = self.missing_reasons()
            if missing:
                raise UserError(f"{self.name} cannot run: {missing[0]}")
            self._expressions[key] = self._build(present, values)
        return self._expressions[key]

    def _build(self, present: tuple[bool, ...], values: tuple[Any, ...]) -> Any:
        inputs = [name for name, has in zip(self.inputs, present, strict=True) if has]
        lines = [f'op_type_name: "{self.name}"']
        for kind, names in (("input", inputs), ("output", self.outputs)):
            for name in names:
                blob = f"{self.name}/{name}_0"
                lines.append(f'{kind} {{ key: "{name}" value {{ s: "{blob}" }} }}')
                lines.append(f'{kind}_order: "{name}"')
        for (name, kind), value in zip(self.attributes.items(), values, strict=True):
            text = self._attribute_text(name, kind, value)
            lines.append(f'attr {{ key: "{name}" value {{ at_{kind}{text} }} }}')
        return flow._oneflow_internal.one.UserOpExpr(
            self.name,
            "\n".join(lines),
            [f"{name}_0" for name in inputs],
            [f"{name}_0" for name in self.outputs],
        )

    def _attribute_text(self, name: str, kind: str, value: Any) -> str:
        if kind in _LISTS:
            element = _LISTS[kind]
            return (
                f" {{{''.join(f' val{self._attribute_text(name, element, x)}' for x in value)} }}"
            )
        # bool is an int to Python.
        if not isinstance(value, _SCALARS[kind]) or (isinstance(value, bool) != (kind == "bool")):
            raise TypeError(f"{self.name}: the attribute {name} must be {kind}, not {value!r}")
        if kind == "string":
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return f': "{escaped}"'
        return f": {str(value).lower()}"


def needs_gradient(*tensors: flow.Tensor | None) -> bool:
    """Whether autograd is on and one of the tensors requires a gradient."""
    return flow.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def gradient_reasons(*tensors: flow.Tensor | None, **_attributes: object) -> list[str]:
    """Why an implementation without a gradient cannot compute these arguments."""
    if needs_gradient(*tensors):
        return ["it has no gradient, which an argument requires"]
    return []


def empty_reasons(*tensors: flow.Tensor, **_attributes: object) -> list[str]:
    """Why an implementation that goes through blocks cannot compute these arguments."""
    return ["there is nothing to compute"] if 0 in tensors[0].shape else []


def differentiable(
    name: str, backward: Callable[..., Any], *, autocast: flow.dtype | None = flow.float32
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: gives a function of tensors a gradient, for autograd in eager mode and in
    nn.Graph, where one of them requires it.

    What is decorated, `forward(*tensors, **attributes)`, runs without autograd and returns a tensor
    or a tuple of tensors, and a tuple of tensors to keep: `kept` of
    `backward(kept, *gradients, **attributes)`, which takes one gradient for each result and returns
    one for each tensor. Tensors may be None, those to keep too; attributes are hashable.

    Under autocast the tensors become `autocast` first, on GPUs what autocast multiplies in, unless
    that is None: what `forward` keeps for the gradient is of the dtype that it computed in.
    """

    def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
        # OneFlow takes tensors alone: a function for each set of attributes and of tensors.
        @lru_cache(maxsize=256)
        def function(present: tuple[bool, ...], attributes: tuple[tuple[str, Any], ...]) -> Any:
            settings = dict(attributes)
            there: list[bool] = []

            def run(ctx: Any, *given: flow.Tensor) -> Any:
                result, kept = forward(*_in_places(given, present), **settings)
                there[:] = [tensor is not None for tensor in kept]
                ctx.save_for_backward(*(tensor for tensor in kept if tensor is not None))
                return result

            def gradients(ctx: Any, *grads: flow.Tensor) -> Any:
                found = backward(_in_places(ctx.saved_tensors, there), *grads, **settings)
                wanted = tuple(g for g, has in zip(found, present, strict=True) if has)
                return wanted if len(wanted) > 1 else wanted[0]

            methods = {"forward": staticmethod(run), "backward": staticmethod(gradients)}
            return type(name, (flow.autograd.Function,), methods)

        @wraps(forward)
        def call(*tensors: flow.Tensor | None, **attributes: Any) -> Any:
            # An autograd function takes longer to call than one generated token's attention.
            if not needs_gradient(*tensors):
                return forward(*tensors, **attributes)[0]
            present = tuple(tensor is not None for tensor in tensors)
            given = [tensor for tensor in tensors if tensor is not None]
            if autocast is not None and flow.is_autocast_enabled():
                dtype = flow.get_autocast_gpu_dtype() if given[0].is_cuda else autocast
                given = [t.to(dtype) if t.is_floating_point() else t for t in given]
            return function(present, tuple(attributes.items())).apply(*given)

        return call

    return decorated


def with_gradient(
    name: str, operator: Operator, gradient: Operator, *, autocast: flow.dtype | None = flow.float32
) -> Callable[..., Any]:
    """`operator` as a function of this name, `differentiable` by another operator: names say what
    that takes, X_grad of each result X that there is, then inputs and outputs to keep, and what it
    gives, X_grad of inputs X, of which others have none."""
    results = [f"{output}_grad" in gradient.inputs for output in operator.outputs].count(True)
    places = [(*operator.inputs, *operator.outputs).index(x) for x in gradient.inputs[results:]]

    def backward(kept: Any, *gradients: flow.Tensor, **attributes: Any) -> Any:
        own = {name: attributes[name] for name in gradient.attributes}
        found = dict(zip(gradient.outputs, gradient(*gradients, *kept, **own), strict=True))
        return tuple(found.get(f"{each}_grad") for each in operator.inputs)

    def forward(*tensors: flow.Tensor | None, **attributes: Any) -> Any:
        outputs = operator(*tensors, **attributes)
        given = (*tensors, *outputs)
        kept = tuple(given[place] for place in places)
        return (outputs[0] if results == 1 else outputs[:results]), kept

    forward.__name__ = name
    return differentiable(operator.name, backward, autocast=autocast)(forward)


def _in_places(given: Iterable[flow.Tensor], there: Sequence[bool]) -> list[flow.Tensor | None]:
    """The tensors that are given, and None where there is none."""
    tensors = iter(given)
    return [next(tensors) if has else None for has in there]


def widened(x: flow.Tensor) -> flow.Tensor:
    """float32 of numbers of 16 bits, to add them up or to take exponentials of them."""
    return x.to(flow.float32) if x.dtype in (flow.float16, flow.bfloat16) else x


def numbers(count: int, like: flow.Tensor) -> flow.Tensor:
    """0 to count - 1 where `like` is, broadcast if that is global; int32, because not every device
    compares int64."""
    if not like.is_global:
        return flow.arange(count, dtype=flow.int32, device=like.device)
    sbp = [flow.sbp.broadcast] * len(like.sbp)
    return flow.arange(count, dtype=flow.int32, placement=like.placement, sbp=sbp)


def after(x: flow.Tensor, previous: flow.Tensor) -> flow.Tensor:
    """x, which an nn.Graph has when it has `previous`, of as many axes and the same ones in front
    of the last two. Without it a graph computes what does not depend on each other side by side, so
    that all blocks are in memory at once, and a backward pass's together with the forward pass's.
    """
    if not x.is_lazy:
        return x
    first = previous[..., :1, :1]
    # 0, of NaN and infinity too.
    return x + (first > 0).to(x.dtype) * (first < 0).to(x.dtype)


@lru_cache(maxsize=1)
def _runner() -> Callable[[Any, tuple[flow.Tensor, ...]], tuple[flow.Tensor, ...]]:
    """The plug-in's function that runs an operator expression."""
    # PyDLL, not CDLL: the function works on Python objects, so it must hold the GIL.
    library = ctypes.PyDLL(str(plugin.state().path))
    bind = library.oneflow_accel_bind_module
    bind.argtypes, bind.restype = [ctypes.c_char_p], ctypes.c_char_p
    reason = bind(flow._oneflow_internal.__file__.encode())
    if reason is not None:
        raise UserError(f"{flow._oneflow_internal.__file__} cannot be used: {reason.decode()}")
    run = library.oneflow_accel_run
    run.argtypes, run.restype = [ctypes.py_object, ctypes.py_object], ctypes.py_object
    return run
