"""What a person gains who loads a model: memory and time before a cut and after it, as transformers loads both.

The model is of Mistral's class with random weights, and smaller: 0.9 GB in float16. Before, it is the torch file that
`torch.save` writes; after, it is safetensors files of at most 200 MB. Figures of this machine: only ratios travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from reshard.pipeline.limits import MB
from tests.benchmarks.figures import Figure
from tests.support.measured import measured

JOBS = "tests.pipeline.jobs"
HERE = "tests.benchmarks.loading"
RUNS = 3  # of each, alternating, because the machine is shared


def make(folder: str) -> int:
    """Save the model as ``pytorch_model.bin``; returns its bytes."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=2048, intermediate_size=7168, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(torch.float16)
    model.config.architectures = ["MistralForCausalLM"]
    model.config.save_pretrained(folder)
    path = Path(folder) / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    return path.stat().st_size


def load(folder: str) -> list[float]:
    """Load it and say how it answers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    return [float(x) for x in logits[0, -1, :8]]


def loading(folder: Path) -> Iterator[Figure]:
    """Loading before and after the cut, and what the cut itself took."""
    before, after = folder / "before", folder / "after"
    before.mkdir()
    size = measured(f"{HERE}:make", str(before)).result
    cut = measured(f"{JOBS}:do_run", str(before), str(after), {"size": 200 * MB})
    assert len(list(after.glob("*.safetensors"))) >= size // (200 * MB)
    runs = [[measured(f"{HERE}:load", str(place)) for place in (before, after)] for _ in range(RUNS)]
    assert all(old.result == new.result for old, new in runs), "the model answers otherwise after the cut"
    peaks = [median(run[i].peak for run in runs) / MB for i in (0, 1)]
    times = [median(run[i].seconds for run in runs) for i in (0, 1)]
    yield Figure("cut a torch file, peak memory", cut.peak / MB, "MB", 500, "must")
    yield Figure("load after the cut, target: before, peak", peaks[1], "MB", peaks[0], "aim")
    yield Figure("load after the cut, target: before, time", times[1], "s", times[0], "aim")
