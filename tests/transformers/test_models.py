"""``pytest_fsdp_meta.transformers``: tiny configurations, tiny checkpoints, and the subject derived from one."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    PreTrainedModel,
)

from fixtures.releases import needs_recent_types
from pytest_fsdp_meta.transformers import (
    CAUSAL_LMS,
    reference_model,
    subject,
    tiny_checkpoint,
    tiny_config,
    token_batch,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "llama")


def test_importing_the_plugin_imports_no_library_that_it_serves() -> None:
    code = (
        "import pytest_fsdp_meta, pytest_fsdp_meta.plugin, sys; "
        "assert not {'torch', 'transformers', 'hypothesis'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sizes_of_a_tiny_configuration() -> None:
    config = tiny_config("llama")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 2, 120)
    assert tiny_config("llama", hidden_size=16, head_dim=4).hidden_size == 16
    assert len(set(tiny_config("gemma3_text").layer_types)) == 2


@pytest.mark.parametrize("model_type", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_revealing_checkpoint_has_no_square_weights_and_no_constants(tmp_path: Path, model_type: str) -> None:
    model = reference_model(tiny_checkpoint(model_type, tmp_path / "here", revealing=True))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.ndim}
    assert not [name for name, t in tensors.items() if t.ndim > 1 and t.shape[-1] == t.shape[-2]]
    assert not [name for name, t in tensors.items() if (t == t.flatten()[0]).all()]
    assert model.config.vocab_size % 2
    assert tiny_config("llama", revealing=True, vocab_size=50).vocab_size == 50


def test_parts_of_a_configuration_are_tiny_too() -> None:
    assert tiny_config("mllama").text_config.hidden_size == 32
    given = tiny_config("mllama", text_config={"vocab_size": 50})
    assert (given.text_config.vocab_size, given.text_config.hidden_size) == (50, 32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: tiny_config("lama"), "has no model type 'lama'; did you mean 'llama'?"),
        (lambda folder: tiny_checkpoint("clip", folder), "'clip' has no causal language model"),
        (
            lambda folder: tiny_checkpoint("llama", folder, auto_class=AutoModelForMaskedLM),
            "'llama' has no class for transformers.AutoModelForMaskedLM",
        ),
        (lambda folder: tiny_checkpoint("llama", folder, vocab_size=10**6), "should be at most 8,000,000"),
    ],
)
def test_impossible_requests_are_errors(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"llama|clip") as error:
        make(tmp_path)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=needs_recent_types) for name in ("mllama", "musicgen", "internlm3"))],
)
def test_a_tiny_checkpoint_loads_with_its_class(tmp_path: Path, model_type: str) -> None:
    assert model_type in CAUSAL_LMS
    model = reference_model(tiny_checkpoint(model_type, tmp_path / "here"))
    assert isinstance(model, PreTrainedModel)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    ones = [name for name, parameter in model.named_parameters() if torch.equal(parameter, torch.ones_like(parameter))]
    assert not ones, "norms of ones would look loaded even if a loader skipped them"


def test_a_checkpoint_has_the_same_bits_every_time(tmp_path: Path, llama: Path) -> None:
    state = torch.get_rng_state()
    second = tiny_checkpoint("llama", tmp_path / "second")
    assert torch.equal(torch.get_rng_state(), state)
    ours, theirs = (load_file(path / "model.safetensors") for path in (llama, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_batches_are_repeatable_and_differ_by_step(llama: Path) -> None:
    batch = token_batch(1, llama, rows=6, length=5)
    assert batch["input_ids"].shape == (6, 5)
    assert torch.equal(batch["input_ids"], token_batch(1, llama, rows=6, length=5)["labels"])
    assert not torch.equal(batch["input_ids"], token_batch(2, llama, rows=6, length=5)["input_ids"])


def test_the_subject_of_a_checkpoint(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    derived = subject(model, llama, rows=6)
    assert derived.model is model
    build, batch = (pickle.loads(cloudpickle.dumps(function)) for function in (derived.reference, derived.batch))
    assert type(build()) is LlamaForCausalLM
    assert build() is not model
    assert torch.equal(batch(3)["labels"], token_batch(3, llama, rows=6)["labels"])
    assert model(**batch(0)).loss.ndim == 0


def test_declared_fields_override_derived_ones(llama: Path) -> None:
    declared = subject(AutoModelForCausalLM.from_pretrained(llama), llama, reference=llama, frozen="lm_head.weight")
    assert (declared.reference, declared.frozen) == (llama, "lm_head.weight")
    assert declared.batch is not None


@pytest.mark.parametrize(
    ("model_type", "auto_class", "sizes"),
    [
        ("llama", AutoModelForSequenceClassification, {"pad_token_id": 0, "num_labels": 3}),
        ("bert", AutoModelForTokenClassification, {"num_labels": 3}),
        ("distilbert", AutoModelForMaskedLM, {"pad_token_id": 0}),
        ("t5", AutoModelForSeq2SeqLM, {"pad_token_id": 0, "decoder_start_token_id": 0}),
        # Its rows need as many tokens at which they end.
        ("t5", AutoModelForSequenceClassification, {"pad_token_id": 0, "decoder_start_token_id": 0}),
        ("vit", AutoModelForImageClassification, {"num_labels": 3}),
        ("deit", AutoModelForImageClassification, {"image_size": [16, 32]}),
        ("resnet", AutoModelForImageClassification, {}),
        ("wav2vec2", AutoModelForAudioClassification, {"pad_token_id": 0}),
    ],
)
def test_models_of_other_classes_are_trained_on_labels_of_their_kind(
    tmp_path: Path, model_type: str, auto_class: type, sizes: dict[str, int]
) -> None:
    path = tiny_checkpoint(model_type, tmp_path / "here", auto_class=auto_class, **sizes)
    model = reference_model(path)
    assert type(model) is type(auto_class.from_pretrained(path))
    batch = subject(model, path, rows=4, length=6).batch
    assert callable(batch)
    assert len(batch(0)["labels"].unique()) > 1, "the loss of a single class is nearly zero"
    assert model(**batch(0)).loss > 0.1


def test_models_without_a_vocabulary_of_their_own_get_no_batch(tmp_path: Path) -> None:
    path = tiny_checkpoint("canine", tmp_path / "canine", auto_class=AutoModelForSequenceClassification)
    assert subject(reference_model(path), path).batch is None


def test_the_reference_has_the_class_of_the_model(llama: Path) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(llama)
    derived = subject(classifier, llama)
    assert callable(derived.reference)
    assert type(derived.reference()) is type(classifier)
    other = subject(nn.Linear(2, 2), llama)
    assert callable(other.reference)
    assert type(other.reference()) is LlamaForCausalLM


def test_the_docs_have_the_sizes() -> None:
    page = (ROOT / "docs" / "transformers.md").read_text("utf-8").partition("### The sizes of a tiny checkpoint")[2]
    table = dict(re.findall(r"`(\w+)=(\d+)`", page))
    config = tiny_config("llama").to_dict()
    assert len(table) == 8
    assert {name: str(config[name]) for name in table} == table
    assert config["rope_parameters"]["rope_theta"] == 10000
