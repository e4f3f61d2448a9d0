"""``--fsdp-init`` for loaders with sizes: no file builds a large model, and config and checkpoint agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.plugin.test_init import MODEL, RULES, ruff

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

LOADING = """
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mypkg.model import Decoder

DTYPES = {"float32": torch.float32}
LARGE = LlamaConfig()


@dataclass
class ModelConfig:
    vocab: int = 128256
    width: int = 8192
    ffn: int = 28672
    n: int = 80
    heads: int = 64
    experts: int = 0
    tied: bool = False
    rope_theta: float = 500000.0


@dataclass
class Config:
    checkpoint: str
    dp_size: int
    model: ModelConfig = field(default_factory=ModelConfig)
    dtype: str = "float32"
    checkpoint_format: str = "safetensors"
    device: str = "cuda"
    tp_mesh: object = None


@dataclass
class Sizes:
    vocab_size: int = 128256
    hidden_size: int = 8192
    intermediate_size: int = 28672
    num_hidden_layers: int = 80
    num_attention_heads: int = 64


@dataclass
class Flat:
    folder: str
    sizes: Sizes | None = None
    device: torch.device = torch.device("cuda")


def build(config):
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def fill(model, folder, mesh, device):
    Path(folder, "was-called").touch()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    weights = load_file(Path(folder, "model.safetensors"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)
    return model


def to_llama(cfg):
    m = cfg.model
    return LlamaConfig(
        vocab_size=m.vocab, hidden_size=m.width, intermediate_size=m.ffn, num_hidden_layers=m.n,
        num_attention_heads=m.heads, tie_word_embeddings=m.tied,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
    )


def typed(cfg: Config):
    mesh = init_device_mesh(cfg.device, (cfg.dp_size,))
    assert DTYPES[cfg.dtype]
    return fill(build(to_llama(cfg)), cfg.checkpoint, mesh, cfg.device)


def untyped(cfg):
    mesh = init_device_mesh(cfg.device, (cfg.dp_size,))
    return fill(build(to_llama(cfg)), cfg.checkpoint, mesh, cfg.device)


def open_end(cfg, mesh):
    assert DTYPES[cfg.dtype]
    return fill(build(to_llama(cfg)), cfg.checkpoint, mesh, "cpu")


def dumped(cfg: Flat, mesh):
    return fill(build(LlamaConfig(**asdict(cfg.sizes))), cfg.folder, mesh, cfg.device)


def items(cfg, mesh):
    return fill(build(LlamaConfig(**cfg["model"])), cfg["path"], mesh, mesh.device_type)


def asked(cfg, mesh):
    assert DTYPES[cfg.get("dtype", "float32")]
    config = LlamaConfig(
        hidden_size=cfg.get("width", 4096), num_hidden_layers=cfg.get("n", 32), vocab_size=cfg["vocab"],
        num_attention_heads=cfg.get("heads", 32),
    )
    return fill(build(config), cfg["path"], mesh, "cpu")


def shortened(path, mesh, layers_to_keep=16):
    config = AutoConfig.from_pretrained(path, num_hidden_layers=layers_to_keep)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return fill(model, path, mesh, mesh.device_type)


def other_type(cfg, mesh):
    config = Qwen2Config(
        vocab_size=cfg.vocab, hidden_size=cfg.dim, num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads, num_key_value_heads=cfg.heads // 2, intermediate_size=cfg.dim * 4,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = fill(model, cfg.path, mesh, mesh.device_type)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig


def own_type(path, mesh):
    return OwnModel.from_pretrained(path)


class Loader:
    def __init__(self, folder, mesh):
        self.folder = folder
        self.mesh = mesh

    @classmethod
    def from_folder(cls, folder, dp_mesh, tp_mesh=None):
        return cls(folder, dp_mesh).load()

    def build(self):
        return build(LlamaConfig.from_pretrained(self.folder))

    def load(self):
        return fill(self.build(), self.folder, self.mesh, self.mesh.device_type)


def two_meshes(folder, dp_mesh, tp_mesh):
    loader = Loader(folder, dp_mesh)
    return loader.load()


def literal(path, mesh):
    return fill(build(LlamaConfig(hidden_size=4096, num_hidden_layers=32)), path, mesh, "cpu")


def constant(path, mesh):
    return fill(build(LARGE), path, mesh, "cpu")


def computed(path, mesh):
    sizes = load_file(path)
    return fill(build(LlamaConfig(**sizes)), path, mesh, "cpu")


@dataclass
class Args:
    vocab: int = 128256
    width: int = 8192


class Large(Decoder):
    def __init__(self, args):
        super().__init__(args.vocab, args.width)


def own(path, mesh):
    with torch.device("meta"):
        model = Large(Args())
    return shard(model, path, mesh)


def shard(model, path, mesh):
    Path(path, "was-called").touch()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    weights = load_file(Path(path, "model.safetensors"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


class Trainer:
    def __init__(self, settings):
        self.settings = settings
        self.model = self.make()

    def make(self):
        with torch.device("meta"):
            return Decoder(self.settings["vocab"], width=self.settings["width"])

    def load(self, path, mesh):
        model = shard(self.model, path, mesh)
        model.scale.fill_(self.settings["width"] ** -0.5)
        return model


def renamed(cfg, path, mesh):
    return Trainer(cfg.model).load(path, mesh)
"""


SLOW = ("untyped", "open_end", "dumped", "items", "asked", "shortened", "other_type", "renamed")


@pytest.fixture
def repository(project: Project) -> Project:
    project.write("mypkg/__init__.py", "")
    project.write("mypkg/model.py", MODEL)
    project.write("mypkg/loading.py", LOADING)
    return project


def written(project: Project, name: str) -> tuple[str, str]:
    """Return what ``--fsdp-init`` prints, and the file that it writes."""
    result = project.run(f"--fsdp-init=mypkg.loading:{name}")
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return result.stdout.str(), (project.path / f"test_{name.rpartition('.')[2]}.py").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("typed", "Loader.from_folder"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW),
    ],
)
def test_sizes_are_small_and_fit_the_checkpoint(repository: Project, name: str) -> None:
    output, _ = written(repository, name)
    assert "nothing is left to fill in" in output
    ruff(repository, "check", "--isolated", "--line-length=88", f"--select={RULES}", "--extend-exclude=mypkg")
    ruff(repository, "format", "--isolated", "--check", "--exclude=mypkg")
    result = repository.run(f"test_{name.rpartition('.')[2]}.py")
    assert result.parseoutcomes() == {"passed": 39, "skipped": 20}, result.stdout.str()


def test_defaults_of_a_dataclass_become_small_where_they_are_sizes(repository: Project) -> None:
    _, text = written(repository, "typed")
    config = "\n".join(
        [
            'def make_config(folder, device="cpu", world_size=1):',
            '    """Return a cfg with small sizes and paths to this folder."""',
            "    return Config(",
            "        checkpoint=str(folder),",
            "        dp_size=world_size,",
            "        model=ModelConfig(",
            *(f"            {size}," for size in ("vocab=120", "width=32", "ffn=64", "n=2", "heads=4")),
            "        ),",
            "        device=device,",
            "    )",
        ]
    )
    assert config in text, "0 experts, the dtype, the format and the rope stay as they are"
    assert "cfg = make_config(checkpoint, device=fsdp.device.type, world_size=fsdp.world_size)" in text
    assert "        num_key_value_heads=4,\n" in text, "LlamaConfig has as many as heads, tiny_config has two"
    assert '        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},\n' in text


TODOS = {
    "literal": r"literal builds a model of 6,738,415,616 parameters; let it take smaller sizes",
    "constant": r"constant builds a model of 6,738,415,616 parameters; let it take smaller sizes",
    "computed": r"a folder with model.safetensors with small weights; tmp_path_factory",
    "own": r"Large has 2,[\d,]+ parameters; let own take smaller sizes from an argument",
    "own_type": r"return a folder that save_pretrained wrote; tiny_checkpoint does not know the type 'own'",
    "two_meshes": r"what two_meshes gets as tp_mesh; fsdp.mesh has the dimensions of @fsdp_conformance\(mesh=...\)",
}


@pytest.mark.parametrize("name", TODOS)
def test_an_open_todo_fails_before_the_loader_is_called(repository: Project, name: str) -> None:
    output, _ = written(repository, name)
    found = re.search(rf"^  line \d+: ({TODOS[name]})", output, re.MULTILINE)
    assert found, output
    first = found[1][:40]  # it is wrapped
    result = repository.run(f"test_{name}.py")
    assert not {"passed", "failed", "skipped"} & result.parseoutcomes().keys(), result.stdout.str()
    assert re.search(rf"Failed: TODO in line \d+: {re.escape(first)}", result.stdout.str())
    assert not list(repository.path.rglob("was-called"))


def test_another_mesh_keeps_its_default_and_the_number_of_ranks_is_left_to_the_run(repository: Project) -> None:
    _, text = written(repository, "Loader.from_folder")
    assert "    model = Loader.from_folder(folder=checkpoint, dp_mesh=fsdp.mesh)\n" in text
    assert "\n@fsdp_conformance\ndef test_from_folder(" in text


def test_the_docs_have_the_sizes() -> None:
    from pytest_fsdp_meta.transformers import tiny_config

    page = (ROOT / "docs" / "transformers.md").read_text("utf-8").partition("### The sizes of a tiny checkpoint")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|$", page, re.MULTILINE))
    config = tiny_config("llama").to_dict()
    assert len(table) == 8
    assert {name: str(config[name]) for name in table} == table
    assert config["rope_parameters"]["rope_theta"] == 10000
