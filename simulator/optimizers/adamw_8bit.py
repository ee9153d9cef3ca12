"""AdamW with states in 8 bits, quantised by blocks of 256 elements with a scale each (arXiv 2110.02861).

Tensors of fewer than 4,096 elements keep states in fp32 in both libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.optimizers.update import (
    Implementation,
    Kernels,
    TensorStateBytes,
    UpdatedTensor,
    UpdateKernels,
    UpdateRule,
    UpdateTypes,
    largest,
    no_bytes,
    tensor_kernels,
    total_elements,
)
from simulator.program import Compute
from simulator.units import DTYPE_BYTES

#: Elements that share a scale (bitsandbytes/optim/optimizer.py, ``init_state``; torchao/optim/adam.py, ``block_size``).
BLOCK = 256
#: Elements from which on states are quantised (``min_8bit_size``; ``_new_buffer`` of torchao).
FEWEST = 4096
SCALE, FULL = DTYPE_BYTES["fp32"], DTYPE_BYTES["fp32"]
#: Bytes of an element with its part of the scale.
QUANTIZED = 1 + SCALE / BLOCK
#: Entries of the table of values that 8 bits stand for, in fp32.
TABLE_BYTES = 256 * DTYPE_BYTES["fp32"]


def is_quantized(parameter: UpdatedTensor) -> bool:
    """True where the states of a tensor are kept in 8 bits."""
    return parameter.elements >= FEWEST


def quantized_states(count: int, *, tables: bool = False) -> TensorStateBytes:
    """Return a count of bytes for ``count`` states, with ``tables`` of values for every tensor or shared by all."""

    def state_bytes(parameter: UpdatedTensor, types: UpdateTypes) -> float:
        if not is_quantized(parameter):
            return count * FULL * parameter.elements
        return count * (QUANTIZED * parameter.elements + (TABLE_BYTES if tables else 0))

    return state_bytes


def blockwise(name: str, states: int, op: str, full: str) -> UpdateKernels:
    """Return the round of one kernel a tensor that reads and writes ``states`` in blocks, of class ``op``.

    Small tensors have kernels of class ``full``, on states in fp32.
    """

    def kernels(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
        small = [parameter for parameter in parameters if not is_quantized(parameter)]
        large = [parameter for parameter in parameters if is_quantized(parameter)]
        both = ((large, states * QUANTIZED, op), (small, states * FULL, full))
        return tuple(_kernel(name, some, types, "wg", state, "w", state, kind) for some, state, kind in both if some)

    return kernels


def _compiled(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
    """Return the two kernels that Inductor makes of ``single_param_adam`` for a tensor (torchao/optim/adam.py).

    The first finds the scales of the new states. The second computes these again, finds their values in the table and
    updates the weight.
    """
    scales = 2 * SCALE / BLOCK
    return (
        _kernel("scales", parameters, types, "g", 2 * QUANTIZED, "", scales, "ao_adam_8bit"),
        _kernel("adam", parameters, types, "wg", 2 * QUANTIZED, "w", 2 * QUANTIZED, "ao_adam_8bit"),
    )


def _kernel(
    name: str,
    parameters: Sequence[UpdatedTensor],
    types: UpdateTypes,
    read: str,
    states_read: float,
    written: str,
    states_written: float,
    op: str,
) -> Compute:
    """Return a kernel a tensor over the operands ``read`` and ``written`` and so many bytes of states per element."""
    count = total_elements(parameters)
    read_bytes = (types.operand_bytes(read) + states_read) * count
    written_bytes = (types.operand_bytes(written) + states_written) * count
    return tensor_kernels(name, op, read_bytes, written_bytes, count, len(parameters))


def _new_states(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> float:
    """Return the bytes of both states of the largest tensor before they are quantised."""
    return 2 * (FULL + SCALE / BLOCK) * largest(parameters)


OPTIMIZER = UpdateRule(
    "adamw_8bit",
    {
        "bitsandbytes": Implementation(
            # csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise
            (blockwise("adam", 2, "bnb_adam_8bit", "bnb_adam"),),
            quantized_states(2),
            no_bytes,
            ("int8",),
            pages=True,
        ),
        "torchao": Implementation(
            (_compiled,),
            quantized_states(2, tables=True),
            _new_states,
            ("int8",),
        ),
    },
)
