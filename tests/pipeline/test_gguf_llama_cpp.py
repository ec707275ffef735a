"""What gguf-split and llama.cpp's loader make of the same model: headers byte for byte, and a model that loads.

Needs the shared libraries of llama.cpp (libggml-base, libggml and libllama) in the folder that LLAMA_CPP_LIBRARIES
names. Its own builds have them, and so have the packages of its bindings; tried with those of @node-llama-cpp/linux-x64
3.22.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from reshard.pipeline.sizes import SINGLE
from tests.pipeline.conftest import Run

LIBRARIES = os.environ.get("LLAMA_CPP_LIBRARIES", "")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LIBRARIES, reason="LLAMA_CPP_LIBRARIES names no folder")]


def save(path: Path) -> None:
    """A llama of two blocks that loads, without a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(2)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(320)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def add(name: str, kind: str, *shape: int) -> None:
        number = gguf.GGMLQuantizationType[kind]
        values = random.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)

    add("token_embd.weight", "Q8_0", 320, 256)
    for block in ("blk.0", "blk.1"):
        add(f"{block}.attn_norm.weight", "F32", 256)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{name}.weight", "Q8_0", 256, 256)
        add(f"{block}.ffn_norm.weight", "F32", 256)
        add(f"{block}.ffn_gate.weight", "Q4_0", 512, 256)
        add(f"{block}.ffn_up.weight", "Q4_0", 512, 256)
        add(f"{block}.ffn_down.weight", "Q5_0", 256, 512)
    add("output_norm.weight", "F32", 256)
    add("output.weight", "Q8_0", 320, 256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_headers_are_gguf_splits_and_the_loader_takes_the_parts(tmp_path: Path, go: Run) -> None:
    whole = tmp_path / "model" / "tiny.gguf"
    whole.parent.mkdir()
    save(whole)
    split = go(whole.parent, tmp_path / "parts", size=300_000).plan.shards
    merged = go(tmp_path / "parts", tmp_path / "merged", size=SINGLE).plan.shards
    parts = [str(tmp_path / "parts" / shard.path) for shard in split]
    command = [sys.executable, "-m", "tests.support.llama_cpp", LIBRARIES, str(whole), *parts]
    said = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=True)
    answer = json.loads(said.stdout.splitlines()[-1])
    ours = [shard.header for shard in (*split, *merged)]
    assert len(split) == 5
    assert answer["headers"] == [[len(header), hashlib.sha256(header).hexdigest()] for header in ours]
    assert answer["parameters"] == [1_475_840, 1_475_840]
