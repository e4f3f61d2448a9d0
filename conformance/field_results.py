"""What the field sweep found per architecture, and what is already known of these versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.catalogue import built_in

FUSED = {"params_equal_reference"}
"""Weights that are fused in the model or in the checkpoint: transformers shards first, then fuses or splits."""
THAWED = {"requires_grad_matches_reference"}
"""Parameters that are built frozen: loading on one device makes them trainable, loading shards leaves them frozen."""
STALE = {"forward_sees_current_weights"}
"""A tied head or embedding that computes with the weights of before the step, because the vocabulary is uneven."""
ONE_GROUP = {"step_memory_bounded"}
"""All blocks in the root's group: the FSDP plan has "layers" where the model has "h", "blocks" or "encoder.layer"."""
PLAN_OF_OTHER_NAMES = [
    "bert",
    "bert-generation",
    "big_bird",
    "bloom",
    "camembert",
    "codegen",
    "cpmant",
    "ctrl",
    "data2vec-text",
    "dbrx",
    "electra",
    "ernie",
    "falcon",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "megatron-bert",
    "mpt",
    "openai-gpt",
    "reformer",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
    "xmod",
]
OF_ANY_SIZE: dict[str, set[str]] = {
    **dict.fromkeys(PLAN_OF_OTHER_NAMES, ONE_GROUP),
    "falcon_h1": {"no_uninitialized_memory"},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid"), FUSED),
    "hrm_text": FUSED | ONE_GROUP,
    **dict.fromkeys(("afmoe", "blt", "ernie4_5_moe", "laguna"), THAWED),
    **dict.fromkeys(("marian", "moss_transcribe_diarize", "pegasus"), THAWED),
    "roformer": THAWED | ONE_GROUP,
}
UNEVEN_AND_TIED = [
    "bart",
    "bert",
    "bert-generation",
    "big_bird",
    "biogpt",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "camembert",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere_compass_text",
    "ctrl",
    "data2vec-text",
    "electra",
    "ernie",
    "ernie4_5",
    "ernie4_5_moe",
    "falcon",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "got_ocr2",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox_japanese",
    "granite_swa",
    "jetmoe",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "marian",
    "mbart",
    "megatron-bert",
    "minicpm3",
    "modernbert-decoder",
    "moss_transcribe_diarize",
    "mpt",
    "mvp",
    "openai-gpt",
    "opt",
    "pegasus",
    "plbart",
    "prophetnet",
    "recurrent_gemma",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "smollm3",
    "starcoder2",
    "trocr",
    "vaultgemma",
    "whisper",
    "xglm",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
    "xmod",
    "youtu",
    "zamba",
    "zamba2",
    "zaya",
]
REDUCED_AGAIN = {"grad_accumulation_parity"}
"""Norms of heads, whose gradients a hook adds up over the ranks in every backward: those of earlier ones once more."""
HEAD_NORMS = [
    "beam",
    "dots1",
    "dots3_note",
    "dots3_note_text",
    "exaone4",
    "exaone_moe",
    "gemma3",
    "gemma3_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "hy_v3",
    "kolibri1",
    "laguna",
    "mellum",
    "moss_transcribe_diarize",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
]
TENSOR_PARALLEL: dict[str, set[str]] = {
    **dict.fromkeys(HEAD_NORMS, REDUCED_AGAIN),
    # Parameters of an activation between sharded layers: nothing adds up their gradients.
    "apertus": {"grad_parity"},
    "gemma3n_text": {"loss_parity"},
    "hrm_text": FUSED,
    # The plan says "colwise" of two fused weights, and each rank has a part of both. The reference gets those rows.
    "inkling2_text": {"params_equal_reference", "loss_parity"},
}
ALSO_WITH_TP = ["afmoe", "bailing_hybrid", "ernie4_5_moe", "hrm_text", "kimi_linear", "laguna", "olmo_hybrid"]
ALSO_WITH_TP += ["moss_transcribe_diarize"]
"""Model types of which FSDP2 beside tensor parallelism shows what FSDP2 alone shows."""
TASKS = (
    "seq2seq",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "image-classification",
    "audio-classification",
    "image-text-to-text",
)
"""Classes of models that are no causal language models, as fixtures/architectures.py names them."""
ACCEPTED = Path(__file__).with_name("field_accepted.json")
"""For these classes: what was seen and understood, by loader and model type; types without an entry are clean."""
FINDINGS: dict[str, dict[str, set[str]]] = {
    "plain": {},
    "plain-uneven": {},
    "transformers": OF_ANY_SIZE,
    "transformers-tp": TENSOR_PARALLEL,
    "transformers-fsdp-tp": TENSOR_PARALLEL | {name: OF_ANY_SIZE[name] for name in ALSO_WITH_TP},
    "transformers-uneven": OF_ANY_SIZE | {name: STALE | OF_ANY_SIZE.get(name, set()) for name in UNEVEN_AND_TIED},
}
"""Known findings of transformers 5.23.0 by loader; see results/systems.md. Remove those that a release fixes."""

KNOWN_ERRORS = {loader: ("has overlapping chunks",) if loader.endswith("-tp") else () for loader in FINDINGS}
"""Parts of errors that are known: torch's checkpoints refuse weights whose fused parts are sharded each by itself."""

ALL_SHARED = (
    "the configuration demands that all layers share their keys and values, and `kv_sharing_modes` refuses that"
)
WITHOUT_CHECKPOINT = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), ALL_SHARED),
    "gemma3n": "its vision tower is from timm, which requires torchvision (`gemma3n_text` is judged)",
}
"""Why no tiny checkpoint can be made, by architecture."""

_MODULE_LISTS = {"musicgen", "musicgen_melody"}
RAISING: dict[str, set[str]] = {
    "plain": set(),
    "plain-uneven": set(),
    "transformers": _MODULE_LISTS,
    "transformers-uneven": {*_MODULE_LISTS, "hrm_text"},
    "transformers-tp": set(),
    "transformers-fsdp-tp": set(),
}
"""Architectures whose loader raises: its plan shards a ModuleList, which has no forward, or it compares the shape of a
fused weight with that of one uneven shard."""

UNTRAINABLE = {"blt", "git", "musicgen", "musicgen_melody", "xlstm"}
"""Architectures that one device cannot train either, from tokens alone; their loading is judged."""

_FORWARD_RAISES = {"doge", "gemma4", "inkling_text", "llama4", "llama4_text"}
NOT_TRAINED = {loader: UNTRAINABLE | (_FORWARD_RAISES if loader.endswith("-tp") else set()) for loader in FINDINGS}
"""Architectures that cannot be trained, by loader: the forward raises where the model is tensor-parallel, too."""

TRAINING_CHECKS = {check.id for check in built_in() if {"training", "training_mode", "continued"} & set(check.needs)}
"""Checks that cannot be judged if the model cannot be trained."""
NOT_TRAINABLE = "training"
"""What stands for the errors of checks of ``TRAINING_CHECKS`` among what was accepted."""


@dataclass
class ArchitectureResult:
    """The outcome of every check for one architecture."""

    name: str
    checkpoint_error: str = ""
    """Why no tiny checkpoint could be made."""
    loader_error: str = ""
    """Why the loader failed, so that there was nothing to judge."""
    passed: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def not_judged(self) -> str:
        """Why nothing was judged, else ""."""
        if self.checkpoint_error:
            return f"no checkpoint: {self.checkpoint_error}"
        return f"the loader failed: {self.loader_error}" if self.loader_error else ""

    @property
    def clean(self) -> bool:
        """Whether the architecture was judged without a finding."""
        return not self.not_judged and not self.findings

    def summarise(self) -> str:
        """Return the outcome in one line."""
        failed = {
            id: f"{messages[0]}" + f" and {len(messages) - 1} more" * (len(messages) > 1)
            for id, messages in self.findings.items()
        }
        return self.not_judged or "; ".join(f"{id}: {why}" for id, why in {**failed, **self.errors}.items()) or "clean"

    def unexpected(self, loader: str) -> Iterator[str]:
        """Yield a line for each difference from what is known."""
        if loader not in FINDINGS:
            yield from self._differences(accepted(loader).get(self.name, {}))
            return
        known_to_stop = self.name in (WITHOUT_CHECKPOINT if self.checkpoint_error else RAISING[loader])
        if self.not_judged:
            yield from [] if known_to_stop else [f"{self.name}: {self.not_judged}"]
            return
        if self.name in WITHOUT_CHECKPOINT or self.name in RAISING[loader]:
            yield f"{self.name}: can be judged now"
        known = FINDINGS[loader].get(self.name, set())
        yield from (f"{self.name}: {id}: {found[0]}" for id, found in self.findings.items() if id not in known)
        yield from (f"{self.name}: {id} has no finding any more" for id in sorted(known - set(self.findings)))
        excused = TRAINING_CHECKS if self.name in NOT_TRAINED[loader] else set()
        for id, reason in self.errors.items():
            if id not in excused and not any(text in reason for text in KNOWN_ERRORS[loader]):
                yield f"{self.name}: {id}: error: {reason}"
        if excused and self.clean and not self.errors:
            yield f"{self.name}: can be trained now"

    def outcome(self) -> dict[str, Any]:
        """Return what is not clean: why nothing was judged, or the checks with findings and those without a verdict."""
        if self.not_judged:
            return {"stopped": "no checkpoint" if self.checkpoint_error else "the loader failed"}
        errors = [NOT_TRAINABLE] if self.errors and TRAINING_CHECKS.issuperset(self.errors) else sorted(self.errors)
        return {key: ids for key, ids in (("findings", sorted(self.findings)), ("errors", errors)) if ids}

    def _differences(self, known: Mapping[str, Any]) -> Iterator[str]:
        found = self.outcome()
        if found.get("stopped") != known.get("stopped"):
            yield f"{self.name}: {self.not_judged or 'can be judged now'}"
            return
        now = {
            NOT_TRAINABLE: "; ".join(dict.fromkeys(self.errors.values())),
            **self.errors,
            **{id: messages[0] for id, messages in self.findings.items()},
        }
        for key, appeared in (("findings", "finding"), ("errors", "error")):
            ids, before = set(found.get(key, ())), set(known.get(key, ()))
            yield from (f"{self.name}: {id}: new {appeared}: {now[id]}" for id in sorted(ids - before))
            yield from (f"{self.name}: {id} has no {appeared} any more" for id in sorted(before - ids))


def accepted(loader: str) -> dict[str, dict[str, Any]]:
    """Return what was accepted of a loader, by model type."""
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(ACCEPTED.read_text("utf-8"))
    return known.get(loader, {})


def accept(loader: str, rows: Iterable[ArchitectureResult]) -> None:
    """Accept these results of a loader instead of the earlier ones."""
    known = json.loads(ACCEPTED.read_text("utf-8"))
    known[loader] = {row.name: outcome for row in rows if (outcome := row.outcome())}
    ACCEPTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
