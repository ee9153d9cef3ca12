"""Products of linear layers in 8 or 4 bits, with the kernels around them that the recipe of a workload says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from simulator.config import Workload
from simulator.models.shapes import FrameworkShapes, keeps_weight_copies
from simulator.operations.nodes import Node, Op, Ops, Tensor, memory
from simulator.operations.weights import Weight
from simulator.precisions.recipe import CastKernel, CastKernels, ProductRecipe
from simulator.program import Beside, Compute, GroupedMatmul, Matmul

#: Blocks whose products stay in working precision.
LEFT_OUT = ("head", "mtp")
#: Of a weight that was gathered in 8 bits.
TURNED_AS_GATHERED = CastKernel("turned", "fp8_turned", 0.5, 0.5)
#: Last words of the names of inputs that an activation, or a norm, makes.
MADE_BY_ACTIVATION, MADE_BY_NORM = ".act", "normed"


def in_low_precision(
    shapes: FrameworkShapes,
    node: Node,
    name: str,
    rows: int,
    n: int,
    k: int,
    *,
    loads: Sequence[int] = (),
    first: bool = True,
) -> Node:
    """Return the product ``node`` (``rows`` x k times k x n) in 8 or 4 bits, where the recipe has it so.

    ``loads``: the rows of each expert, which all have a W. ``first``: no other product before it has read, and cast,
    the same input.
    """
    recipe = shapes.product_recipe
    if recipe is None or not is_in_low_precision(recipe, name, n, k):
        return node
    experts = len(loads) or 1
    elements = {"x": rows * k, "w": experts * n * k, "y": rows * n}
    sizes = {tensor: float(shapes.element * count) for tensor, count in elements.items()}
    saved = node.saved_for_weights[0].name
    cast = _Casts(shapes, name, sizes, {"x": k, "w": k, "y": n}, loads if recipe.casts_each_expert else (), experts)
    inputs = cast("F", "input", "x", recipe.input_forward) if first else ()
    weights = cast("F", "weight", "w", recipe.weight_forward) if shapes.casts_weights else ()
    turned_weight = cast("B", "weight", "w", recipe.weight_backward)
    if shapes.gathers_in_8_bits:
        weights, turned_weight = (), cast("B", "weight", "w", (TURNED_AS_GATHERED,))
    gradient, gradient_again = _gradients(recipe, cast, name)
    turned_input = _inputs_again(shapes, recipe, cast, saved, first=first)
    converted_each = _conversion(recipe, shapes.dtype, cast)
    before_wgrad: Ops = (*gradient_again, *turned_input)
    together = converted_each(node.together)
    kept, kept_for_weights = (
        _kept(shapes, recipe, tensors, name, first=first) for tensors in (node.saved, node.saved_for_weights)
    )
    return replace(
        node,
        forward=(*inputs, *weights, *converted_each(node.forward)),
        input_grad=(*gradient, *turned_weight, *converted_each(node.input_grad)),
        weight_grad=(*before_wgrad, *converted_each(node.weight_grad)),
        together=(*gradient, *turned_weight, *before_wgrad, *together) if together else (),
        saved=kept,
        saved_for_weights=kept_for_weights,
        grad_bytes=node.grad_bytes + _copied(shapes, recipe, elements),
        weights=tuple(
            replace(weight, in_low_precision=True, gathered_in_8_bits=shapes.gathers_in_8_bits)
            if weight.gradient_product and len(weight.shape) > 1
            else weight
            for weight in node.weights
        ),
    )


def is_in_low_precision(recipe: ProductRecipe, name: str, *sizes: int) -> bool:
    """Return True for products of layers with sizes that the matrix units take; experts' where the recipe has them."""
    block = name.partition(".")[0]
    if block in LEFT_OUT or (block == "moe" and not recipe.experts):
        return False
    return all(size % recipe.multiple == 0 for size in sizes)


def casts_weights_once(workload: Workload) -> bool:
    """Return True where the first micro-batch of a step casts weights for all."""
    recipe = workload.training.product_recipe
    return recipe is not None and recipe.weights_once


def weight_copy_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of the copies in 8 or 4 bits that stay beside ``weights``."""
    recipe = workload.training.product_recipe
    if recipe is None or not keeps_weight_copies(workload):
        return 0.0
    elements = sum(weight.elements for weight in weights if weight.in_low_precision and weight.is_stored)
    return recipe.weight_copies * recipe.copy_bytes * elements


class _Casts:
    """Makes the kernels around the product ``name``.

    ``sizes``: bytes of its x, W and y in working precision. ``widths``: elements of a row of each. ``loads``: rows of
    experts whose parts of x and y are cast one after another, in one call. ``weights``: how many W there are, each cast
    by a call.
    """

    def __init__(
        self,
        shapes: FrameworkShapes,
        name: str,
        sizes: Mapping[str, float],
        widths: Mapping[str, int],
        loads: Sequence[int] = (),
        weights: int = 1,
    ) -> None:
        self._shapes, self._name, self._sizes, self._widths = shapes, name, sizes, widths
        rows = sum(loads)
        self._shares = [load / rows for load in loads if load] or [1.0]
        self._weight_shares = [1 / weights] * weights

    def __call__(self, phase: str, what: str, tensor: str, kernels: Iterable[CastKernel]) -> Ops:
        kernels = tuple(kernels)
        shares = self._weight_shares if tensor == "w" else self._shares
        casts = tuple(self._kernel(phase, what, tensor, one, share) for share in shares for one in kernels)
        if tensor == "w":
            return casts
        within = (replace(op, within_call=True) for op in casts[len(kernels) :])
        return (*casts[: len(kernels)], *within)

    def _kernel(self, phase: str, what: str, tensor: str, one: CastKernel, share: float) -> Compute:
        """Return a kernel that casts a ``share`` of the tensor."""
        nbytes = share * self._sizes[tensor]
        name = " ".join(filter(None, (self._name, what, one.name)))
        read, written = one.read * nbytes, one.written * nbytes
        return memory(phase, name, one.op, read, written, self._shapes.dtype, self._widths[tensor])


def _gradients(recipe: ProductRecipe, cast: _Casts, name: str) -> tuple[Ops, Ops]:
    """Return the casts of dy before the products for dx and for dW; those of an activation's are part of its own."""
    if recipe.activation_backward and name.rpartition(".")[2] in ("fc1", "gate", "up"):
        return (), ()
    return cast("B", "grad", "y", recipe.gradient), cast("W", "grad", "y", recipe.gradient_again)


def _inputs_again(shapes: FrameworkShapes, recipe: ProductRecipe, cast: _Casts, saved: str, *, first: bool) -> Ops:
    """Return the casts of x before the product for dW, with the norm that makes x again."""
    if not first or (recipe.activation_backward and saved.endswith(MADE_BY_ACTIVATION)):
        return ()
    casts = cast("W", "input", "x", recipe.input_backward)
    if not recipe.keeps_input_copy and saved.endswith(MADE_BY_NORM):
        again = CastKernel("normed again", "norm" if shapes.norm == "layernorm" else "rms_norm", 1, 1)
        casts = (*cast("W", "input", "x", (again,)), *casts)
    return casts


def _kept(
    shapes: FrameworkShapes, recipe: ProductRecipe, tensors: tuple[Tensor, ...], name: str, *, first: bool
) -> tuple[Tensor, ...]:
    """Return what is kept of the product's input, the first of ``tensors``: the copy of the product that casts it."""
    x, *rest = tensors
    if not recipe.keeps_input_copy and x.name.endswith((MADE_BY_ACTIVATION, MADE_BY_NORM)):
        return tuple(rest)
    if not recipe.keeps_input_copy:
        return tensors
    if not first:
        return tuple(rest)
    return (Tensor(f"{name} input in {recipe.bits} bits", recipe.copy_bytes * x.nbytes / shapes.element), *rest)


def _copied(shapes: FrameworkShapes, recipe: ProductRecipe, elements: Mapping[str, int]) -> float:
    """Return the bytes of the copies in 8 or 4 bits that the backward pass makes: of x and W, and two of dy.

    Those that are kept since the forward pass are no others.
    """
    x = 0 if recipe.keeps_input_copy else elements["x"]
    w = 0 if shapes.keeps_weight_copies else elements["w"]
    return recipe.copy_bytes * (x + w + 2 * elements["y"])


def _conversion(recipe: ProductRecipe, dtype: str, cast: _Casts) -> Callable[[Ops], Ops]:
    """Return a function that puts the products among operations into 8 or 4 bits, with what follows on their output."""
    outputs = {"fwd": ("F", "y"), "dgrad": ("B", "x"), "wgrad": ("W", "w")}

    def product(op: Compute) -> Compute:
        kernel = op.kernel
        if not isinstance(kernel, Matmul | GroupedMatmul) or kernel.role not in recipe.products:
            return op
        scaling = recipe.products[kernel.role]
        output = kernel.out_dtype or dtype
        return replace(op, kernel=replace(kernel, dtype=recipe.dtype, out_dtype=output, scaling=scaling))

    def converted(op: Op) -> Ops:
        match op:
            case Compute(kernel=Matmul(role=role) | GroupedMatmul(role=role)):
                phase, tensor = outputs[role]
                return (product(op), *cast(phase, f"{role} output", tensor, recipe.behind.get(role, ())))
            case Beside():
                return (replace(op, kernels=tuple(map(product, op.kernels))),)
            case _:
                return (op,)

    return lambda ops: tuple(new for op in ops for new in converted(op))


def activation_in_low_precision(shapes: FrameworkShapes, node: Node, name: str, nbytes: float) -> Node:
    """Return an activation whose output of ``nbytes`` and gradients are read in 8 bits, as the recipe has it.

    One kernel reads its inputs for magnitudes, one reads them again and writes all in 8 bits.
    """
    recipe = shapes.product_recipe
    if recipe is None or recipe.activation_backward is None or not is_in_low_precision(recipe, name, shapes.ffn):
        return node
    amax, written = recipe.activation_backward
    read, gradients = (3, 2) if shapes.gated else (2, 1)
    kernels: CastKernels = (
        CastKernel("bwd amax", amax, read, 0),
        CastKernel("bwd in 8 bits", written, read, gradients + 0.5),
    )
    return replace(node, input_grad=_Casts(shapes, name, {"x": nbytes}, {"x": shapes.ffn})("B", "", "x", kernels))
