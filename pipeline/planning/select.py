"""What of a checkpoint is written, under which name and dtype: all of it as it is, but for what was asked for. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from operator import attrgetter
from posixpath import dirname, join
from typing import Any

from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.prefixes import half_wrapped, unwrapped_name, unwrapped_names, wrappers_in
from reshard.pipeline.errors import BadExperts, PrefixUnused, RenameCollision, Unsupported
from reshard.pipeline.planning.experts import arranged
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.scales import MODELOPT, dequantised, plain_config
from reshard.pipeline.renaming import Rule, renamed
from reshard.pipeline.request import DType, Options
from reshard.pipeline.tensors import BLOCKS, DTYPE_BITS, Checkpoint, Tensor, rows_as
from reshard.pipeline.text import counted

# `--strip-prefix auto`: whatever wrappers the names themselves show.
AUTO = "auto"
# The floating kinds by the names that configs have for them.
_CONFIG_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Kinds that hold packed or scaled values wherever they are weights; I64 and BOOL count and mask.
_PACKED = (DTYPE_BITS.keys() | BLOCKS.keys()) - {"BOOL", "F16", "BF16", "F32", "F64", "C64", "I64", "U64"}
# Buffers that number positions or batches, in whatever integers: they make no model a quantised one.
_COUNTS = re.compile(r"(?:^|[._])(?:position_ids|token_type_ids|relative_position_index|num_batches_tracked|version)$")
# What GPTQ, AWQ, bitsandbytes, compressed-tensors and the fp8 formats call the values beside packed ones, as in
# `k_scale`, `weight_scale_inv`, `input_zero_point`, `SCB`; and optimum-quanto and VPTQ, which has code books.
_COMPANION = re.compile(
    r"(?:[._]scales?(?:_inv|_2)?|[._]zero_points?|[._]q?zeros|[._]absmax|[._]quant_map|\.SCB"
    r"|[._]_shift|[._](?:res_|outlier_)?centroids\.weight)$"
)
_CONFIG_DTYPE = re.compile(rf'("(?:torch_)?dtype"\s*:\s*")({"|".join(_CONFIG_DTYPES)})(")')


@cache
def cast_dtype(dtype: str, wanted: DType) -> str:
    """What a tensor of ``dtype`` becomes when a user asks for ``wanted``.

    Only F64, F32, BF16 and F16 are cast, and never to something wider: fp8, packed, integer and boolean tensors, and
    floats that are narrower than what was asked for, stay what they are.
    """
    if wanted == "keep" or dtype not in _CONFIG_DTYPES.values():
        return dtype
    target = _CONFIG_DTYPES[wanted]
    return target if DTYPE_BITS[target] <= DTYPE_BITS[dtype] else dtype


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries to write, and what else came of the wishes."""

    entries: tuple[Entry, ...]
    dropped: Mapping[str, str]  # tied name that is not written -> the name that keeps its bytes
    ties: tuple[tuple[str, ...], ...]  # the checkpoint's, by their new names
    notes: tuple[str, ...]
    scales: frozenset[str] = frozenset()  # what is not written because the weights are no longer quantised
    rules_used: Set[int] = frozenset()  # the numbers of the rules of --rename that changed a name
    rearranged: bool = False  # whether --experts made other tensors
    unwrapped: bool = False  # whether --strip-prefix changed a name

    def altered(self) -> set[str]:
        """The options that changed tensors."""
        did = {
            "dtype": any(as_dtype != tensor.dtype for tensor, as_dtype, scale in self.entries if scale is None),
            "dequantize": any(scale is not None for _, _, scale in self.entries),
            "ties": bool(self.dropped),
            "strip_prefix": self.unwrapped,
            "experts": self.rearranged,
            "rename": bool(self.rules_used),
        }
        return {name for name, done in did.items() if done}


def select(
    checkpoint: Checkpoint, options: Options, tied: Mapping[str, str], configs: Mapping[str, str] | None = None
) -> Selection:
    """The entries of ``checkpoint``; ``tied`` says of a model's parameters which one each shares its bytes with.

    ``configs`` are the texts, by path, that say how weights are quantised. Raises DuplicateTensor when two names become
    one without their prefixes, RenameCollision when they do by the rules, BadRename, BadExperts, NotDequantized,
    BadScale, and Unsupported for a name that no safetensors file can have.
    """
    tensors, ties, notes = _unwrapped(checkpoint, options)
    unwrapped = tensors is not checkpoint.tensors
    rearranged = False
    if options.experts != "keep":
        if options.dequantize:
            raise BadExperts(layer="the model", why="--dequantize changes their bytes; use it in a separate run")
        given, tensors = tensors, arranged(tensors, options.experts)
        if rearranged := tensors is not given:
            notes.append(f"--experts {options.experts}: {counted(len(given), 'tensor', 'becomes')} {len(tensors):,}")
    dropped: dict[str, str] = {}
    if options.ties == "source" and ties:
        dropped = {name: tied[name] for tie in ties for name in tie if tied.get(name) in tie and tied[name] != name}
        if not dropped:
            notes.append("all tied names are kept: the model's class does not say which one is the source")
    kept = [tensor for tensor in tensors if tensor.name not in dropped] if dropped else tensors
    notes += [f"{name} is not written: it is tied to {kept}" for name, kept in dropped.items()]
    scales: frozenset[str] = frozenset()
    if options.dequantize:
        as_dtype = None if options.dtype == "keep" else _CONFIG_DTYPES[options.dtype]
        texts = [(configs or {}).get(join(checkpoint.name.folder, name)) for name in ("config.json", MODELOPT)]
        plain = dequantised(kept, texts[0] or "", texts[1], as_dtype)
        entries, scales = plain.entries, plain.scales
        notes += plain.notes
    elif options.dtype == "keep":
        entries = tuple(rows_as(Entry, zip(kept, map(attrgetter("dtype"), kept), repeat(None))))
    else:
        fixed = quantised(tensors)
        wanted = [t.dtype if t.name in fixed else cast_dtype(t.dtype, options.dtype) for t in kept]
        entries = tuple(map(Entry, kept, wanted))
        notes += _cast_notes(entries, options.dtype, fixed)
    selection = Selection(
        entries, dropped, tuple(ties), tuple(notes), scales, rearranged=rearranged, unwrapped=unwrapped
    )
    if options.rename:
        selection = _renamed(selection, options.rename, str(checkpoint.name))
    if checkpoint.name.suffix == SUFFIX and "__metadata__" in map(attrgetter("tensor.name"), selection.entries):
        what = "a tensor named __metadata__, which headers have for their own texts"
        raise Unsupported(file=str(checkpoint.name), what=what)
    return selection


def _renamed(selection: Selection, rules: Sequence[Rule], checkpoint: str) -> Selection:
    """The same by other names, last of all: quantisers and the model's class know the old ones."""
    names = [*(entry.name for entry in selection.entries), *selection.dropped]
    new, changes = renamed(names, rules, checkpoint)
    for old, name in new.items():
        if name in selection.scales:  # which are read under their names, and told apart by them
            raise RenameCollision(tensor=name, first=name, second=old, checkpoint=checkpoint)
    told = [
        f"--rename {rule}: {count:,} of {len(names):,} names, for example {before} to {after}"
        for rule, (count, before, after) in zip(rules, changes, strict=True)
        if count
    ]
    return replace(
        selection,
        entries=tuple(e._replace(tensor=e.tensor._replace(name=new[e.name])) for e in selection.entries),
        dropped={new[name]: new[kept] for name, kept in selection.dropped.items()},
        ties=tuple(tuple(new.get(name, name) for name in tie) for tie in selection.ties),
        notes=(*selection.notes, *told),
        rules_used={number for number, change in enumerate(changes) if change.names},
    )


def followed(checkpoint: Checkpoint, options: Options, entries: Sequence[Entry]) -> Checkpoint:
    """The same with metadata whose ties have the names that ``entries`` have, without those that are not true of them.

    A tie is a name that is not stored, as key, and as value the tensor that has its bytes.
    """
    both = [*checkpoint.file_metadata.items(), *checkpoint.index_metadata.items()]
    said = [(key, to) for key, to in both if isinstance(to, str) and key != "format"]
    values = {to for _, to in said}
    tensors = {tensor.name for tensor in checkpoint.tensors if tensor.name in values} if said else ()
    ties = {tie for tie in said if tie[1] in tensors}
    if not ties:
        return checkpoint
    wrappers = _wrappers([tensor.name for tensor in checkpoint.tensors], options.strip_prefix)
    of, to = (_new_names({tie[n] for tie in ties}, wrappers, options, str(checkpoint.name)) for n in (0, 1))
    written = {entry.name for entry in entries}

    def follow(metadata: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in metadata.items():
            if not (isinstance(value, str) and (key, value) in ties):
                made[key] = value
            elif to[value] in written and of[key] not in written:
                made.setdefault(of[key], to[value])
        return made

    return replace(
        checkpoint,
        file_metadata=follow(checkpoint.file_metadata),
        index_metadata=follow(checkpoint.index_metadata),
    )


def _new_names(names: Set[str], wrappers: Sequence[str], options: Options, checkpoint: str) -> dict[str, str]:
    plain = {name: unwrapped_name(name, wrappers) for name in sorted(names)}
    new, _ = renamed(dict.fromkeys(plain.values()), options.rename, checkpoint)
    return {name: new[plain[name]] for name in plain}


def check_prefix(checkpoints: Sequence[Checkpoint], prefix: str | None) -> None:
    """Raises PrefixUnused for one that no name of any checkpoint has; ``auto`` may find none."""
    if prefix is None or prefix == AUTO:
        return
    if not any(unwrapped_name(t.name, [prefix]) != t.name for checkpoint in checkpoints for t in checkpoint.tensors):
        raise PrefixUnused(prefix=prefix or "''")


def _unwrapped(
    checkpoint: Checkpoint, options: Options
) -> tuple[Sequence[Tensor], Sequence[tuple[str, ...]], list[str]]:
    names = [tensor.name for tensor in checkpoint.tensors]
    if options.strip_prefix is None:
        shown = wrappers_in(names)
        notes = (
            [f"names have a wrapper prefix ({', '.join(shown)}); remove it with --strip-prefix auto"] if shown else []
        )
        return checkpoint.tensors, checkpoint.ties, notes
    wrappers = _wrappers(names, options.strip_prefix)
    new = unwrapped_names(names, wrappers, str(checkpoint.name))
    changed = sum(1 for old in names if new[old] != old)
    tensors: Sequence[Tensor] = checkpoint.tensors
    if changed:
        tensors = [tensor._replace(name=new[tensor.name]) for tensor in checkpoint.tensors]
    ties = [tuple(new[name] for name in tie) for tie in checkpoint.ties]
    notes = [f"removed {', '.join(wrappers)} from {changed} of {len(names)} names"] if wrappers else []
    if not wrappers and (half := half_wrapped(names, least=1)):
        notes = [f"no prefix removed: {half[0]} has a wrapper prefix, {half[1]} has none; use --strip-prefix PREFIX"]
    return tensors, ties, notes


def _wrappers(names: Sequence[str], prefix: str | None) -> tuple[str, ...]:
    """What --strip-prefix removes of these names."""
    return wrappers_in(names) if prefix == AUTO else () if prefix is None else (prefix,)


def quantised(tensors: Sequence[Tensor]) -> set[str]:
    """The names of packed tensors and of what belongs to them: scales, zero points, code books, biases.

    A cast of those would change what the packed values stand for. They are known by lying in the same module as a
    packed tensor, by a name that goes on from its name, or by the names that quantisers give them anywhere.
    """
    packed = {tensor.name for tensor in tensors if tensor.dtype in _PACKED and not _COUNTS.search(tensor.name)}
    if not packed:
        return set()
    modules = {_module(name) for name in packed}
    return packed | {
        tensor.name
        for tensor in tensors
        if _module(tensor.name) in modules or _module(tensor.name) in packed or _COMPANION.search(tensor.name)
    }


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _cast_notes(entries: Sequence[Entry], wanted: DType, fixed: Set[str]) -> list[str]:
    cast = Counter(f"{e.tensor.dtype} to {e.as_dtype}" for e in entries if e.cast)
    target = cast_dtype("F64", wanted)
    stays = [e for e in entries if not e.cast and e.tensor.dtype != target]
    # Of what stays, those that would have been cast if they belonged to no packed tensor.
    companions = {e.name for e in stays if e.name in fixed and cast_dtype(e.tensor.dtype, wanted) != e.tensor.dtype}
    kept = Counter((e.tensor.dtype, e.name in companions) for e in stays)
    notes = [counted(n, "tensor", f"is cast from {how}") for how, n in sorted(cast.items())]
    for (dtype, companion), n in sorted(kept.items()):
        notes.append(counted(n, f"{dtype} tensor", f"is not cast{' (part of packed weights)' if companion else ''}"))
    return notes


def edited_config(path: str, text: str, options: Options, listing: Container[str]) -> str:
    """A config.json that follows the weights; nothing else of the text changes."""
    if options.dequantize:
        return plain_config(text, options.dtype, join(dirname(path), MODELOPT) in listing)
    names = {dtype: name for name, dtype in _CONFIG_DTYPES.items()}

    def follow(match: re.Match[str]) -> str:
        return f"{match[1]}{names[cast_dtype(_CONFIG_DTYPES[match[2]], options.dtype)]}{match[3]}"

    return _CONFIG_DTYPE.sub(follow, text)
