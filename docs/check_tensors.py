"""python check_tensors.py SOURCE OUTPUT: exits with 1 unless both have the tensors that tensors.sigstore.json lists."""

import json
import re
import sys
from base64 import b64decode
from collections import Counter
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, deserialize


def sha256_of(*places):
    total = sha256()
    for file, start, stop in places:
        with file.open("rb") as stream:
            stream.seek(start)
            while block := stream.read(min(stop - stream.tell(), 1 << 24)):
                total.update(block)
    return total.hexdigest()


def tensors_in(file, n):
    """Name -> its place, shape and dtype, of every tensor in a safetensors file; nothing of other files."""
    with file.open("rb") as stream:
        begin = 8 + int.from_bytes(stream.read(8), "little") if file.suffix == ".safetensors" else 0
        told = json.loads(stream.read(begin - 8)) if begin else {}
    rows = {k: (*t["data_offsets"], t["shape"], t["dtype"]) for k, t in told.items() if k != "__metadata__"}
    return {name: [[[n, begin + a, begin + b]] if a < b else [], *more] for name, (a, b, *more) in rows.items()}


def problems(source, output):
    seal = json.loads(b64decode(json.loads((output / "tensors.sigstore.json").read_text())["dsseEnvelope"]["payload"]))
    told, shards = seal["predicate"], {one["name"]: one["digest"]["sha256"] for one in seal["subject"]}
    paths = [one["path"] for one in told["files"]]
    if bad := [p for p in paths if Path(p).is_absolute() or ".." in Path(p).parts or paths.count(p) > 1]:
        raise ValueError(f"the list names {bad[0]} twice, or a place outside SOURCE")
    torch = {".bin", ".pt", ".pth", ".ckpt", ".distcp"}  # of what is in these, only the bytes are compared
    files = {n: source / path for n, path in enumerate(paths)}
    known, used = {n: tensors_in(file, n) for n, file in files.items()}, set()
    folders, count = {files[n].parent for n in files if known[n]}, Counter(name for n in files for name in known[n])
    ours, theirs = ({file.relative_to(of).as_posix() for file in of.rglob("*.safetensors")} for of in (output, source))
    marks = {path: re.sub(r"-\d+-of-\d+", "", path) for path in (*ours, *paths)}
    both = ours & theirs - {*paths}  # copied whole, as the list says nothing of them
    for path in sorted(ours ^ shards.keys() | theirs - {*paths} | shards.keys() ^ told["tensors"].keys()):
        if path not in both or len({sha256_of((of / path, 0, 1 << 62)) for of in (source, output)}) > 1:
            yield f"{path}: not in the list, or not in the folder"
    for path in sorted(ours & told["tensors"].keys()):
        listed, found = told["tensors"][path], dict(deserialize((output / path).read_bytes()))
        if sha256_of((output / path, 0, 1 << 62)) != shards.get(path):
            yield f"{path}: another sha256 than in the list"
        yield from (f"{name}: in {path} or in the list, but not in both" for name in sorted({*found} ^ {*listed}))
        for name in sorted(found.keys() & listed.keys()):
            one, data, places = listed[name], found[name]["data"], listed[name].get("from", [])
            if sha256(data).hexdigest() != one["sha256"]:
                yield f"{name}: other bytes than in the list"
            if sha256_of(*((files[n], *at) for n, *at in places)) != one.get("source_sha256", one["sha256"]):
                yield f"{name}: not the bytes of the source as they stand there"
            made = [places, found[name]["shape"], found[name]["dtype"]]
            if "source_sha256" in one and made.pop():
                yield f"{name}: cast, so its values are only the signer's word"
            homes = (n for n in files if made == known[n].get(name, [])[: len(made)])
            home = next((n for n in homes if count[name] == 1 or marks[paths[n]] == marks[path]), None)
            in_torch = all(files[n].suffix in torch and files[n].parent not in folders for n, *_ in places)
            if (home, name, str(places)) in used or (home is None and not (in_torch and (places or not folders))):
                yield f"{name}: not the source's tensor of that name, shape and dtype, or there twice"
            used.add((home, name, str(places)))
    for n, tensors in known.items():
        if told["files"][n].get("sha256", now := sha256_of((files[n], 0, 1 << 62))) != now:
            yield f"{paths[n]}: another sha256 than in the list"
        lost = (name for name, one in tensors.items() if (n, name, str(one[0])) not in used)
        yield from (f"{name}: in {paths[n]}, but not in that file in the output" for name in sorted(lost))


if __name__ == "__main__":
    try:
        sys.exit("\n".join(problems(*map(Path, sys.argv[1:]))) or None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        sys.exit(f"cannot be checked: {type(error).__name__}: {error}")
