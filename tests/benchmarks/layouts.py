"""What readers gain by a cut that is made for them: bytes and files, counted from headers alone, so on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from reshard.pipeline.limits import GB, KIB
from reshard.pipeline.planning.layout import Laid, misaligned, read_by, to_be
from reshard.pipeline.planning.readers import Readers
from reshard.pipeline.tensors import Name
from tests.benchmarks.figures import Figure
from tests.benchmarks.scale import Scale
from tests.pipeline.planning.builders import opened_named, plan_of
from tests.pipeline.planning.shapes import Shapes, llama_3_8b, qwen_2_5_7b
from tests.support.giants import deepseek_v3_fp8

SIZE = 5 * GB  # of a file
NODE = 8  # ranks that share one disk
LEAST = 5  # layers of DeepSeek-V3, of which the first three have no experts


def layouts(folder: Path, scale: Scale) -> Iterator[Figure]:
    """The published shapes of three models, cut for ranks and for pages; ``folder`` stays empty."""
    deepseek: Shapes = {name: (dtype, shape) for name, dtype, shape in deepseek_v3_fp8(max(scale.layers, LEAST))}
    source = opened_named(deepseek, file_of=4_300_000_000)
    plain = to_be(plan_of(source, size=SIZE))
    for ranks, node in (("ep8", 1), ("ep32", NODE)):
        cut = to_be(plan_of(source, size=SIZE, ranks=ranks))
        who = f"a node with {node} ranks of {ranks}" if node > 1 else f"a rank of {ranks}"
        before, after = (_most(layout, ranks, node) for layout in (plain, cut))
        yield Figure(f"DeepSeek-V3 plain: {who} reads, to needs", before, "x", 1, "report")
        yield Figure(f"DeepSeek-V3 --for {ranks}: {who} reads, to needs", after, "x", 1.05, "must")
        yield Figure(f"DeepSeek-V3 --for {ranks}: files, to plain", len(cut) / len(plain), "x", 1.3, "must")
    for name, shapes in (("DeepSeek-V3", deepseek), ("Llama 3 8B", llama_3_8b()), ("Qwen 2.5 7B", qwen_2_5_7b())):
        opened = opened_named(shapes, file_of=4_300_000_000)
        plain, padded = (to_be(plan_of(opened, size=SIZE, align=align)) for align in (8, 4096))
        off = next(one.bytes for one in misaligned(padded) if one.rule == "4096")
        yield Figure(f"{name} --align 4096: bytes off pages", 100 * off / _bytes(padded), "%", 1, "must")
        added = (_bytes(padded) - _bytes(plain)) / len(padded)
        yield Figure(f"{name} --align 4096: added to each file", added / KIB, "KiB", 4, "must")


def _bytes(files: list[Laid]) -> int:
    return sum(file.size for file in files)


def _most(files: list[Laid], typed: str, node: int) -> float:
    """Bytes read per byte needed, of the ranks, or nodes of so many, that read most."""
    found, _ = read_by(files, Readers.of(typed), {Name("", "model"): 61})
    everyone = {tensor for file in files for tensor in file.tensors}
    sizes = {file.path: file.size for file in files}
    # What all ranks need, once for each node: all that is needed together, but for each rank's own.
    total = sum(tensor.size for tensor in everyone)
    common = (sum(one.needed for one in found) - total) / (len(found) - 1)
    ratios = []
    for first in range(0, len(found), node):
        ranks = found[first : first + node]
        read = sum(sizes[path] for path in {path for one in ranks for path in one.files})
        ratios.append(read / (common + sum(one.needed - common for one in ranks)))
    return max(ratios)
