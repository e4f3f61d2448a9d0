"""Test that nothing drops while ranks and reference are compared, and that all is as before afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_fsdp_meta.ranks.modes import batch_norms, dropout_fractions, evaluating, with_dropout, without_dropout

CPU = torch.device("cpu")
X = torch.arange(1.0, 49.0).view(2, 3, 8)
NOTHING = nn.Module()


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: functional.dropout(x, 0.9),
        lambda x: functional.dropout(x, p=0.9, training=True),
        lambda x: functional.dropout(input=x, p=0.9),
        lambda x: functional.dropout(x.clone(), 0.9, True, True),
        lambda x: functional.dropout(x, torch.tensor(0.9)),
        lambda x: functional.dropout1d(x, 0.9),
        lambda x: functional.dropout2d(x[None], 0.9)[0],
        lambda x: functional.dropout3d(x[None, None], 0.9)[0, 0],
        lambda x: functional.alpha_dropout(x, 0.9, True),
        lambda x: functional.feature_alpha_dropout(x, 0.9, True),
        lambda x: torch.dropout(x, 0.9, True),
        lambda x: torch.dropout(x, p=0.9, train=True),
        lambda x: torch.dropout_(x.clone(), 0.9, True),
        lambda x: torch.native_dropout(x, 0.9, True)[0],
        lambda x: nn.Dropout(0.9)(x),
    ],
)
def test_every_way_to_drop_keeps_all(drop):
    with without_dropout(NOTHING):
        assert torch.equal(drop(X), X)
    assert not torch.equal(drop(X), X)


@pytest.mark.parametrize(
    "model",
    [
        nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.9, batch_first=True),
        nn.LSTM(8, 8, num_layers=2, dropout=0.9, batch_first=True),
        nn.GRU(8, 8, num_layers=2, dropout=0.9, batch_first=True),
    ],
    ids=lambda model: type(model).__name__,
)
def test_modules_with_a_dropout_inside_compute_what_they_do_in_evaluation(model):
    inputs = (X, X, X) if isinstance(model, nn.MultiheadAttention) else (X,)

    def run():
        output = model(*inputs)
        return output[0] if isinstance(output, tuple) else output

    model.train()
    with without_dropout(model):
        compared = run()
    assert not torch.allclose(run(), compared)
    with evaluating(model):
        assert torch.allclose(run(), compared, atol=1e-5)


@pytest.mark.parametrize(
    "attend",
    [
        lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.9),
        lambda: functional.scaled_dot_product_attention(query=X, key=X, value=X, dropout_p=0.9),
        lambda: functional.scaled_dot_product_attention(X, X, X, None, 0.9),
    ],
)
def test_attention_attends_to_all(attend):
    exact = functional.scaled_dot_product_attention(X, X, X)
    with without_dropout(NOTHING):
        assert torch.equal(attend(), exact)
    assert not torch.equal(attend(), exact)


def test_layers_that_are_skipped_by_chance_are_kept():
    model = nn.Linear(2, 2)
    model.layerdrop, model.config = 0.5, SimpleNamespace(encoder_layerdrop=0.25, decoder_layerdrop=None)
    with without_dropout(nn.Sequential(model, model)):
        assert (model.layerdrop, model.config.encoder_layerdrop, model.config.decoder_layerdrop) == (0.0, 0.0, None)
    assert (model.layerdrop, model.config.encoder_layerdrop) == (0.5, 0.25)


class Strict(dict):
    """A config whose keys are attributes, and that has no others."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Frozen:
    layerdrop: float = 0.5


@pytest.mark.parametrize("make", [lambda: Strict(width=2), Frozen])
def test_a_config_that_refuses_is_left_alone(make):
    model = nn.Linear(2, 2)
    model.config = config = make()
    with without_dropout(model):
        assert model.config == config


def test_statistics_by_a_function_stay_as_they_are():
    norm = nn.BatchNorm1d(3)
    for training in ({"training": True}, {}):
        with without_dropout(norm):
            kept = functional.batch_norm(X, norm.running_mean, norm.running_var, **training)
        assert torch.equal(kept, functional.batch_norm(X, norm.running_mean, norm.running_var))
    own = functional.batch_norm(X, None, None, training=True)
    with without_dropout(norm):
        assert torch.equal(functional.batch_norm(X, None, None, training=True), own)


def test_all_is_as_before_after_an_error():
    before = functional.dropout, functional.scaled_dot_product_attention, torch.dropout
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="expected 2D or 3D"), without_dropout(norm):
        norm(torch.ones(3))
    assert before == (functional.dropout, functional.scaled_dot_product_attention, torch.dropout)
    assert norm.training
    assert not norm._forward_pre_hooks
    assert not norm._forward_hooks


def test_statistics_of_the_rows_stay_as_they_are():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with without_dropout(model):
        model.train()  # as a step of the author's does
        model(X)
        assert model[0].training
    assert list(batch_norms(model)) == ["0"]
    assert int(model[0].num_batches_tracked) == 0
    model(X)
    assert int(model[0].num_batches_tracked) == 1


def test_synchronised_statistics_stay_as_they_are_on_the_cpu():
    """Among several ranks torch refuses to train them there."""
    model = nn.SyncBatchNorm(3)
    with with_dropout(model, CPU):
        model(X)
    assert (model.training, int(model.num_batches_tracked)) == (True, 0)


def test_train_has_no_effect_in_evaluation():
    model, second = nn.Sequential(nn.Dropout(0.5)), nn.Dropout().eval()
    with evaluating(model):
        assert (second.train().training, model.train().training) == (True, False)
    assert model.train()[0].training


def test_settings_of_dropouts():
    pool, model = nn.Module(), nn.Module()
    pool.p, pool.drop_last, pool.dropout_seed, pool.drop_tokens = 0.5, True, 17, 1
    model.drop, model.pool, model.attention_dropout = nn.Dropout(0.25), pool, 0.5
    assert dropout_fractions(model) == {"drop.p": 0.25, "attention_dropout": 0.5}
