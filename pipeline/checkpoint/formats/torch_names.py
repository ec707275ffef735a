"""What pickles of torch may name: dtypes, storage classes, and functions that rebuild tensors. Pure data.

Sources: `torch/_utils.py` (the `_rebuild_*` functions), `torch/storage.py` (the storage classes).
"""

from __future__ import annotations

# torch's dtype names -> the safetensors format's.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
# Known to torch and not to the format: recognised, so that the refusal can name them.
FOREIGN_STORED = {"complex128": 16, "quint8": 1, "qint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}  # bytes
FOREIGN_DTYPES = {
    *FOREIGN_STORED,
    "complex32",
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
}

# torch's storage classes -> dtype names. A storage without a type counts bytes.
STORAGES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
UNTYPED = {"torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage"}

REBUILD_V3 = "torch._utils._rebuild_tensor_v3"
# And how many arguments they take; the last of the larger number is metadata.
REBUILD = {"torch._utils._rebuild_tensor": (4,), "torch._utils._rebuild_tensor_v2": (6, 7), REBUILD_V3: (7, 8)}
PARAMETER = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
FROM_TYPE = {"torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"}
PLAIN_TYPES = {
    "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter",
    "torch.nn.parameter.Buffer", "torch.nn.Buffer",
}  # fmt: skip
# Tensors that are more than a view of one storage.
FOREIGN_KINDS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor without data",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor pickled as a numpy array",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor on another device, pickled by value",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a custom class",
}
TENSOR_KINDS = {*REBUILD, *PARAMETER, *FROM_TYPE, *FOREIGN_KINDS}
# What a DTensor is pickled with: itself, how it is divided, and over which processes. Modules of torch 2.3 and later.
DTENSOR = "DTensor"
_DTENSOR_MODULES = (
    "torch.distributed.tensor", "torch.distributed.tensor._api", "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types", "torch.distributed._tensor", "torch.distributed._tensor.api",
    "torch.distributed._tensor._dtensor_spec", "torch.distributed._tensor.placement_types",
    "torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh", "torch.distributed._mesh_layout",
)  # fmt: skip
_DTENSOR_NAMES = (
    DTENSOR, "DTensorSpec", "TensorMeta", "ShardOrderEntry", "DeviceMesh", "_MeshLayout", "_FlatLayout",
    "Shard", "_StridedShard", "Replicate", "Partial", "_Partial",
)  # fmt: skip
DTENSOR_KINDS = {f"{module}.{name}" for module in _DTENSOR_MODULES for name in _DTENSOR_NAMES}
DICTIONARIES = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter"}
# What trainers put beside the weights. It is named in the notes and never read, so it is allowed.
BYSTANDERS = {
    "torch.Size", "torch.device", "torch.per_tensor_affine", "torch.per_channel_affine",
    "torch.per_channel_affine_float_qparams", "torch.serialization._get_layout", "argparse.Namespace", "builtins.set",
    "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset", "builtins.complex", "__builtin__.complex",
    "builtins.bytearray", "__builtin__.bytearray", "_codecs.encode", "datetime.datetime", "datetime.timedelta",
    "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath", "numpy.dtype", "numpy.ndarray",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
}  # fmt: skip
ALLOWED = frozenset(
    TENSOR_KINDS
    | PLAIN_TYPES
    | DTENSOR_KINDS
    | DICTIONARIES
    | BYSTANDERS
    | UNTYPED
    | {f"{module}.{name}" for module in ("torch", "torch.cuda", "torch.storage") for name in STORAGES}
    | {f"torch.{name}" for name in (*DTYPES, *FOREIGN_DTYPES)}
)
