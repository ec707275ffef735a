"""Ways in which an output was lost or spoiled, each as somebody met it or as a table of known faults has it.

A mutation gets a good output and breaks it. Where the original accident left index and files in agreement, so does it:
a checkpoint that agrees with itself is not thereby whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.verification.models import LINES, save_tokenizer
from tests.verification.weights import INDEX, Array, Folder, join, read, split, write

Q, K, O = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qko")  # noqa: E741
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MTP = "mtp.layers.0.proj.weight"


@dataclass(frozen=True)
class Mutation:
    """One way to break an output; ``what`` is what became of it.

    Where it is not ``proven`` that loaders do otherwise with it, no check fails, and one is inconclusive.
    """

    kind: str
    what: str
    apply: Callable[[Folder], object]
    proven: bool


MUTATIONS: list[Mutation] = []
Breaking = Callable[[Folder], object]


def mutation(kind: str, what: str, *, proven: bool = True) -> Callable[[Breaking], Breaking]:
    def add(apply: Breaking) -> Breaking:
        MUTATIONS.append(Mutation(kind, what, apply, proven))
        return apply

    return add


# --------------------------------------------------------------------------------------------------- files and index

FILES = "files and index"


@mutation(FILES, "a shard is missing")
def _(out: Folder) -> None:
    out.shards[3].unlink()


@mutation(FILES, "three shards are missing, and the index does not name them")
def _(out: Folder) -> None:
    for path in out.shards[4:7]:
        path.unlink()
    out.mend()


@mutation(FILES, "the index is missing")
def _(out: Folder) -> None:
    (out / INDEX).unlink()


@mutation(FILES, "the index belongs to another model")
def _(out: Folder) -> None:
    out.index(lambda i: i.update(weight_map={f"other.{n}.weight": "model-00001-of-00002.safetensors" for n in "ab"}))


@mutation(FILES, "the index does not name a tensor")
def _(out: Folder) -> None:
    out.index(lambda i: i["weight_map"].pop(NORM))


@mutation(FILES, "the index names a tensor that no file has")
def _(out: Folder) -> None:
    out.index(lambda i: i["weight_map"].update({"ghost.weight": out.shards[0].name}))


@mutation(FILES, "the index names the wrong file for a tensor")
def _(out: Folder) -> None:
    out.index(lambda i: i["weight_map"].update({NORM: next(p.name for p in out.shards if p != out.home(NORM))}))


@mutation(FILES, "the index has a wrong total_size")
def _(out: Folder) -> None:
    out.index(lambda i: i["metadata"].update(total_size=i["metadata"]["total_size"] + 2))


@mutation(FILES, "the index has no metadata")
def _(out: Folder) -> None:
    out.index(lambda i: i.pop("metadata"))


@mutation(FILES, "the index is truncated")
def _(out: Folder) -> None:
    (out / INDEX).write_text((out / INDEX).read_text()[:-30])


@mutation(FILES, "the index begins with a byte order mark")
def _(out: Folder) -> None:
    (out / INDEX).write_bytes(b"\xef\xbb\xbf" + (out / INDEX).read_bytes())


@mutation(FILES, "the index has a name that no loader looks for")
def _(out: Folder) -> None:
    (out / INDEX).rename(out / "weights.safetensors.index.json")


@mutation(FILES, "index and shards have a name that no loader looks for")
def _(out: Folder) -> None:
    names = {path.name: path.name.replace("model", "weights") for path in out.shards}
    out.index(lambda i: i.update(weight_map={tensor: names[file] for tensor, file in i["weight_map"].items()}))
    for name, new in (names | {INDEX: INDEX.replace("model", "weights")}).items():
        (out / name).rename(out / new)


@mutation(FILES, "index and shards are in a subfolder")
def _(out: Folder) -> None:
    (out / "weights").mkdir()
    for path in (*out.shards, out / INDEX):
        path.rename(out / "weights" / path.name)


@mutation(FILES, "the index lists a tensor twice")
def _(out: Folder) -> None:
    text = (out / INDEX).read_text()
    (out / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{out.shards[0].name}", '))


@mutation(FILES, "one bit of a name in the index is flipped")
def _(out: Folder) -> None:
    content = (out / INDEX).read_bytes().replace(b'"model.norm.weight"', b'"model.norm.weighu"')
    (out / INDEX).write_bytes(content)


@mutation(FILES, "the index points outside the folder")
def _(out: Folder) -> None:
    shutil.copy(out.home(NORM), out.path.parent / "outside.safetensors")
    out.index(lambda i: i["weight_map"].update({NORM: "../outside.safetensors"}))


@mutation(FILES, "a single file with older weights is beside the index")
def _(out: Folder) -> None:
    write(out / "model.safetensors", {NORM: out.get(NORM)})


@mutation(FILES, "a shard of an earlier cut is left over")
def _(out: Folder) -> None:
    shutil.copy(out.shards[0], out / "model-00002-of-00003.safetensors")


@mutation(FILES, "two shards hold the same tensor")
def _(out: Folder) -> None:
    other = next(path for path in out.shards if NORM not in read(path))
    write(other, read(other) | {NORM: out.get(NORM)})


@mutation(FILES, "a shard is truncated")
def _(out: Folder) -> None:
    content = out.shards[2].read_bytes()
    out.shards[2].write_bytes(content[:-1])


@mutation(FILES, "a shard has extra bytes at its end")
def _(out: Folder) -> None:
    with out.shards[2].open("ab") as file:
        file.write(b"\0")


@mutation(FILES, "a shard is empty")
def _(out: Folder) -> None:
    out.shards[1].write_bytes(b"")


@mutation(FILES, "a shard is only its git-lfs pointer")
def _(out: Folder) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"
    out.shards[1].write_text(pointer)


@mutation(FILES, "a shard has no format in its metadata")
def _(out: Folder) -> None:
    write(out.shards[1], read(out.shards[1]), metadata={})


@mutation(FILES, "two shards have swapped names")
def _(out: Folder) -> None:
    first, second = out.shards[1], out.shards[2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


# ----------------------------------------------------------------------------------------------------------- headers

HEADERS = "headers"


def spoil_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = split(path)
    change(header)
    join(path, header, data)


@mutation(HEADERS, "one bit of a tensor's name in a header is flipped")
def _(out: Folder) -> None:
    path = out.home(NORM)
    path.write_bytes(path.read_bytes().replace(b'"model.norm.weight"', b'"model.norm.weighu"'))


@mutation(HEADERS, "a header says float16 for bfloat16")
def _(out: Folder) -> None:
    spoil_header(out.home(Q), lambda h: h[Q].update(dtype="F16"))


@mutation(HEADERS, "two tensors overlap in a header")
def _(out: Folder) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header["again"] = dict(next(entry for name, entry in header.items() if name != "__metadata__"))

    spoil_header(out.shards[0], overlap)


@mutation(HEADERS, "a header swaps two tensors of the same shape")
def _(out: Folder) -> None:
    first, second = (f"{EXPERT}.w{n}.weight" for n in "13")
    if out.home(first) != out.home(second):
        a, b = out.get(first), out.get(second)
        out.put(first, b)
        out.put(second, a)
    else:
        spoil_header(out.home(first), lambda h: h.update({first: h[second], second: h[first]}))


@mutation(HEADERS, "one bit of a header's length is flipped")
def _(out: Folder) -> None:
    content = bytearray(out.shards[0].read_bytes())
    content[1] ^= 1
    out.shards[0].write_bytes(content)


# ----------------------------------------------------------------------------------------------------- lost and added

TENSORS = "tensors lost, added and renamed"


@mutation(TENSORS, "a norm is missing")
def _(out: Folder) -> None:
    out.drop(NORM)


@mutation(TENSORS, "the output head, which is tied but was stored, is missing")
def _(out: Folder) -> None:
    out.drop(HEAD)


@mutation(TENSORS, "the tie's source is missing, and only the alphabetically first name is kept")
def _(out: Folder) -> None:
    out.drop(EMBED)


@mutation(TENSORS, "one matrix of one expert is missing")
def _(out: Folder) -> None:
    out.drop(f"{EXPERT}.w2.weight")


@mutation(TENSORS, "an expert is missing")
def _(out: Folder) -> None:
    out.drop(*(f"{EXPERT}.w{n}.weight" for n in "123"))


@mutation(TENSORS, "every expert of a layer lacks one matrix")
def _(out: Folder) -> None:
    out.drop(*[name for name in out.names() if ".layers.1." in name and name.endswith(".w2.weight")])


@mutation(TENSORS, "the draft head, which the class ignores, is missing")
def _(out: Folder) -> None:
    out.drop(MTP)


@mutation(TENSORS, "the scale of a quantized matrix is missing")
def _(out: Folder) -> None:
    out.drop("mtp.layers.0.packed.weight_scale_inv")


@mutation(TENSORS, "the weights that no index names are missing")
def _(out: Folder) -> None:
    (out / "mtp.safetensors").unlink()


@mutation(TENSORS, "there is a tensor that the source does not have")
def _(out: Folder) -> None:
    home = out.shards[0]
    write(home, read(home) | {"extra.weight": out.get(NORM)})
    out.mend()


@mutation(TENSORS, "there is a buffer that loaders ignore")
def _(out: Folder) -> None:
    home = out.shards[0]
    write(home, read(home) | {"model.layers.0.self_attn.rotary_emb.inv_freq": Array("F32", (4,), b"\1" * 16)})
    out.mend()


@mutation(TENSORS, "the experts are named as in another version of the loader")
def _(out: Folder) -> None:
    for path in out.shards:
        write(path, {n.replace("block_sparse_moe", "mlp"): a for n, a in read(path).items()})
    out.mend()


@mutation(TENSORS, "two tensors of one shape have swapped names")
def _(out: Folder) -> None:
    one, other = out.get(Q), out.get(O)
    out.put(Q, other)
    out.put(O, one)


@mutation(TENSORS, "the experts of a layer are in another order")
def _(out: Folder) -> None:
    names = [f"model.layers.0.block_sparse_moe.experts.{n}.w1.weight" for n in range(4)]
    arrays = [out.get(name) for name in names]
    for name, array in zip(names, arrays[1:] + arrays[:1], strict=True):
        out.put(name, array)


# ---------------------------------------------------------------------------------------------------- dtype and shape

KINDS = "dtypes and shapes"


def to_bf16(data: bytes) -> bytes:
    return (np.frombuffer(data, "<u4") >> 16).astype("<u2").tobytes()


@mutation(KINDS, "one tensor is cast from float32 to bfloat16")
def _(out: Folder) -> None:
    array = out.get(NORM)
    out.put(NORM, Array("BF16", array.shape, to_bf16(array.data)))


@mutation(KINDS, "every float32 tensor is cast to bfloat16")
def _(out: Folder) -> None:
    for path in out.shards:
        made = read(path)
        write(path, {n: Array("BF16", a.shape, to_bf16(a.data)) if a.dtype == "F32" else a for n, a in made.items()})
    out.mend()


@mutation(KINDS, "a norm has the dtype int8")
def _(out: Folder) -> None:
    out.put(NORM, Array("I8", out.get(NORM).shape, b"\1" * 32))


@mutation(KINDS, "a matrix is in fp8 without its scale")
def _(out: Folder) -> None:
    array = out.get(Q)
    out.put(Q, Array("F8_E4M3", array.shape, array.data[::2]))


@mutation(KINDS, "a matrix is transposed, and its shape with it")
def _(out: Folder) -> None:
    array = out.get(K)
    turned = np.frombuffer(array.data, "<u2").reshape(array.shape).T
    out.put(K, Array(array.dtype, turned.shape, turned.tobytes()))


@mutation(KINDS, "a square matrix is transposed")
def _(out: Folder) -> None:
    array = out.get(Q)
    out.put(Q, array._replace(data=np.frombuffer(array.data, "<u2").reshape(array.shape).T.tobytes()))


@mutation(KINDS, "a matrix has another shape with the same number of elements")
def _(out: Folder) -> None:
    array = out.get(K)
    out.put(K, array._replace(shape=array.shape[::-1]))


@mutation(KINDS, "an embedding is padded by a row")
def _(out: Folder) -> None:
    array = out.get(EMBED)
    rows, columns = array.shape
    out.put(EMBED, Array(array.dtype, (rows + 1, columns), array.data + b"\0" * 2 * columns))


# -------------------------------------------------------------------------------------------------------------- bytes

BYTES = "bytes"


@mutation(BYTES, "one bit of a tensor is flipped")
def _(out: Folder) -> None:
    out.change(Q, lambda data: data.__setitem__(777, data[777] ^ 1))


@mutation(BYTES, "one bit of the last byte of a file is flipped")
def _(out: Folder) -> None:
    content = bytearray(out.shards[-1].read_bytes())
    content[-1] ^= 0x80
    out.shards[-1].write_bytes(content)


@mutation(BYTES, "half of a shard is zeros, as in a file that was never filled")
def _(out: Folder) -> None:
    content = bytearray(out.shards[2].read_bytes())
    half = len(content) // 2
    content[half:] = bytes(len(content) - half)
    out.shards[2].write_bytes(content)


@mutation(BYTES, "a tensor is all zeros")
def _(out: Folder) -> None:
    out.change(Q, lambda data: data.__setitem__(slice(None), bytes(len(data))))


@mutation(BYTES, "a tensor is shifted by one element")
def _(out: Folder) -> None:
    out.change(Q, lambda data: data.__setitem__(slice(None), data[-2:] + data[:-2]))


@mutation(BYTES, "part of a tensor is repeated over the next part")
def _(out: Folder) -> None:
    out.change(Q, lambda data: data.__setitem__(slice(512, 1024), data[:512]))


@mutation(BYTES, "a tensor has the other byte order")
def _(out: Folder) -> None:
    out.change(Q, lambda data: data.__setitem__(slice(None), np.frombuffer(data, "<u2").byteswap().tobytes()))


@mutation(BYTES, "a zero has another sign")
def _(out: Folder) -> None:
    """Equal by value, so that nobody sees it who compares values."""
    out.change("zeros.weight", lambda data: data.__setitem__(3, 0x80))


@mutation(BYTES, "a NaN has another payload")
def _(out: Folder) -> None:
    out.change("nans.weight", lambda data: data.__setitem__(0, data[0] ^ 1))


@mutation(BYTES, "the two copies of a tied tensor differ")
def _(out: Folder) -> None:
    out.change(HEAD, lambda data: data.__setitem__(40, data[40] ^ 2))


@mutation(BYTES, "a tensor comes from another model")
def _(out: Folder) -> None:
    random = np.random.default_rng(1)
    out.change(O, lambda data: data.__setitem__(slice(None), random.bytes(len(data))))


@mutation(BYTES, "one bit of the weights that no index names is flipped")
def _(out: Folder) -> None:
    content = bytearray((out / "mtp.safetensors").read_bytes())
    content[-7] ^= 4
    (out / "mtp.safetensors").write_bytes(content)


# -------------------------------------------------------------------------------------------------------- other files

OTHERS = "config, tokenizer, processor, code"


@mutation(OTHERS, "the tokenizer belongs to another model")
def _(out: Folder) -> None:
    save_tokenizer(out.path, [line[::-1] for line in LINES])


@mutation(OTHERS, "the tokenizer lacks a merge")
def _(out: Folder) -> None:
    out.json("tokenizer.json", lambda t: t["model"]["merges"].pop(0))


@mutation(OTHERS, "the tokenizer is missing")
def _(out: Folder) -> None:
    (out / "tokenizer.json").unlink()


@mutation(OTHERS, "the tokenizer has another end-of-text token")
def _(out: Folder) -> None:
    out.json("tokenizer_config.json", lambda t: t.update(eos_token="<pad>"))


@mutation(OTHERS, "the chat template is missing")
def _(out: Folder) -> None:
    (out / "chat_template.jinja").unlink()


@mutation(OTHERS, "the tokenizer lacks the pieces that only other loaders read")
def _(out: Folder) -> None:
    (out / "tokenizer.model").unlink()


@mutation(OTHERS, "the processor is missing")
def _(out: Folder) -> None:
    (out / "preprocessor_config.json").unlink()


@mutation(OTHERS, "the processor has another image mean")
def _(out: Folder) -> None:
    out.json("preprocessor_config.json", lambda p: p.update(image_mean=[0.4, 0.5, 0.5]))


@mutation(OTHERS, "the processor combines images and text differently")
def _(out: Folder) -> None:
    out.json("processor_config.json", lambda p: p.update(image_seq_length=17))


@mutation(OTHERS, "the config is missing")
def _(out: Folder) -> None:
    (out / "config.json").unlink()


@mutation(OTHERS, "the config has one layer fewer")
def _(out: Folder) -> None:
    out.json("config.json", lambda c: c.update(num_hidden_layers=1))


@mutation(OTHERS, "the config names another class")
def _(out: Folder) -> None:
    out.json("config.json", lambda c: c.update(architectures=["MixtralForSequenceClassification"]))


@mutation(OTHERS, "the config says that the weights are not tied")
def _(out: Folder) -> None:
    out.json("config.json", lambda c: c.update(tie_word_embeddings=False))


@mutation(OTHERS, "the generation config is missing")
def _(out: Folder) -> None:
    (out / "generation_config.json").unlink()


@mutation(OTHERS, "the model's own code was changed")
def _(out: Folder) -> None:
    path = out / "configuration_own.py"
    path.write_text(path.read_text().replace("32", "23"))


@mutation(OTHERS, "there is code that the source does not have")
def _(out: Folder) -> None:
    (out / "modeling_own.py").write_text("# what a config may name\n")


@mutation(OTHERS, "there is a quantizer config that the source does not have")
def _(out: Folder) -> None:
    (out / "quantize_config.json").write_text('{"bits": 4}')


@mutation(OTHERS, "there is an adapter, which loaders attach automatically")
def _(out: Folder) -> None:
    (out / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    write(out / "adapter_model.safetensors", {"lora_A.weight": out.get(NORM)})


def added_token(out: Folder, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what `tokenizer.json` says of its first added token."""
    out.json("tokenizer.json", lambda t: change(t["added_tokens"][0]))


@mutation(OTHERS, "the tokenizer has a normalizer")
def _(out: Folder) -> None:
    out.json(
        "tokenizer.json", lambda t: t.update(normalizer={"type": "Strip", "strip_left": False, "strip_right": False})
    )


@mutation(OTHERS, "the tokenizer truncates long texts")
def _(out: Folder) -> None:
    settings = {"direction": "Right", "max_length": 100_000, "strategy": "LongestFirst", "stride": 0}
    out.json("tokenizer.json", lambda t: t.update(truncation=settings))


@mutation(OTHERS, "the tokenizer pads")
def _(out: Folder) -> None:
    settings = {"direction": "Left", "pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>", "pad_to_multiple_of": None}
    out.json("tokenizer.json", lambda t: t.update(padding=settings | {"strategy": "BatchLongest"}))


@mutation(OTHERS, "a special token strips the spaces before it")
def _(out: Folder) -> None:
    added_token(out, lambda token: token.update(lstrip=True))


@mutation(OTHERS, "a special token matches whole words only")
def _(out: Folder) -> None:
    added_token(out, lambda token: token.update(single_word=True))


@mutation(OTHERS, "a special token is no longer special", proven=False)
def _(out: Folder) -> None:
    added_token(out, lambda token: token.update(special=False))


@mutation(OTHERS, "the tokenizer has an extra special token")
def _(out: Folder) -> None:
    out.json("tokenizer_config.json", lambda t: t.update(extra_special_tokens={"image_token": "<pad>"}))


@mutation(OTHERS, "the tokenizer cleans up spaces", proven=False)
def _(out: Folder) -> None:
    out.json("tokenizer_config.json", lambda t: t.update(clean_up_tokenization_spaces=True))


@mutation(OTHERS, "the tokenizer's config has an unknown setting", proven=False)
def _(out: Folder) -> None:
    out.json("tokenizer_config.json", lambda t: t.update(spaces_between_special_tokens=False))


@mutation(OTHERS, "the config has another generation setting")
def _(out: Folder) -> None:
    out.json("config.json", lambda c: c.update(repetition_penalty=1.5))


@mutation(OTHERS, "the config was written by another version", proven=False)
def _(out: Folder) -> None:
    out.json("config.json", lambda c: c.update(transformers_version="0.0.1", _name_or_path="another/model"))


@mutation(OTHERS, "there is a chat template that the source does not have")
def _(out: Folder) -> None:
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")


@mutation(OTHERS, "there is generation code that the source does not have")
def _(out: Folder) -> None:
    (out / "custom_generate").mkdir()
    (out / "custom_generate" / "generate.py").write_text("def generate(model, **_): ...\n")


@mutation(OTHERS, "there is a torch file with other weights")
def _(out: Folder) -> None:
    torch.save({NORM: torch.zeros(32)}, out / "pytorch_model.bin")


@mutation(OTHERS, "there is a file that no loader reads", proven=False)
def _(out: Folder) -> None:
    (out / "notes.txt").write_text("added by hand\n")


@mutation(OTHERS, "the license is missing")
def _(out: Folder) -> None:
    (out / "LICENSE").unlink()


@mutation(OTHERS, "the license was replaced")
def _(out: Folder) -> None:
    (out / "LICENSE").write_text("Do as we please.\n")
