"""Layers of experts by JIT-compiled kernels (experts_code.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..codegen.compiler import bfloat16_sums, integer_products, registers
from ..sequence import Block, KernelList, Operand, Step, make_list
from .kernels import NAMES, flags, kernel

__all__ = ["ExpertWeights", "NativeExperts"]

_SHARE = 1 << 15
"""Least number of weights in a work item."""

_FEWEST = 4096
"""Least number of elements in a work item between the products."""


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix for each of E experts.

    Attributes:
        weight: `(E, N, K)`, without gaps; read in place. In low bits as in `NativeLinear`: `(E, N, K)` in 8 bits,
            `(E, N, K / 2)` in 4.
        bias: `(E, N)` of the same type, in low bits of the activations', or `None`.
        scales: low bits: E times those of `NativeLinear`, one expert's after another's.
        group: number of columns that share a scale under int4.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    group: int = 0

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return weight, bias and scales, as far as there are any."""
        return tuple(tensor for tensor in (self.weight, self.bias, self.scales) if tensor is not None)

    def have_kernels(self) -> bool:
        """Tell whether there are kernels for these."""
        return self.weight.ndim == 3 and all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.numel() > 0
            and tensor.device.type == "cpu"
            and tensor.dtype in NAMES
            and tensor.dtype is self.weight.dtype
            and tensor.is_contiguous()
            for tensor in self.tensors()
        )

    def kernel(self, by_input: bool, activation: torch.dtype) -> int:
        """Return the address of the kernel that multiplies with these.

        Args:
            by_input: whether they are stored as `(K, N)`.
            activation: type of inputs and outputs.
        """
        stored, name = NAMES.get(self.weight.dtype, "int8"), NAMES[activation]
        if by_input:
            return kernel("experts", "columns", stored, name, registers())
        if self.group:
            return kernel("experts", "int4", name, self.group, integer_products())
        if self.weight.dtype is torch.uint8:
            return kernel("experts", "int8", name)
        return kernel("experts", "grouped", stored, name, registers(), bfloat16_sums())


class NativeExperts:
    """A batch-invariant layer of experts: `(x (n, K), chosen (n, k), weights (n, k)) → (n, N)`.

    An expert computes W₂ · gate(W₁ x), with W₁ `(R, K)` and W₂ `(N, I)`. Only the chosen experts' weights are read.
    Numbers are rounded where transformers' `grouped_mm` rounds them; the outputs of a token's experts are summed in the
    order in which they were chosen. An expert that does not exist adds nothing.

    Args:
        up: W₁, gate and up one after the other where there are two.
        down: W₂.
        gate: `(S, R) → (S, I)`, each row separately; `None`: silu(gate) · up of the two halves.
        by_input: whether matrices are stored as `(K, R)` and `(I, N)`.
        activation: type of inputs and outputs; `None`: that of the weights, which are not in low bits.

    Attributes:
        activation: type of inputs and outputs.
        gate: as given.
        middle: I, the number of columns of W₂.
    """

    __name__ = "experts"  # in the generated code of a pass

    def __init__(
        self,
        up: ExpertWeights,
        down: ExpertWeights,
        gate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        by_input: bool = False,
        activation: torch.dtype | None = None,
    ) -> None:
        self.gate = gate
        self._experts = up.weight.shape[0]
        self.activation = activation or up.weight.dtype
        self._name = NAMES[self.activation]
        self._up, self._down = (_Matrices.of(one, by_input, self.activation) for one in (up, down))
        self.middle = self._down.columns
        self._lists: dict[Any, tuple[KernelList, ...]] = {}

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output.

        Args:
            x: `(n, K)`.
            chosen: `(n, k)` integers, the experts of each token.
            weights: `(n, k)`, of x's type or float32, to which others are cast.
        """
        tokens, slots = chosen.shape
        if weights.dtype is not self.activation:
            weights = weights.to(torch.float32)
        if not chosen.numel():
            return x.new_zeros((tokens, self._down.rows))
        key = tokens, slots, weights.dtype
        if key not in self._lists:
            self._lists[key] = self._made(*key)
        first, *second = self._lists[key]
        if not second:
            return first(None, x, chosen, weights)  # type: ignore[no-any-return]
        assert self.gate is not None
        opened, plan = first(None, x, chosen)
        return second[0](None, self.gate(opened), weights, plan)  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Hold the weights no longer: the caller of this layer holds them."""
        self._up.held = self._down.held = ()

    def _made(self, tokens: int, slots: int, kind: torch.dtype) -> tuple[KernelList, ...]:
        """Return the layer's lists of kernels: one, or two around a `gate` of torch's."""
        x, chosen = Block((tokens, self._up.columns), 0), Block((tokens, slots), 1, torch.int64)
        pass_ = _Pass(self._experts, self._name, tokens, slots)
        if self.gate is None:
            steps, result = self.steps(
                Operand(x), Operand(chosen), Operand(Block((tokens, slots), 2, kind)), tokens, slots
            )
            return (make_list(steps, [result], 3, tokens, self.activation),)
        opening, opened = self._opening(pass_, Operand(x), Operand(chosen))
        gated, weights = Block((tokens * slots, self.middle), 0), Block((tokens, slots), 1, kind)
        plan = Block(pass_.plan.shape, 2, torch.int64)
        closing, result = self._closing(_Pass(self._experts, self._name, tokens, slots, plan), gated, Operand(weights))
        return (
            make_list(opening, [opened, pass_.plan], 2, tokens, self.activation),
            make_list(closing, [result], 3, tokens, self.activation),
        )

    def steps(self, x: Operand, chosen: Operand, weights: Operand, tokens: int, slots: int) -> tuple[list[Step], Block]:
        """Return the kernels of the whole layer, and the block of its result; not with a `gate` of torch's.

        Args:
            x: `(n, K)`, without gaps.
            chosen: `(n, k)` 64-bit integers.
            weights: `(n, k)`.
            tokens: n.
            slots: k.
        """
        pass_ = _Pass(self._experts, self._name, tokens, slots)
        opening, opened = self._opening(pass_, x, chosen)
        gated = Block((pass_.pairs, self.middle))
        closing, result = self._closing(pass_, gated, weights)
        return [*opening, pass_.step("gate", [Operand(opened)], gated), *closing], result

    def _opening(self, pass_: _Pass, x: Operand, chosen: Operand) -> tuple[list[Step], Block]:
        """Return the kernels up to the product with W₁."""
        gathered = Block((pass_.pairs, self._up.columns))
        multiply, opened = self._multiply(pass_, self._up, gathered)
        return [pass_.sort(chosen), pass_.step("gather", [x], gathered), multiply], opened

    def _closing(self, pass_: _Pass, gated: Block, weights: Operand) -> tuple[list[Step], Block]:
        """Return the kernels from the product with W₂ on."""
        multiply, closed = self._multiply(pass_, self._down, gated)
        result = Block((pass_.tokens, self._down.rows))
        of_weights = NAMES[weights.block.dtype or self.activation]
        return [multiply, pass_.step("combine", [Operand(closed), weights], result, of_weights)], result

    def _multiply(self, pass_: _Pass, matrices: _Matrices, x: Block) -> tuple[Step, Block]:
        result = Block((pass_.pairs, matrices.rows))
        items = max(1, pass_.pairs * matrices.rows * matrices.columns // _SHARE)
        operands = [Operand(x), Operand(result, 0, True), Operand(pass_.plan)]
        fields: list[int | Operand] = [ctypes.addressof(matrices.record), *operands, *pass_.counts]
        return Step("experts", matrices.kernel, flags(items, matrices.per_thread), fields, matrices), result


@dataclass
class _Matrices:
    """Record of the first expert's matrix, which those of the others follow, the tensors that it points to, and kernel.

    `per_thread` is the number of work items for each thread.
    """

    record: Any
    held: tuple[torch.Tensor, ...]
    rows: int
    columns: int
    kernel: int
    per_thread: int

    @classmethod
    def of(cls, weights: ExpertWeights, by_input: bool, activation: torch.dtype) -> _Matrices:
        # Aliases: a parameter's own memory is freed when a thread replaces it, even while a kernel reads it.
        held = tuple(tensor.detach() for tensor in weights.tensors())
        rows, columns = weights.weight.shape[:0:-1] if by_input else weights.weight.shape[1:]
        columns = columns * 2 if weights.group else columns
        given = (weights.weight, weights.bias, weights.scales)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        # Long parts of rows are read faster; of packed ones, each item prepares x first.
        per_thread = 2 if by_input or weights.weight.dtype is torch.uint8 else 4
        record = (ctypes.c_int64 * 5)(*addresses, columns, rows)
        return cls(record, held, rows, columns, weights.kernel(by_input, activation), per_thread)


class _Pass:
    """Kernels of one layer and pass around its products; `plan` is theirs, or comes from outside.

    Args:
        experts: E.
        name: name of the activations' type.
        tokens: n.
        slots: k.
        plan: block of the plan, where other kernels made it.
    """

    def __init__(self, experts: int, name: str, tokens: int, slots: int, plan: Block | None = None) -> None:
        self.tokens, self.pairs = tokens, tokens * slots
        self.counts = [slots, experts]
        from .experts_code import plan_numbers  # needs llvmlite

        self.plan = plan or Block((plan_numbers(experts, self.pairs),), dtype=torch.int64)
        self._name = name

    def sort(self, chosen: Operand) -> Step:
        """Return the kernel that makes the plan."""
        fields: list[int | Operand] = [chosen, Operand(self.plan, 0, True), *self.counts]
        return Step("sort", kernel("experts", "sort", self._name), flags(), fields)

    def step(self, what: str, read: list[Operand], write: Block, *parts: str) -> Step:
        """Return another kernel of `experts_code`."""
        how = flags(max(1, write.count() // _FEWEST))
        fields: list[int | Operand] = [*read, Operand(write, 0, True), Operand(self.plan), *self.counts, write.shape[1]]
        return Step(what, kernel("experts", what, self._name, *parts), how, fields)
