"""What two loaders copy once more by their own counters, and what `reshard doctor --layout` counts: on a CPU.

    pip install fastsafetensors==0.5.0 runai-model-streamer==0.17.0     # which are no requirement of anything here
    python -m tests.benchmarks.aligned

Ends with 1 where a count of ours differs, or where the tensors do. docs/layouts.md has what it printed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.careless import save_carelessly

# name -> of `save_carelessly`: where the data begins modulo 16, and odd bytes of each small tensor
WRITERS = {"header of odd length": (5, 0), "tensors of odd size": (0, 1), "header at 8 of 16 bytes": (8, 0)}
CUTS = {"--align 512": ["--align", "512"], "--align 4096": ["--align", "4096"]}
RESHARD = [sys.executable, "-c", "from reshard.cli.start import main; main()"]


def counted(folder: Path) -> tuple[int, int, str]:
    """Tensors that fastsafetensors and Run:ai's streamer say they copy, and a digest of all that the latter read."""
    import torch
    from fastsafetensors import SafeTensorsMetadata
    from fastsafetensors.frameworks import get_framework_op
    from runai_model_streamer import SafetensorsStreamer

    moved, copied, read = 0, 0, {}
    for path in sorted(folder.glob("*.safetensors")):
        metadata = SafeTensorsMetadata.from_file(str(path), get_framework_op("pytorch"))
        moved += 0 if metadata.aligned else len(metadata.tensors)
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            for name, tensor in streamer.get_tensors():
                read[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            copied += streamer.unaligned_copies
    return moved, copied, hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def ours(folder: Path) -> tuple[int, int]:
    """The same two counts, by headers alone."""
    done = subprocess.run(
        [*RESHARD, "doctor", folder, "--layout", "--json"], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    rules = {one["rule"]: one["tensors"] for one in found["now"]["misaligned"]}
    return rules["fastsafetensors"], rules["runai"]


def main() -> int:
    wrong = 0
    print("| layout | fastsafetensors moves | Run:ai copies | tensors |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="reshard-aligned-") as work:
        for name, written in WRITERS.items():
            source = Path(work, name)
            save_carelessly(source, *written)
            folders = {name: source}
            for cut, options in CUTS.items():
                folders[f"{name}, {cut}"] = out = Path(work, f"{name} {cut}")
                subprocess.run([*RESHARD, "run", source, "--to", out, *options], check=True, capture_output=True)
            digests = set()
            for told, folder in folders.items():
                moved, copied, digest = counted(folder)
                digests.add(digest)
                wrong += ours(folder) != (moved, copied)
                print(f"| {told} | {moved} of 24 | {copied} of 24 | {digest[:12]} |")
            wrong += len(digests) > 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
