"""python check_tensors.py SOURCE_DIR OUTPUT_DIR: exits with 1 unless both have the tensors in tensors.sigstore.json.

First check with `model_signing verify` that OUTPUT_DIR, and with it that list, is as it was signed.
"""

import hashlib
import json
import sys
from base64 import b64decode
from pathlib import Path

from safetensors import SafetensorError, deserialize


def sha256_of(*places):
    total = hashlib.sha256()
    for file, start, stop in places:
        with file.open("rb") as stream:
            stream.seek(start)
            total.update(stream.read(stop - start))
    return total.hexdigest()


def sha256_in(file):
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tensors_in(file):
    """(first byte, end) -> [name, shape, dtype] of every tensor in a safetensors file."""
    with file.open("rb") as stream:
        begin = 8 + int.from_bytes(stream.read(8), "little")
        told = {name: one for name, one in json.loads(stream.read(begin - 8)).items() if name != "__metadata__"}
    return {tuple(begin + at for at in t["data_offsets"]): [name, t["shape"], t["dtype"]] for name, t in told.items()}


def problems(source, output):
    bundle = json.loads((output / "tensors.sigstore.json").read_text())
    statement = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
    told, shards = statement["predicate"], {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    files = [source / one["path"] for one in told["files"]]
    there = {file.relative_to(output).as_posix() for file in output.rglob("*.safetensors")}
    if not shards.keys() == told["tensors"].keys() == there or {*source.rglob("*.safetensors")} - {*files}:
        yield "the list is about other files than there are"
    known = [tensors_in(file) if file.suffix == ".safetensors" else {} for file in files]
    used, seen = [set() for _ in files], set()
    for path, listed in told["tensors"].items():
        if sha256_in(output / path) != shards.get(path):
            yield f"{path}: another sha256 than in the list"
        found = dict(deserialize((output / path).read_bytes()))
        yield from (f"{name}: in {path} or in the list, but not in both" for name in found.keys() ^ listed.keys())
        yield from (f"{name}: in two files" for name in seen & found.keys())
        seen |= found.keys()
        for name in found.keys() & listed.keys():
            one, made = listed[name], [name, found[name]["shape"], found[name]["dtype"]]
            if hashlib.sha256(found[name]["data"]).hexdigest() != one["sha256"]:
                yield f"{name}: other bytes than in the list"
            read = sha256_of(*((files[n], *at) for n, *at in one["from"])) if "from" in one else "in another order"
            if read != one.get("source_sha256", one["sha256"]):
                yield f"{name}: not the bytes of the source as they stand there"
            if cast := "source_sha256" in one:
                yield f"{name}: cast, so its values are only the signer's word"
            for n, *at in one.get("from", ()):
                used[n].add(tuple(at))
                if known[n] and (was := known[n].get(tuple(at), ["a part"]))[: 3 - cast] != made[: 3 - cast]:
                    yield f"{name}: the list makes {made} of {was}"
    for file, listed, tensors, read in zip(files, told["files"], known, used, strict=True):
        if listed.get("sha256") not in (None, sha256_in(file)):
            yield f"{listed['path']}: another sha256 than in the list"
        for (start, stop), (name, *_) in tensors.items():
            if (start, stop) not in read and sum(max(0, min(stop, b) - max(start, a)) for a, b in read) < stop - start:
                yield f"{name}: in {listed['path']}, but not in the output"


if __name__ == "__main__":
    try:
        lines = list(problems(Path(sys.argv[1]), Path(sys.argv[2])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        lines = [f"cannot be checked: {error!r}"]
    sys.exit("\n".join(lines) or None)
