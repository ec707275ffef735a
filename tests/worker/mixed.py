"""Sixty models as a platform team has them: every format, and what goes wrong with some. How each ends is a table.

`MODELS` is the table. A `World` puts the models on a Hub on loopback, writes the catalog of them and says what became
of it: of each model an outcome or an error code, and whether every tensor that should be published is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi
from safetensors.torch import save_file

from reshard.worker.followers.records import CatalogStatus as Seen
from tests.formats import saving
from tests.formats.cases import CASES
from tests.formats.child import described
from tests.formats.saving import State
from tests.hub.admin import HubAdmin, HubRefused
from tests.hub.process import ROOT, HubProcess
from tests.support import ggufs
from tests.support.checker import Tensors, from_hub, read_checkpoint

US, TOKEN = "us", "hf_us"  # whose workers they are
LAB, LAB_TOKEN = "lab", "hf_lab"  # who lends them a token, under a name
SIZE = 20_000  # bytes; every model below is cut into several files
HEAVY = (".safetensors", ".bin", ".pth", ".distcp", ".gguf")
PUBLISHED = "published"

Built = dict[str, State]  # what the output must hold, by checkpoint: the path that its single file would have


@dataclass(frozen=True)
class Model:
    """One entry of the catalog. ``build`` leaves a repository's files in a folder; None: it is a case of the formats.

    ``owner`` has the source: somebody else, our own team, or the lab. ``asked`` is what the entry says besides.
    ``set_up`` does on the Hub what files cannot say. ``short``: it is in the short form of the catalog, too.
    """

    ends: str
    build: Callable[[Path], Built] | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    owner: Literal["them", "team", "lab"] = "them"
    set_up: Callable[[World, str], object] = lambda world, name: None
    short: bool = False


def state(seed: int) -> State:
    """About 50 kB of tensors of several dtypes, different for each seed."""
    random = torch.Generator().manual_seed(seed)
    made: State = {f"layer.{i}.weight": torch.randn(40, 25, generator=random) for i in range(12)}
    made |= {f"layer.{i}.half": torch.randn(25, generator=random).to(torch.bfloat16) for i in range(4)}
    return made | {"counts": torch.arange(seed, seed + 100), "scalar": torch.tensor(float(seed))}


# ------------------------------------------------------------------------------------------------ what is in a folder


def safetensors(seed: int, files: int = 1) -> Callable[[Path], Built]:
    return lambda folder: {"model.safetensors": saving.as_safetensors(state(seed), folder, files)}


def torch_file(seed: int, zipped: bool = True) -> Callable[[Path], Built]:
    return lambda folder: {"model.safetensors": saving.as_bin(state(seed), folder, zipped=zipped)}


def torch_files(seed: int, files: int) -> Callable[[Path], Built]:
    return lambda folder: {"model.safetensors": saving.as_bins(state(seed), folder, files)}


def distributed(folder: Path) -> Built:
    with warnings.catch_warnings(action="ignore"):  # that there is one process is what we want
        dcp.save({"model": state(20)}, checkpoint_id=folder)
    return {"model.safetensors": state(20)}


def pipeline(folder: Path) -> Built:
    """A diffusers pipeline: components in folders of their own, one of them in two precisions."""
    (folder / "model_index.json").write_text('{"_class_name": "Nothing"}')
    for component in ("unet", "vae"):
        (folder / component).mkdir()
    stem = "diffusion_pytorch_model"
    half = {name: tensor.half() for name, tensor in state(32).items() if tensor.dtype == torch.float32}
    return {
        f"unet/{stem}.safetensors": saving.as_safetensors(state(30), folder / "unet", 3, stem),
        f"vae/{stem}.safetensors": saving.as_safetensors(state(31), folder / "vae", 1, stem),
        f"vae/{stem}.fp16.safetensors": saving.as_safetensors(half, folder / "vae", 1, f"{stem}.fp16"),
    }


def adapter_alone(folder: Path) -> Built:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "none/none"}')
    save_file({"lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return {}


def with_adapter(folder: Path) -> Built:
    """An adapter is never cut; here it is larger than a file may be."""
    adapter_alone(folder)
    adapter = {name: tensor for name, tensor in state(41).items() if name.endswith("weight")}
    save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return safetensors(40)(folder) | {"adapter_model.safetensors": adapter}


def file(name: str, content: bytes) -> Callable[[Path], Built]:
    def build(folder: Path) -> Built:
        (folder / name).write_bytes(content)
        return {}

    return build


def gguf(folder: Path) -> Built:
    """Two quantisations, one of them in parts; the jobs check what they hold, as this reader knows no GGUF."""
    for kind, per_file in (("Q4_K", 0), ("Q8_0", 3)):
        spec = {f"blk.{i}.weight": (kind, (16, 256)) for i in range(8)}
        ggufs.save(folder / f"m-{kind}.gguf", spec, per_file=per_file)
    return {}


def nothing(folder: Path) -> Built:
    return {}


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], Built]:
    """A safetensors file whose bytes were changed before it was uploaded."""

    def build(folder: Path) -> Built:
        path = folder / "model.safetensors"
        safetensors(50)(folder)
        path.write_bytes(change(path.read_bytes()))
        return {}

    return build


def without(name: str, build: Callable[[Path], Built]) -> Callable[[Path], Built]:
    def less(folder: Path) -> Built:
        build(folder)
        (folder / name).unlink()
        return {}

    return less


def leads_out(folder: Path) -> Built:
    index = {"metadata": {}, "weight_map": {"weight": "../../elsewhere/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {}


def twice(folder: Path) -> Built:
    """Two files of one checkpoint that have the same tensors."""
    safetensors(51, 2)(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    return {}


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must never be run",)


def pickled(value: object) -> Callable[[Path], Built]:
    def build(folder: Path) -> Built:
        torch.save(value, folder / "pytorch_model.bin")
        return {}

    return build


# ----------------------------------------------------------------------------------------------------- what is on a Hub


def gated(*granted: str) -> Callable[[World, str], object]:
    return lambda world, name: world.admin.create_repo(world.repo(name), gated="manual", granted=list(granted))


def private(world: World, name: str) -> None:
    world.admin.create_repo(world.repo(name), visibility="private")


def hidden_and_its_target_is_not(world: World, name: str) -> None:
    private(world, name)
    world.admin.create_repo(f"{world.team}/{name}-cut")


def corrupt(world: World, name: str) -> None:
    """The store holds another byte than its listing says, in the last tensor of the file."""
    path = "model.safetensors"
    world.admin.corrupt(world.repo(name), path, world.admin.files(world.repo(name))[path]["size"] - 8)


def renamed(world: World, name: str) -> None:
    HfApi(world.hub.endpoint, world.their_token).move_repo(world.repo(name), f"{world.them}/moved-on")


def deleted(world: World, name: str) -> None:
    HfApi(world.hub.endpoint, world.their_token).delete_repo(world.repo(name))


def has_a_target(world: World, name: str) -> None:
    world.admin.create_repo(f"{world.team}/{name}")


def no_room(world: World, name: str) -> None:
    world.admin.settings(storage_full=[*world.admin.settings()["storage_full"], f"{world.team}/{name}"])


# ------------------------------------------------------------------------------------------------------------ the table

FORCED = "forced"  # is force-pushed while its weights are copied
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def case(name: str) -> Model:
    """A model of a real class, as the table of formats has it; its reload is judged by that class."""
    options = dict(CASES[name].options)
    return Model(PUBLISHED, asked={**options, "size": f"{options['size']}B"})


MODELS: dict[str, Model] = {
    "single": Model(PUBLISHED, safetensors(1), short=True),
    "gguf": Model(PUBLISHED, gguf, short=True),
    "onnx": Model("source.no_weights", file("model.onnx", b"ONNX"), short=True),
    "sharded": Model(PUBLISHED, safetensors(2, 3), short=True),
    "t5": case("t5"),
    "gated": Model("source.gated", safetensors(3), set_up=gated(), short=True),
    "bin": Model(PUBLISHED, torch_file(4), short=True),
    "header": Model("checkpoint.header", damaged(lambda raw: raw[:8] + b"{" * 30 + raw[38:]), short=True),
    "gpt2": case("gpt2"),
    "bert": case("bert"),
    "bins": Model(PUBLISHED, torch_files(5, 3)),
    "index": Model(
        "checkpoint.absent_file", without("model-00002-of-00003.safetensors", safetensors(6, 3)), short=True
    ),
    "chatglm": case("chatglm"),
    "legacy": Model(PUBLISHED, torch_file(7, zipped=False), short=True),
    "length": Model("checkpoint.length", damaged(lambda raw: raw[:-100])),
    "mistral": case("mistral"),
    "corrupt": Model("proof.source_corrupt", safetensors(8), set_up=corrupt, short=True),
    "llama-merged": case("llama-merged"),
    "empty": Model("source.no_weights", nothing),
    "mixtral": case("mixtral"),
    "distributed": Model(PUBLISHED, distributed, short=True),
    "left": Model("usage.collision", safetensors(9), {"to": "{team}/same"}, short=True),
    "right": Model("usage.collision", safetensors(10), {"to": "{team}/same"}, short=True),
    "deepseek": case("deepseek"),
    "stray": case("stray"),
    "hidden": Model(
        "target.more_visible", safetensors(11), {"to": "{team}/hidden-cut"}, "team", hidden_and_its_target_is_not,
        short=True,
    ),
    "pipeline": Model(PUBLISHED, pipeline, short=True),
    "whisper": case("whisper"),
    FORCED: Model(PUBLISHED, safetensors(12, 2), short=True),
    "runs": Model("checkpoint.unsafe_pickle", pickled({"weight": torch.ones(3), "more": _Runs()})),
    "secret": Model(PUBLISHED, safetensors(13), {"credential": "lab"}, "lab", private, short=True),
    "sentence-transformers": case("sentence-transformers"),
    "unknown": Model("access.credential_unknown", safetensors(14), {"credential": "nobody"}, short=True),
    "gptj": case("gptj"),
    "fsdp": case("fsdp"),
    "adapted": Model(PUBLISHED, with_adapter),
    "adapter": Model("source.no_weights", adapter_alone),
    "granted": Model(PUBLISHED, safetensors(15), set_up=gated(US)),
    "private": Model("source.not_found", safetensors(16), set_up=private),
    "renamed": Model(PUBLISHED, safetensors(17, 2), set_up=renamed, short=True),
    "absent": Model("source.not_found", nothing, set_up=deleted),
    "fsdp-wrapped": case("fsdp-wrapped"),
    "revision": Model("source.no_revision", safetensors(18), {"revision": "v9"}),
    "fsdp-safetensors": case("fsdp-safetensors"),
    "pointer": Model("checkpoint.pointer", file("pytorch_model.bin", POINTER)),
    "gptq": case("gptq"),
    "whole": Model("checkpoint.unsafe_pickle", pickled(torch.nn.Linear(2, 2))),
    "awq": case("awq"),
    "complex": Model("checkpoint.unsupported", pickled({"weight": torch.ones(2, dtype=torch.complex128)})),
    "bnb-4bit": case("bnb-4bit"),
    "out": Model("checkpoint.unsafe_path", leads_out),
    "compressed-tensors": case("compressed-tensors"),
    "twice": Model("checkpoint.duplicate_tensor", twice),
    "fp8": case("fp8"),
    "half": Model("checkpoint.absent_file", without("model-00001-of-00002.safetensors", safetensors(19, 2))),
    "mxfp4": case("mxfp4"),
    "full": Model("hub.quota", safetensors(21), set_up=no_room),
    "scope": Model("access.credential_scope", safetensors(22), {"credential": "lab"}),
    "theirs": Model("access.target_not_allowed", safetensors(23), {"to": "{them}/cut"}),
    "branch": Model(PUBLISHED, safetensors(24), {"branch": "cut"}),
    "offered": Model(PUBLISHED, safetensors(25), {"pr": True}, set_up=has_a_target),
}  # fmt: skip


def table(names: Iterable[str]) -> dict[str, str]:
    """How each must end."""
    return {name: MODELS[name].ends for name in names}


def credentials(hub: HubProcess) -> str:
    """The workers' RESHARD_CREDENTIALS: one more token, which clients may ask for by its name."""
    return f'[[credential]]\nname = "lab"\nendpoint = "{hub.endpoint}"\nnamespace = "{LAB}"\nenv = "LAB_TOKEN"\n'


def build(names: Sequence[str], folder: Path) -> dict[str, dict[str, Tensors]]:
    """Makes each in a folder of its name; returns what the outputs must hold, by model and checkpoint."""
    made: dict[str, dict[str, Tensors]] = {}
    cases = [name for name in names if MODELS[name].build is None]
    if cases:
        command = [sys.executable, "-m", "tests.formats.child", "build", str(folder / "cases"), *cases]
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        subprocess.run(command, cwd=ROOT, env=env | {"HF_HOME": str(folder / "hf")}, check=True, capture_output=True)
    for name in names:
        here, builder = folder / name, MODELS[name].build
        if builder is None:
            (folder / "cases" / name / "source").rename(here)
            told = json.loads((folder / "cases" / name / "expected.json").read_text())
        else:
            here.mkdir()
            (here / "README.md").write_text(f"# {name}\n")
            told = {path: {n: described(t) for n, t in tensors.items()} for path, tensors in builder(here).items()}
        made[name] = {path: {n: (d, tuple(s), h) for n, (d, s, h) in tensors.items()} for path, tensors in told.items()}
    return made


@dataclass(frozen=True)
class World:
    """One run's own sources and targets on the Hub."""

    hub: HubProcess
    name: str
    models: Mapping[str, Mapping[str, Tensors]] = field(default_factory=dict)  # what ``build`` returned

    @property
    def admin(self) -> HubAdmin:
        return self.hub.admin

    @property
    def them(self) -> str:
        return f"them-{self.name}"

    @property
    def their_token(self) -> str:
        return f"hf_{self.them}"

    @property
    def team(self) -> str:
        return f"team-{self.name}"

    def repo(self, name: str) -> str:
        """The source."""
        owners = {"them": self.them, "team": self.team, "lab": LAB}
        return f"{owners[MODELS[name].owner]}/{name}"

    def target(self, name: str) -> str:
        return str(self._filled(MODELS[name].asked.get("to", f"{{team}}/{name}")))

    def make_accounts(self) -> None:
        """Before the workers look: they ask once where their token may write."""
        self.admin.create_user(self.them, token=self.their_token)
        self.admin.create_org(self.team, {US: "admin"})

    def put(self, folder: Path) -> None:
        """Every source, and what there is of the targets beforehand."""
        for name in self.models:
            self.admin.create_repo(self.repo(name))
            files = {path.relative_to(folder / name).as_posix(): path for path in (folder / name).rglob("*")}
            contents = {path: file.read_bytes() for path, file in files.items() if file.is_file()}
            heavy = [path for path, content in contents.items() if path.endswith(HEAVY) and content != POINTER]
            self.admin.put_files(self.repo(name), contents, lfs=heavy)
            MODELS[name].set_up(self, name)

    def catalog(self) -> str:
        """The file; what is JSON is YAML, too."""
        entries = []
        for name in self.models:
            asked = {what: self._filled(value) for what, value in MODELS[name].asked.items()}
            entries.append(f"- {json.dumps({'repo': self.repo(name), **asked})}")
        defaults = json.dumps({"to": f"{self.team}/{{name}}", "size": f"{SIZE}B"})
        return f"name: {self.name}\ndefaults: {defaults}\nentries:\n" + "\n".join(entries)

    def _filled(self, value: Any) -> Any:
        return value.format(team=self.team, them=self.them) if isinstance(value, str) else value

    def force_push(self) -> None:
        """The source's branch leads to a history without the commit that is being copied."""
        HfApi(self.hub.endpoint, self.their_token).super_squash_history(self.repo(FORCED))

    def became(self, seen: Seen) -> dict[str, str]:
        """How each model ended, as ``table`` has it."""
        ended = {repo.partition("/")[2]: ended for repo, ended in seen.ended}
        assert len(ended) == len(seen.ended), "an entry ended twice"
        return {name: how.error["code"] if how.error else how.outcome for name, how in ended.items()}

    def check(self) -> None:
        """What is published holds every tensor, by one commit of ours; where nothing is, nothing was begun."""
        for name, expected in self.models.items():
            target = self.target(name)
            if MODELS[name].ends != PUBLISHED:
                assert self._commits(target) <= 1, f"{name}: something was published"
                continue
            assert self._commits(target) == 2, f"{name}: not one commit of ours"
            fetch = from_hub(self.hub.endpoint, target, self._revision(name), TOKEN)
            for path, tensors in expected.items():
                home, _, file = path.removesuffix(".safetensors").rpartition("/")
                stem, _, variant = file.partition(".")
                assert read_checkpoint(fetch, stem, home, variant or None) == tensors, f"{name}: {path} differs"

    def _revision(self, name: str) -> str:
        asked = MODELS[name].asked
        return "refs/pr/1" if asked.get("pr") else asked.get("branch", "main")

    def _commits(self, target: str) -> int:
        """One makes the repository, or a change of its settings none."""
        try:
            return int(self.admin.state(target)["commits"])
        except HubRefused:
            return 0
