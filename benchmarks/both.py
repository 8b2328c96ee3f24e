"""What OneFlow and PyTorch have the same names for: one step of each, built for either framework.

Pure Python: both sides import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.items import COMPILED, EAGER, Item
from benchmarks.serve import Maker, Step

Shape = tuple[int, ...]


class Both:
    """Steps made of the functions of `oneflow` or `torch`: of the item that is `current`."""

    current = Item("", "", "")
    # Which of the item's peers the process of PyTorch is.
    peer = EAGER

    def __init__(self, framework: Any, networks: Mapping[str, Callable[[], Any]] | None = None):
        """`networks` are those whose parameters optimizers update, by the items' names."""
        self.framework, self.nn, self.networks = framework, framework.nn, networks or {}

    def best(self, model: Any) -> Any:
        """The model as this process's peer has it: compiled, or not."""
        return self.framework.compile(model) if self.peer == COMPILED else model

    def autocast(self) -> Any:
        """What a forward pass runs in."""
        on = self.current.precision == "bfloat16"
        return self.framework.autocast(device_type="cpu", dtype=self.framework.bfloat16, enabled=on)

    def forward(self, model: Any, batch: Any) -> Step:
        model = self.best(model)

        def run() -> None:
            with self.autocast():
                model(batch)

        return self.without_gradient(run)

    def without_gradient(self, fn: Callable[[], Any]) -> Step:
        def step() -> None:
            with self.framework.no_grad():
                fn()

        return step

    def forward_backward(self, fn: Callable[[Any], Any], x: Any, *others: Any) -> Step:
        """y = fn(x), its gradient and those of other leaves."""
        x.requires_grad = True
        dy = self.framework.randn(*fn(x).shape)

        def step() -> None:
            fn(x).backward(dy)
            for leaf in (x, *others):
                leaf.grad = None

        return step

    def train(self, optimizer: Any, loss: Callable[[], Any]) -> Step:
        def step() -> None:
            with self.autocast():
                value = loss()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def adamw(self, model: Any) -> Any:
        """PyTorch's is fused where it is asked to be, OneFlow's always."""
        fused = {"fused": True} if hasattr(self.framework, "compile") else {}
        return self.framework.optim.AdamW(model.parameters(), lr=1e-5, **fused)

    def classifier(
        self, use: Maker, make: Callable[..., Any], batch: int, size: int = 224, **params: Any
    ) -> Step:
        """`use` of a model that is made of an item's params, not trained, and of images; `way` and
        `dtype` are for `use`."""
        how = {name: params.pop(name) for name in ("way", "dtype") if name in params}
        return use(make(**params).eval(), self.framework.randn(batch, 3, size, size), **how)

    def classifier_train(
        self, make: Callable[..., Any], batch: int, size: int = 224, **params: Any
    ) -> Step:
        model = make(**params).train()
        images = self.framework.randn(batch, 3, size, size)
        labels = self.framework.randint(0, 1000, (batch,))
        optimizer, forward = self.adamw(model), self.best(model)

        def loss() -> Any:
            return self.nn.functional.cross_entropy(forward(images).float(), labels)

        return self.train(optimizer, loss)

    def layer_forward(self, make: Maker, rows: int, inner: int, **params: Any) -> Step:
        return self.forward(make(inner=inner, **params), self.framework.randn(rows, inner))

    def layer_train(self, make: Maker, rows: int, inner: int, **params: Any) -> Step:
        """Forward and backward, with the gradient of the input."""
        layer, x = make(inner=inner, **params), self.framework.randn(rows, inner)
        return self.forward_backward(layer, x, *layer.parameters())

    def makers(self) -> dict[str, Maker]:
        """The steps of which nothing differs, by the items' kinds."""
        names = "softmax gelu layer_norm cross_entropy relu add bias_add permute dropout"
        kinds = [*names.split(), "optimizer", "clip", "chain", "item", "sum_item", "mlp_train"]
        return {kind: getattr(self, kind) for kind in kinds}

    def softmax(self, shape: Shape) -> Step:
        framework = self.framework
        return self.forward_backward(
            lambda x: framework.softmax(x, dim=-1), framework.randn(*shape)
        )

    def gelu(self, shape: Shape, approximate: str) -> Step:
        gelu = self.nn.GELU(approximate=approximate)
        return self.forward_backward(gelu, self.framework.randn(*shape))

    def layer_norm(self, shape: Shape) -> Step:
        # The parameters' gradients add up from step to step.
        return self.forward_backward(self.nn.LayerNorm(shape[-1]), self.framework.randn(*shape))

    def cross_entropy(self, shape: Shape) -> Step:
        labels = self.framework.randint(0, shape[1], (shape[0],))
        logits = self.framework.randn(*shape, requires_grad=True)

        def step() -> None:
            self.nn.functional.cross_entropy(logits, labels).backward()
            logits.grad = None

        return step

    def relu(self, shape: Shape) -> Step:
        x = self.framework.randn(*shape)
        return self.without_gradient(lambda: self.framework.relu(x))

    def add(self, shape: Shape) -> Step:
        x, y = self.framework.randn(*shape), self.framework.randn(*shape)
        return self.without_gradient(lambda: x + y)

    def bias_add(self, shape: Shape) -> Step:
        x, bias = self.framework.randn(*shape), self.framework.randn(shape[-1])
        return self.without_gradient(lambda: x + bias)

    def permute(self, shape: Shape) -> Step:
        """(B, T, H, D) to (B, H, T, D)."""
        x = self.framework.randn(shape[0], shape[1], shape[2] // 64, 64)
        return self.without_gradient(lambda: x.permute(0, 2, 1, 3).contiguous())

    def dropout(self, shape: Shape) -> Step:
        return self.forward_backward(self.nn.Dropout(0.1), self.framework.randn(*shape))

    def optimizer(self, optimizer: str, model: str) -> Step:
        optim, parameters = self.framework.optim, self._parameters(model)
        if optimizer == "SGD":
            return optim.SGD(parameters, lr=1e-6, momentum=0.9, weight_decay=1e-4).step
        return optim.AdamW(parameters, lr=1e-6, weight_decay=0.01).step

    def clip(self, model: str) -> Step:
        parameters = self._parameters(model)
        return lambda: self.nn.utils.clip_grad_norm_(parameters, 1.0)

    def _parameters(self, model: str) -> list[Any]:
        parameters = list(self.networks[model]().parameters())
        for parameter in parameters:
            parameter.grad = self.framework.randn(*parameter.shape)
        return parameters

    # Over before they are worth a second thread: what the framework itself takes.

    def chain(self, operations: int, numbers: int) -> Step:
        x = self.framework.ones(numbers)

        def step() -> None:
            y = x
            for _ in range(operations):
                y = y + 1.0
            y[0].item()

        return step

    def item(self) -> Step:
        x = self.framework.ones(1)

        def step() -> None:
            x.item()

        return step

    def sum_item(self, numbers: int) -> Step:
        x = self.framework.ones(numbers)

        def step() -> None:
            x.sum().item()

        return step

    def mlp_train(self, batch: int, inner: int, hidden: int, outer: int) -> Step:
        nn, framework = self.nn, self.framework
        model = nn.Sequential(nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, outer))
        optimizer = framework.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x, labels = framework.randn(batch, inner), framework.randint(0, outer, (batch,))

        def step() -> None:
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

        return step
