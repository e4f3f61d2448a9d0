"""Choose values by what a name, an annotation and a default say, where these suffice; the loader's use decides else."""

from __future__ import annotations

import inspect
from typing import Any

EMPTY = inspect.Parameter.empty
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
"""Small sizes for numbers, by a word of their name; the first word that fits decides."""
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
VARIABLES = {
    "fsdp": ("fsdp", "None", "fsdp"),
    "mesh": ("mesh", "None", "fsdp.mesh"),
    "group": ("group", "None", "fsdp.mesh.get_group()"),
    "local_rank": ("local_rank", "0", "fsdp.local_rank"),
    "rank": ("rank", "0", "fsdp.rank"),
    "world_size": ("world_size", "1", "fsdp.world_size"),
    "device_type": ("device", '"cpu"', "fsdp.device.type"),
    "device": ("device", '"cpu"', "fsdp.device.type"),
}
"""Role -> the parameter of ``make_config`` for it, its value outside of ranks, and its value on a rank."""
FROM_RANK = {**{role: names[2] for role, names in VARIABLES.items()}, "device": "fsdp.device"}
"""What an argument of this role gets; all of it exists on ranks only."""
RANKS = {"rank", "global_rank", "world_rank", "dp_rank", "process_rank", "my_rank"}
WORLD_SIZES = {
    *{"world_size", "num_ranks", "nranks", "dp_world_size", "data_parallel_size"},
    *(f"{axis}_{word}" for axis in ("dp", "fsdp") for word in ("size", "degree")),
}
OTHER_MESHES = {"tp", "pp", "cp", "ep", "sp", "tensor", "pipeline", "context", "expert", "sequence"}
"""Words of a mesh that does not shard parameters as FSDP does."""
LARGE = 64
"""The largest default of an integer of unknown meaning that the test leaves as it is."""


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
    if annotation is EMPTY:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def expression_for(name: str, annotation: Any, default: Any, *, is_argument: bool) -> tuple[str, str, bool]:
    """Return the role, the expression for the value ("" where the use has to decide), and whether the default stays."""
    role, kind = role_of(name, annotation), annotation_text(annotation)
    has_default = default is not EMPTY
    if has_default and (default is None or isinstance(default, bool)) and not (is_argument and role):
        return role, "", True
    if role in VARIABLES:
        if has_default and not is_argument and role in ("fsdp", "mesh", "group"):
            return role, "", True
        value = FROM_RANK[role] if is_argument else VARIABLES[role][0]
        if role == "device" and is_argument and kind == "str":
            value = f"str({value})"
        is_object = role == "device" and not is_argument and getattr(annotation, "__module__", "") == "torch"
        return role, f"torch.device({value})" if is_object else value, False
    if role == "checkpoint" and not (isinstance(default, str) and not is_argument and not _is_path(name, default)):
        folder = "checkpoint" if is_argument else "folder"
        return role, folder if "Path" in kind or (is_argument and not kind) else f"str({folder})", False
    if not has_default:
        return role, _small(name, kind), False
    if isinstance(default, int) and default > 1:  # 0 and 1 switch something off
        small = _small(name, "int", unknown="" if default <= LARGE else "4")
        return role, small, not small
    return role, "", True


def _is_path(name: str, default: str) -> bool:
    return "/" in default or name.lower().split("_")[-1] in {*PATHS, "id", "name"}


def _small(name: str, kind: str, unknown: str = "4") -> str:
    if kind == "bool":
        return "False"
    if name in PLAIN and kind in ("", "int", "float"):
        return PLAIN[name]
    if kind == "int":
        return next((str(size) for word, size in SIZES.items() if word in name.lower().split("_")), unknown)
    return "1.0" if kind == "float" else ""
