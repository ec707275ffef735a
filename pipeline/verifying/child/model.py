"""Loading on the meta device: what transformers' own loader says to a checkpoint's headers, without one weight byte.

Imported only by `server`, which forks, sets limits and calls ``check``: a config is data from a stranger,
and building its class runs a hundred thousand lines that were not written for strangers' data.

Meta tensors made from headers go to ``from_pretrained`` as ``state_dict``, so the loader's renaming, fusing and tying
run as they would on the weights. The loader does not prove completeness: it says nothing of dtypes, of keys that
the class ignores, or of the index; and honest checkpoints are often not clean. So the verdict is a difference: its
report on the output must be its report on the source, and where names were changed, no worse than that on the source
under its own names. Where a lent config's class finds hardly any of its tensors, that both are alike shows nothing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from reshard.pipeline.checkpoint.formats.torch_names import DTYPES
from reshard.pipeline.limits import REPORT_NAMES_MAX
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.named import NotChecked, named, no_class, parsed

Specs = Mapping[str, tuple[str, list[int]]]

# The format's dtypes as torch knows them; F6 it does not have.
TORCH_DTYPES = {ours: name for name, ours in DTYPES.items()}

# What a config may say that makes the loader fetch code or files, wherever in the config it stands.
UNSAFE_KEYS = frozenset((
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
    "_experts_implementation", "_experts_implementation_internal", "auto_map", "_name_or_path", "name_or_path",
    "transformers_weights", "kernel_config", "use_kernels", "fusion_config", "distributed_config",
))  # fmt: skip

# How every model is loaded: with the loader's report, by transformers' own code, and from here.
LOADING: dict[str, Any] = {
    "output_loading_info": True,
    "dtype": "auto",
    "attn_implementation": "eager",
    "trust_remote_code": False,
    "local_files_only": True,
}

# Quantisation methods whose load on meta was seen to tell right from wrong, and the packages that it needs.
# The others either cannot be built without a GPU or were never tried; guessing would give false verdicts.
QUANTIZED: dict[str, tuple[str, ...]] = {
    "fp8": (),
    "mxfp4": (),
    "compressed-tensors": ("compressed_tensors",),
    "bitsandbytes_8bit": ("bitsandbytes",),
}


class Report(NamedTuple):
    """The loader's report on one side."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def check(
    config: str | None,
    source: Specs,
    output: Specs | None,
    scratch: Path,
    own: Mapping[str, Any] | None = None,
    lent: bool = False,
) -> dict[str, Any]:
    """The verdict as ``ModelCheck`` wants it; ``output`` None: both have equal headers. Raises NotChecked.

    ``own``: the source before options changed its names, as `meta_load.Own` has it. ``lent``: the config came from
    elsewhere, so it may be another model's.
    """
    model_class, model_config, notes = resolve(config, scratch)
    expected, model = load_report(model_class, model_config, source)
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    stored = source if output is None else output
    twice = _stored_twice(model, stored, ties)
    verdict = {
        "level": "model",
        "class_name": model_class.__name__,
        "ties": ties,
        "stored_twice": twice,
        "notes": [*notes, *_notes(model, stored, twice)],
    }
    try:
        report = expected
        if output is not None:
            lost = source.keys() - output.keys() - {*ties, *ties.values(), *expected.unexpected}
            # Some of them the loader is told not to miss: a class may do without whole submodels.
            lost = {*_matching(model, "_keys_to_ignore_on_load_missing", lost)}
            report = load_report(model_class, model_config, output)[0]
            report = report._replace(missing=tuple(sorted({*report.missing, *lost})))
    except NotChecked as why:
        if why.result == "inconclusive":
            raise
        return {**verdict, "result": "failed", "reason": f"the source loads, but the output does not: {why}"}
    counts = {field: len(names) for field, names in report._asdict().items()}
    verdict |= {field: names[:REPORT_NAMES_MAX] for field, names in report._asdict().items()} | {"counts": counts}
    if report != expected:
        return {**verdict, "result": "failed", "reason": _difference(expected, report)}
    if not any(report):
        return {**verdict, "result": "clean", "reason": f"{model_class.__name__} accepts all tensors, none missing"}
    undecided = {**verdict, "result": "inconclusive", "level": "structural"}
    if lent and (hollow := _hollow(model, report)):
        return {**undecided, "reason": f"{model_class.__name__} {hollow}"}
    listed = ", ".join(f"{count} {field}" for field, count in counts.items() if count)
    told = "reports the same for output and source"
    if own is not None:
        try:
            worse = _worse(report, _own_report(own, scratch), _origins(model, own["origins"]))
        except NotChecked as why:
            reason = f"{model_class.__name__} reports {_counted(report)}, but cannot be compared with the source: {why}"
            return {**undecided, "reason": reason}
        if any(worse):
            reason = f"{model_class.__name__} accepts less of the output than of the source: {_counted(worse)}"
            return {**undecided, "reason": reason}
        told = "reports no more for the output than for the source"
    return {**verdict, "result": "report", "reason": f"{model_class.__name__} {told}: {listed}"}


# ---------------------------------------------------------------------------------------------------- class and config


def resolve(config: str | None, scratch: Path) -> tuple[type[PreTrainedModel], Any, list[str]]:
    """The model class that the config names, its config object, and notes; raises NotChecked.

    The class is one of transformers' own or none: code in the repository is never read, let alone run. The
    cleaned config is written to ``scratch``, because the loader's own reader of configs takes a folder.
    """
    raw = parsed(config)
    model_class = _class_of(raw)
    _check_quantization(raw)
    notes = []
    if "auto_map" in raw:
        notes.append("the config refers to code in the repository (auto_map); transformers' own class was used instead")
    (scratch / "config.json").write_text(json.dumps(cleaned(raw)))
    try:
        model_config = model_class.config_class.from_pretrained(scratch, local_files_only=True)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        raise NotChecked(f"{model_class.__name__} rejects the config: {_line(error)}", "inconclusive") from error
    return model_class, model_config, notes


def cleaned(value: Any) -> Any:
    """``value`` of a config's JSON without the keys by which it could make a loader fetch code or files."""
    if isinstance(value, dict):
        return {key: cleaned(inner) for key, inner in value.items() if key not in UNSAFE_KEYS}
    if isinstance(value, list):
        return [cleaned(inner) for inner in value]
    return value


def _class_of(raw: dict[str, Any]) -> type[PreTrainedModel]:
    model_type = raw.get("model_type")
    name = named(raw) or _base_class(str(model_type))
    try:
        found: Any = getattr(transformers, name, None)
    except ImportError as error:
        raise NotChecked(f"{name} needs a package that is not installed: {_line(error)}") from error
    if not is_model_class(found):
        where = "; it is code in the repository, which is never run" if "auto_map" in raw else ""
        raise NotChecked(f"{name} is not a model class in transformers {transformers.__version__}{where}")
    declared = found.config_class.model_type
    if model_type is not None and model_type != declared:
        its = f"its model_type is {model_type!r:.100}"
        raise NotChecked(f"config.json has class {name}, which is for {declared}, but {its}")
    model_class: type[PreTrainedModel] = found
    return model_class


def _base_class(model_type: str) -> str:
    """The class that transformers takes where a config names none; raises NotChecked where it takes none."""
    if model_type not in transformers.CONFIG_MAPPING:
        raise no_class()
    try:
        found = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    except KeyError:
        raise no_class(f", and {model_type} has none by default") from None
    # Of several, AutoModel takes the first.
    name: str = (found[0] if isinstance(found, (tuple, list)) else found).__name__
    return name


def is_model_class(found: object) -> bool:
    """Whether this is one of the model classes that transformers itself defines."""
    return (
        isinstance(found, type)
        and issubclass(found, PreTrainedModel)
        and found.__module__.startswith("transformers.models.")
        and getattr(found, "config_class", None) is not None
    )


# -------------------------------------------------------------------------------------------------------- quantisation


def _check_quantization(raw: dict[str, Any]) -> None:
    """Raises NotChecked unless the method is one that was seen to work here."""
    if not (quantization := _quantization(raw)):
        return
    if not isinstance(quantization, dict):
        raise NotChecked("quantization_config is not a JSON object")
    method = quantization_method(raw)
    if method == "bitsandbytes_4bit":
        # Its quant_state is JSON inside a tensor, which does not exist on meta: an honest checkpoint would fail.
        raise NotChecked("bitsandbytes 4-bit weights cannot be checked without the bytes of their tensors")
    if not isinstance(method, str) or method not in QUANTIZED:
        raise NotChecked(f"weights quantized by {method!r:.100} cannot be checked: the method is untested")
    if lacking := [package for package in QUANTIZED[method] if find_spec(package) is None]:
        packages = " ".join(package.replace("_", "-") for package in lacking)
        raise NotChecked(f"checking weights quantized by {method} requires `pip install {packages}`")


def quantization_method(raw: Mapping[str, Any]) -> object:
    """What a config calls the way in which its weights are quantised; None where they are not, or it does not say."""
    quantization = _quantization(raw)
    if not isinstance(quantization, dict):
        return None
    for bits in ("4bit", "8bit"):
        if quantization.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return quantization.get("quant_method")


def _quantization(raw: Mapping[str, Any]) -> object:
    inner = raw.get("text_config")
    return raw.get("quantization_config") or (isinstance(inner, dict) and inner.get("quantization_config")) or None


def build_fp8_without_gpu() -> None:
    """Keep fp8 layers fp8 where there is no GPU; for a process that never computes with them.

    Without a GPU the quantizer silently switches to dequantising, whose loader accepts checkpoints with lost scales
    and refuses honest ones of DeepSeek-V3's shapes. The one private name that reshard changes in another library.
    """
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None


# ---------------------------------------------------------------------------------------------------------- the report


def load_report(model_class: type[PreTrainedModel], config: Any, specs: Specs) -> tuple[Report, Any]:
    """What the loader says to tensors of these names, dtypes and shapes; and the model, on meta, if it was built."""
    state = {name: _meta_tensor(name, dtype, shape) for name, (dtype, shape) in specs.items()}
    if not state:
        raise NotChecked("no tensors to check")
    build_fp8_without_gpu()
    tables = _LoaderTables()
    logging.getLogger("transformers.modeling_utils").addHandler(tables)
    try:
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            device_map="meta",
            ignore_mismatched_sizes=True,
            **LOADING,
        )
    except ImportError as error:
        raise NotChecked(f"{model_class.__name__} needs a package that is not installed: {_line(error)}") from error
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        # The loader raises when tensors cannot be fused into the class's own; which ones, only its log says.
        rows = _rows(tables.last or "")
        if not any("CONVERSION" in row for row in rows):
            reason = f"{model_class.__name__} cannot be built: {_line(error)}"
            raise NotChecked(reason, "inconclusive") from error
        return Report(errors=tuple(rows)), None
    finally:
        logging.getLogger("transformers.modeling_utils").removeHandler(tables)
    mismatched = (f"{name}: {list(has)} stored, {list(wants)} expected" for name, has, wants in info["mismatched_keys"])
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    return Report(tuple(missing), tuple(unexpected), tuple(sorted(mismatched))), model


class _LoaderTables(logging.Handler):
    """Keeps the last load report that the loader logged, which it makes only when something is wrong."""

    last: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            self.last = text


def _rows(table: str) -> list[str]:
    """The rows of the loader's table, without colours, padding and the notes below it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table).split("\n\nNotes:")[0]
    rows = [re.sub(r"\s*\|\s*", " ", line).strip() for line in plain.splitlines()]
    return sorted(row for row in rows if re.search(r"\b(MISSING|UNEXPECTED|MISMATCH|CONVERSION)\b", row))


def _meta_tensor(name: str, dtype: str, shape: list[int]) -> torch.Tensor:
    known: torch.dtype | None = getattr(torch, TORCH_DTYPES.get(dtype, ""), None)
    if known is None:
        raise NotChecked(f"{name} is {dtype}, which this version of torch does not support")
    if dtype == "F4":
        # torch counts pairs: two 4-bit values are one element.
        if not shape or shape[-1] % 2:
            raise NotChecked(f"{name} is {dtype}{shape}, an odd number of 4-bit values")
        shape = [*shape[:-1], shape[-1] // 2]
    return torch.empty(shape, dtype=known, device="meta")


def _stored_twice(model: Any, specs: Specs, ties: Mapping[str, str]) -> dict[str, str]:
    """Stored name -> another one, where the class has both share their bytes."""
    if not ties:
        return {}
    stored = {parameter: name for name, parameter in parameters_of(model, specs).items()}
    return {stored[target]: stored[source] for target, source in ties.items() if target in stored and source in stored}


def parameters_of(model: Any, specs: Specs) -> dict[str, str]:
    """Each stored tensor's parameter of the model, by the loader's own renaming; without those it has no place for."""
    state = model.state_dict()
    found = {}
    for name, renamed in _by_loader(model, state, specs).items():
        if renamed not in state and name in state:
            renamed = name
        if renamed in state:
            found[name] = renamed
    return found


def _by_loader(model: Any, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """What the loader calls each of them, in its report as well."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, state)[0] for name in names}


def _notes(model: Any, specs: Specs, twice: Mapping[str, str]) -> list[str]:
    notes = []
    if both := [f"{target} = {source}" for target, source in twice.items()]:
        notes.append(f"tied by the class and stored twice: {_few(both)}")
    if ignored := _matching(model, "_keys_to_ignore_on_load_unexpected", specs):
        built = model.state_dict().keys()
        if names := [name for name in ignored if name not in built]:
            notes.append(f"{counted(len(names), 'tensor', 'is')} neither required nor used by the class: {_few(names)}")
    return notes


def _matching(model: Any, attribute: str, names: Iterable[str]) -> list[str]:
    """The names that one of the class's lists of patterns is about."""
    patterns = getattr(model, attribute, None) or ()
    if not patterns:
        return []
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return [name for name in names if ignored.search(name)]


def _difference(expected: Report, report: Report) -> str:
    if conversions := [row for row in report.errors if "CONVERSION" in row and row not in expected.errors]:
        # The loader stopped at these and had nothing more to say.
        return f"cannot be converted in the output: {_few(conversions)}"
    parts = []
    for field, before, after in zip(Report._fields, expected, report, strict=True):
        if new := [text for text in after if text not in set(before)]:
            parts.append(f"{field} only in the output: {_few(new)}")
        if gone := [text for text in before if text not in set(after)]:
            parts.append(f"{field} only in the source: {_few(gone)}")
    return "; ".join(parts)


def _hollow(model: Any, report: Report) -> str:
    """What is said of a class that would not find half of its tensors; "" where it finds them."""
    if model is None:  # the loader stopped at a few tensors that it cannot fuse, and counted nothing
        return ""
    wanted = model.state_dict().keys() - (getattr(model, "all_tied_weights_keys", None) or {}).keys()
    found = len(wanted - _lacking(report))
    return "" if 2 * found >= len(wanted) else f"finds only {found} of its {len(wanted)} tensors: {_counted(report)}"


def _own_report(own: Mapping[str, Any], scratch: Path) -> Report:
    """What the loader says to the source as it is; raises NotChecked."""
    model_class, model_config, _ = resolve(own["config"], scratch)
    return load_report(model_class, model_config, own["tensors"])[0]


def _origins(model: Any, origins: Mapping[str, str]) -> Mapping[str, str]:
    """The same by the names in reports."""
    if model is None:
        return origins
    called = _by_loader(model, model.state_dict(), {*origins, *origins.values()})
    return {called[new]: called[old] for new, old in origins.items()}


def _worse(report: Report, before: Report, origins: Mapping[str, str]) -> Report:
    """What of the report on the output is not so for the source, by whose names what the class expects is the same."""
    lacked, unused, errors = _lacking(before), {*before.unexpected}, {*before.errors}
    return Report(
        tuple(name for name in report.missing if name not in lacked),
        tuple(name for name in report.unexpected if origins.get(name, name) not in unused),
        tuple(text for text in report.mismatched if _parameter(text) not in lacked),
        tuple(text for text in report.errors if text not in errors),
    )


def _lacking(report: Report) -> set[str]:
    return {*report.missing, *map(_parameter, report.mismatched)}


def _parameter(mismatch: str) -> str:
    return mismatch.partition(": [")[0]


def _counted(report: Report) -> str:
    listed = zip(Report._fields, report, strict=True)
    return ", ".join(f"{len(names)} {field} ({_few([*names], 2)})" for field, names in listed if names)


def _few(texts: list[str], most: int = 5) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
