"""Tiny configurations and checkpoints of transformers' models.

Every size of a configuration is reduced as far as its architecture allows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pytest_fsdp_meta.text import did_you_mean

CAUSAL_LMS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""All model types that have a causal language model, in transformers' order."""

MAX_PARAMETERS = 8_000_000
"""The largest number of parameters of a tiny model; one with more has a size that ``tiny_config`` does not reduce."""
SEED = 7
STANDARD_DEVIATION = 0.05
"""The standard deviation of all weights."""

SIZES: dict[str, Any] = {
    # width and depth; families use different names
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    "dim": 32,
    **dict.fromkeys(("attention_hidden_size", "emb_dim", "embedding_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("feed_forward_size", "d_ff", "n_inner", "intermediate_size_mlp", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "depth", "num_blocks"), 2),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_attention_groups", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "index_head_dim", "attention_window"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "index_topk"), 4),
    **dict.fromkeys(("index_n_heads", "num_global_layers"), 2),
    "sliding_window": 16,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_num_shared_experts", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
    # state space models and linear attention
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "time_step_rank"), 4),
    **dict.fromkeys(("linear_num_key_heads", "expand"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 32,
    "use_mamba_kernels": False,
    # embeddings
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 120),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    "entity_vocab_size": 50,
    # images: two or four patches a side
    **dict.fromkeys(("image_size", "out_hidden_size", "embed_dim"), 32),
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

REVEALING: dict[str, Any] = {
    **{name: {32: 48, 64: 56}[size] for name, size in SIZES.items() if size in (32, 64) and name != "image_size"},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 72),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 127),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 5),
    "moe_intermediate_size": 40,
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 28),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 12),
    "mamba_d_ssm": 48,
}
"""Sizes that differ from each other, with a vocabulary and a number of experts that two ranks do not divide.

A square weight hides that it was transposed, and equal shards hide a wrong offset. Kernels of experts need multiples of
eight.
"""

LISTED: dict[str, Callable[[list[int]], list[int]]] = {
    **dict.fromkeys(("hidden_sizes", "embed_dims", "embed_dim"), lambda widths: [width // 8 for width in widths]),
    **dict.fromkeys(("depths", "depth", "num_heads", "num_attention_heads"), lambda counts: [1] * len(counts)),
    **dict.fromkeys(("image_size",), lambda lengths: [32] * len(lengths)),
}
"""How lists are reduced, which have a size for each stage or direction."""

UNSET_WHEN_NONE = ("head_dim", "moe_intermediate_size", "query_pre_attn_scalar", "ffn_hidden_size")
"""Sizes that stay unset if their default is None, because the architecture then derives them from others."""

MLA = {"num_key_value_heads": 4, "head_dim": 4}
"""Multi-head latent attention: as many key heads as query heads, and a separate size for rotary embeddings."""
KDA = {**MLA, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4}
"""Kimi delta attention, a linear attention used together with latent attention."""
SHARED_BLOCKS = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
"""Blocks whose weights later layers share: attention is twice as wide as the model, with at least two blocks."""
PADDED = {"pad_token_id": 1}
"""A padding token is required: positions are counted from it, or the config's validation demands it."""
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {"rope_parameters": {**ROTARY, "mrope_section": [1, 1, 2]}}
"""Rotary embeddings of time, height and width, which share half of a head's width."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "youtu"), MLA),
    **dict.fromkeys(("camembert", "data2vec-text", "modernbert-decoder", "roberta", "roberta-prelayernorm"), PADDED),
    **dict.fromkeys(("xlm", "xlm-roberta", "xlm-roberta-xl", "nomic_bert", "qwen3_asr"), PADDED),
    **dict.fromkeys(("emu3_text_model", "gemma4_text", "gemma4_unified_text"), PADDED),
    **dict.fromkeys(("t5_gemma_module", "t5gemma2_decoder"), PADDED),
    **dict.fromkeys(("zamba", "zamba2"), SHARED_BLOCKS),
    "bailing_hybrid": {**KDA, "num_expert_group": 1},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}},
    "ernie4_5_moe": {"moe_k": 2},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "intermediate_size": [64, 64],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        "backbone_hidden_size": 32,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": KDA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_vision_model": {"projector_input_dim": 32, "projector_output_dim": 32},
    "longcat_flash": {**MLA, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "prophetnet": {
        **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
        **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
        "pad_token_id": 0,
    },
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), MROPE),
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_ocr_text", "glmga_text"), MROPE),
    "glm4v_moe_text": {"rope_parameters": {**ROTARY, "mrope_section": [0, 1, 1]}},
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 120, "shape_vocab_size": 120},
    "xmod": {**PADDED, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes by model type where the validation or the arithmetic of an architecture requires other values."""


def tiny_config(model_type: str, *, revealing: bool = False, **sizes: Any) -> PretrainedConfig:
    """Return the configuration of a model type with all its sizes reduced; ``sizes`` override the reduced ones.

    It has two layers, of two kinds if the architecture has several, and a vocabulary of 120 tokens. If ``revealing``,
    the sizes differ from each other as far as the architecture allows, the vocabulary has 127 tokens, and there are
    five experts. Raises ValueError for a model type that transformers does not know.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model type {model_type!r}{did_you_mean(model_type, CONFIG_MAPPING)}")
    return _shrink(CONFIG_MAPPING[model_type], sizes, SIZES | REVEALING if revealing else SIZES)


def _shrink(kind: type[PretrainedConfig], sizes: Mapping[str, Any], usual: Mapping[str, Any]) -> PretrainedConfig:
    """Build a config of a class; the sizes of a sub-config, such as ``text_config``, may be a dict."""
    overrides = {**EXCEPTIONS.get(kind.model_type, {}), **sizes}
    try:
        default = kind()
    except (ValueError, StrictDataclassError):  # the default does not pass the architecture's own validation
        default = kind(**overrides)
    reduced = _sizes_for(default.to_dict(), usual)
    for name, part in kind.sub_configs.items():
        value, part_sizes = getattr(default, name, None), overrides.get(name, {})
        if value is not None and isinstance(part_sizes, dict):
            part_kind = type(value) if part is AutoConfig else part
            own = {key: size for key, size in part_sizes.items() if key != "model_type"}
            reduced[name] = _shrink(part_kind, own, usual)
            overrides.pop(name, None)
    return kind(**{**reduced, **overrides})


def _sizes_for(default: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usual sizes that a configuration has, and for lists of layer kinds two layers of different kinds."""
    sizes = {name: value for name, value in usual.items() if name in default}
    for name, value in default.items():
        if name in LISTED and isinstance(value, list) and all(isinstance(size, int) for size in value):
            sizes[name] = LISTED[name](value)
    for name in UNSET_WHEN_NONE:
        if name in sizes and default[name] is None:
            del sizes[name]
    for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
        if default.get(name):
            sizes[name] = (list(dict.fromkeys(default[name])) * 2)[:2]
    return sizes


def tiny_checkpoint(
    model_type: str,
    folder: str | os.PathLike[str],
    *,
    auto_class: Any = AutoModelForCausalLM,
    revealing: bool = False,
    **sizes: Any,
) -> Path:
    """Write a tiny checkpoint of this type's causal language model with ``save_pretrained`` and return its folder.

    ``auto_class`` names another class of the model, such as AutoModelForSequenceClassification. The bits are the same
    every time. ``sizes`` override those of ``tiny_config``. If ``revealing``, its sizes are used, and saved buffers are
    not constant either. Raises ValueError for a model type without such a class and
    for a model that would not be tiny; architectures may raise their own errors for sizes that they do not support.
    """
    config, build = _recipe(model_type, auto_class, {"revealing": revealing, **sizes})
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build(config).parameters())
    except ValueError as error:
        if not str(error).startswith("Unrecognized configuration class"):  # its message lists all that have one
            raise
        raise ValueError(f"{model_type!r} has no class for transformers.{auto_class.__name__}") from None
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"{model_type}: {size:,} parameters, but should be at most {MAX_PARAMETERS:,}; pass smaller sizes"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build(config)
        buffers = dict(model.named_buffers())
        for parameter in model.parameters():
            # Norms and biases are initialised with ones and zeros, so a loader that skips them would go unnoticed.
            if parameter.ndim:
                torch.nn.init.normal_(parameter, mean=parameter.data.float().mean().item(), std=STANDARD_DEVIATION)
        for name, tensor in model.state_dict().items() if revealing else ():
            if tensor.ndim and tensor.is_floating_point() and name in buffers and (tensor == tensor.flatten()[0]).all():
                tensor += STANDARD_DEVIATION * torch.rand_like(tensor)  # a variance stays positive
    model.save_pretrained(folder)
    return Path(folder)


def _recipe(model_type: str, auto_class: Any, sizes: dict[str, Any]) -> tuple[PretrainedConfig, Any]:
    if auto_class is AutoModelForCausalLM:
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{model_type!r} has no causal language model; CAUSAL_LMS lists the types that have one")
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        config = tiny_config(model_type, **sizes)
        if isinstance(config, kind.config_class):
            return config, kind
        # The text decoder of a speech model takes the decoder's part of the config.
        parts = (getattr(config, name) for name in config.sub_configs)
        return next((part for part in parts if isinstance(part, kind.config_class)), config), kind
    config = tiny_config(model_type, **sizes)
    config.architectures = []  # where a type has several classes, from_config iterates over them, and fails on None
    return config, auto_class.from_config
