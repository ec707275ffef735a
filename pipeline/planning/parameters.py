"""How many parameters a model has: what transformers writes into an index as `total_parameters`. Pure.

transformers counts them in the model; here headers tell. So what the source's own index says is the better figure, and
stays.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from reshard.pipeline.planning.model import TOTAL_PARAMETERS
from reshard.pipeline.planning.select import Selection
from reshard.pipeline.tensors import Checkpoint, Tensor

_FLOATS = ("F64", "F32", "F16", "BF16")
_NO_PARAMETERS = ("I64", "BOOL")  # they count, place and mask
# Floats that torch's norms, and models of transformers, keep as buffers.
_BUFFERS = frozenset({"running_mean", "running_var", "inv_freq", "masked_bias", "causal_mask", "final_logits_bias"})
_ENDINGS = (*_BUFFERS, "bias")


def total_parameters(checkpoint: Checkpoint, selection: Selection, dequantized: bool) -> dict[str, object]:
    """The key with its value; empty where headers do not tell it.

    That is so of quantized weights, where it hangs on their format, and of what other libraries load, which write none.
    """
    stated = checkpoint.index_metadata.get(TOTAL_PARAMETERS)
    if type(stated) is int and stated > 0 and not dequantized:
        return {TOTAL_PARAMETERS: stated}
    entries = selection.entries
    if checkpoint.name.stem != "model" or not {entry.as_dtype for entry in entries} <= {*_FLOATS, *_NO_PARAMETERS}:
        return {}
    again = set[str]()
    if selection.ties:
        ours = {entry.name for entry in entries}
        again = {name for tie in selection.ties for name in [name for name in tie if name in ours][1:]}
    floats = [entry.tensor for entry in entries if entry.as_dtype in _FLOATS]
    # Few names end so, and few shapes there are: neither is looked at for each of 500,000 tensors.
    kept = [t.shape for t in floats if t.name not in again and not (t.name.endswith(_ENDINGS) and _is_buffer(t))]
    return {TOTAL_PARAMETERS: sum(prod(shape) * count for shape, count in Counter(kept).items())}


def _is_buffer(tensor: Tensor) -> bool:
    name = tensor.name[tensor.name.rfind(".") + 1 :]
    return name in _BUFFERS or (name == "bias" and len(tensor.shape) == 4)  # GPT-2's causal mask was called so
