"""Choose values for the parameters of a loader and for what it reads of its config, by their names and annotations."""

from __future__ import annotations

import inspect
from typing import Any

CONFIGS = {"cfg", "config", "configuration", "conf", "args", "hparams", "settings", "options", "opts"}
PATHS = {"path", "checkpoint", "ckpt", "folder", "dir", "directory", "weights", "pretrained", "file"}
MODELS_BY_NAME = {"model_id", "model_name", "repo_id", "name_or_path"}
SIZES = {
    **dict.fromkeys(("layer", "layers", "depth", "blocks"), 2),
    **dict.fromkeys(("head", "heads", "experts"), 4),
    **dict.fromkeys(("vocab", "vocabulary"), 128),
    **dict.fromkeys(("intermediate", "ffn", "mlp", "ff"), 64),
    **dict.fromkeys(("length", "len", "positions", "context", "seq"), 64),
    **dict.fromkeys(("hidden", "width", "dim", "embd", "embed", "embedding"), 32),
}
"""Small sizes by a word of a name, for names about which nothing else is known; the first word that fits decides."""
PLAIN = {
    **dict.fromkeys(("lr", "learning_rate"), "1e-3"),
    **dict.fromkeys(("dropout", "weight_decay"), "0.0"),
    **dict.fromkeys(("eps", "norm_eps"), "1e-5"),
    "seed": "0",
    "d_model": "32",
    "head_dim": "8",
    "top_k": "2",
    "rope_theta": "10000.0",
    "reshard_after_forward": "True",
    **dict.fromkeys((f"{axis}_{word}" for axis in ("tp", "pp", "cp", "ep") for word in ("size", "degree")), "1"),
}
"""Values by a whole name."""
FROM_RANK = {
    "fsdp": "fsdp",
    "mesh": "fsdp.mesh",
    "group": "fsdp.mesh.get_group()",
    "local_rank": "fsdp.local_rank",
    "rank": "fsdp.rank",
    "world_size": "fsdp.world_size",
    "device_type": "fsdp.device.type",
    "device": "fsdp.device",
}
"""What a parameter of this role gets; all of it exists on ranks only."""
RANKS = {"rank", "global_rank", "world_rank", "dp_rank", "process_rank", "my_rank"}
WORLD_SIZES = {
    *{"world_size", "num_ranks", "nranks", "dp_world_size", "data_parallel_size"},
    *(f"{axis}_{word}" for axis in ("dp", "fsdp") for word in ("size", "degree")),
}
OTHER_MESHES = {"tp", "pp", "cp", "ep", "sp", "tensor", "pipeline", "context", "expert", "sequence"}
"""Words of a mesh that does not shard parameters as FSDP does."""


def role_of(name: str, annotation: Any) -> str:
    """Return what a parameter is: a key of ``FROM_RANK``, "checkpoint", "config", or "" where that cannot be known."""
    words, kind = name.lower().strip("_").split("_"), annotation_text(annotation)
    if name == "fsdp":
        return "fsdp"
    if "mesh" in words or "DeviceMesh" in kind:
        return "mesh"
    if name in ("local_rank", "device_type"):
        return name
    if name.strip("_") in RANKS:
        return "rank"
    if name.strip("_") in WORLD_SIZES:
        return "world_size"
    if words[-1] in ("group", "pg") or "ProcessGroup" in kind:
        return "group"
    if words[-1] in ("device", "dev") or kind in ("torch.device", "device"):
        return "device"
    if CONFIGS.intersection(words) and not PATHS.intersection(words) and "name" not in words:
        return "config"
    if kind in ("bool", "int", "float"):
        return ""
    if (PATHS.intersection(words) and not CONFIGS.intersection(words)) or "Path" in kind or name in MODELS_BY_NAME:
        return "checkpoint"
    return ""


def annotation_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def guess(name: str, annotation: Any, folder: str) -> str:
    """Return the expression for a value of this name; "" where none can be guessed. ``folder`` is the checkpoint's."""
    words, kind = name.lower().split("_"), annotation_text(annotation)
    if role_of(name, annotation) == "checkpoint":
        return folder if "Path" in kind else f"str({folder})"
    if name in PLAIN:
        return PLAIN[name]
    if kind == "bool":
        return "False"
    if kind in ("", "int") and "name" not in words:
        return next((str(size) for word, size in SIZES.items() if word in words), "")
    return ""
