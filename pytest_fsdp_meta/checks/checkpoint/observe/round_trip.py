"""Save the model and the optimizer, load them over other values, and train on.

Saving and loading use the author's ``Subject(save=..., resume=...)`` where declared, else torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint, FirstStep, RankResumed, RankSaved
from pytest_fsdp_meta.checks.checkpoint.observe.author import (
    call_author,
    is_untouched,
    overwrite,
    still_saving,
    with_changes,
)
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint, float_copies
from pytest_fsdp_meta.checks.checkpoint.observe.state_dict import EXTRA_STATE
from pytest_fsdp_meta.checks.materialisation.observe import resharded_subject
from pytest_fsdp_meta.checks.random_numbers.facts import RandomState
from pytest_fsdp_meta.checks.random_numbers.observe import observing_generators
from pytest_fsdp_meta.checks.training.observe.beside import SCHEDULER, Beside, is_scheduler, make_beside
from pytest_fsdp_meta.checks.training.observe.steps import TrainingRun, train
from pytest_fsdp_meta.checks.training.observe.trained_buffers import readable_buffers
from pytest_fsdp_meta.checks.training.observe.training_mode import ModeWatch, kept_by_mode
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_memory, placed_like, without_partial
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.batches import batch_slice, calling_torch, has_stages
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import memory_key, named_tensors, non_persistent, reshard
from pytest_fsdp_meta.ranks.joined_optimizer import (
    computing_optimizer,
    parts_of_optimizer,
    train_optimizer,
    watching_eval,
)
from pytest_fsdp_meta.ranks.modes import IN_EVALUATION, dropout_fractions
from pytest_fsdp_meta.ranks.module_watch import innermost_modules
from pytest_fsdp_meta.ranks.optimizers import BY_NAME, make_optimizer, optimizer_state
from pytest_fsdp_meta.ranks.reference_record import is_array
from pytest_fsdp_meta.ranks.torch_private import without_step_hooks
from pytest_fsdp_meta.ranks.watching import tensors_in
from pytest_fsdp_meta.text import grouped
from pytest_fsdp_meta.worlds import Rank, current, doing

# Observers of the model alone.


def save_model(folder: str) -> RankSaved:
    """Save the model in the folder; return what this rank held."""
    subject = resharded_subject()
    return _save(subject, None, Path(folder), _describe_model(subject))


def load_model(folder: str) -> RankSaved:
    """Load the model in the folder over other values; return what this rank holds afterwards."""
    load_over_other_values(folder)
    return _describe_loaded_model(resharded_subject())


def load_over_other_values(folder: str) -> None:
    """Load the model in the folder over other values and do nothing else, so that every error comes from loading."""
    subject = resharded_subject()
    _overwrite(subject)
    _load(subject, None, Path(folder))


# Observers of model and optimizer; the rank's state has the optimizer as "resumable", and what is "beside" it.


def first_step() -> FirstStep:
    """Prepare an optimizer that has state, and return whether torch can load that state.

    Training has already stepped the author's optimizer, or called ``make_optimizer_state``. If it has not, for example
    because the author's step is a function of theirs, SGD with momentum is stepped once.
    """
    rank, subject = current(), resharded_subject()
    trained = rank.state.get("optimizer" if subject.optimizer is not None else "resumable")
    if trained is not None:
        rank.state["resumable"] = optimizer = trained
    else:
        optimizer, _ = renew_optimizer(subject, rank)
        _train(rank, subject, range(1))
    names = _first_names(subject.model)
    trainable = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    # FSDP1 registers an empty parameter on a rank that holds nothing of it, which gets neither gradient nor state.
    stateless = sorted(names.get(id(p), "?") for p in trainable if p.numel() and not optimizer.state.get(p))
    # An optimizer without any state, such as plain SGD, lacks none.
    empty = [f"group {number}" for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    unloadable = f"{empty[0]} {_EMPTY}" if empty else _describe_empty_shard(subject, rank)
    return FirstStep(unloadable, tuple(stateless) if any(optimizer.state.values()) else ())


def make_optimizer_state(subject: Subject, rank: Rank) -> None:
    """Step SGD with momentum with the gradients that the model has, unless the author declares an optimizer."""
    if subject.optimizer is not None:
        return
    try:
        optimizer, beside = renew_optimizer(subject, rank)
        optimizer.step()
        beside.after_step(subject)
    except Exception:  # ``first_step`` tries it again, and an error there is one of saving, not of the training
        rank.state.pop("resumable", None)


def save_all(folder: str) -> RankResumed:
    """Save model and optimizer in the folder; return what they held."""
    rank, subject = current(), resharded_subject()
    optimizer = rank.state["resumable"]
    if subject.save is None:
        # torch steps an optimizer without state once, by zero gradients, before it saves or loads it; do so here, so
        # that the description has that state as well.
        optimizer_state(subject.model, optimizer)
    held = _describe_all(subject, optimizer, _describe_model(subject))
    generators: dict[str, RandomState] = {}
    with observing_generators(subject, rank, generators, saving=True), watching_eval(optimizer) as training:
        model = _save(subject, optimizer, Path(folder), held.model, rank.state["beside"])
    running, modes = still_saving(), tuple(sorted(set(training.values()))) if subject.save is not None else ()
    return replace(held, model=model, generators=generators, running=running, saved_in_train=modes)


def save_all_over(folder: str) -> None:
    """Save model and optimizer in a folder that has a checkpoint, without torch's warning: the trial wants it so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        save_all(folder)


def load_all(folder: str, changed: Collection[str] = ()) -> RankResumed:
    """Load model and optimizer in the folder over other values; return what they hold afterwards.

    The author can restore tensors that have ``changed`` in training from nothing but the checkpoint.
    """
    optimizer, generators, fresh = _load_all(folder, changed)
    subject = resharded_subject()
    held = _describe_all(subject, optimizer, _describe_loaded_model(subject))
    empty = any(not own for own in optimizer.state.values())
    return replace(held, generators=generators, beside_before=fresh, empty_entries=empty)


def load_all_in_other_size(folder: str) -> None:
    """Load model and optimizer in the folder, which a world of another size has saved, over other values."""
    _load_all(folder, in_other_size=True)


def _load_all(
    folder: str, changed: Collection[str] = (), in_other_size: bool = False
) -> tuple[Optimizer, dict[str, RandomState], dict[str, Fingerprint]]:
    """Return the optimizer, the generators, and the fingerprints of what is beside it before it was loaded."""
    rank, subject = current(), resharded_subject()
    optimizer, beside = renew_optimizer(subject, rank)
    # An optimizer that the loader built may have trained as far as the one that saved.
    _overwrite(subject, changed, optimizer, beside)
    fresh = beside.fingerprints()
    generators: dict[str, RandomState] = {}
    with observing_generators(subject, rank, generators):
        # torch cannot load plain tensors beside the model that have the shapes of shards of another size.
        _load(subject, optimizer, Path(folder), None if in_other_size and subject.save is None else beside)
    return optimizer, generators, fresh


def train_on(steps: Sequence[int]) -> Mapping[str, Any]:
    """Train after saving or loading a checkpoint; return the fields of RankResumed that describe these steps.

    The last step is one for its loss alone, which shows what the steps before it did.
    """
    rank, subject = current(), resharded_subject()
    modes = ModeWatch(subject.model)
    with modes.watching():
        run = _train(rank, subject, steps, until_loss=True)
    resting = tuple(name for name, module in innermost_modules(subject.model).items() if not module.training)
    return {
        "losses": tuple(run.losses),
        "rates": tuple(run.rates),
        "evaluating": modes.ran_in_eval(),
        "kept": kept_by_mode(subject.model),
        "resting": resting,
        "dropouts": dropout_fractions(subject.model),
    }


# Saving and loading.


def _save(
    subject: Subject, optimizer: Optimizer | None, folder: Path, held: RankSaved, beside: Beside | None = None
) -> RankSaved:
    """Save, and return what the model ``held`` before, with what the author's save() changed in it."""
    doing("saving")
    folder.mkdir(parents=True, exist_ok=True)
    if subject.save is not None:
        if dist.is_initialized():
            dist.barrier()  # an author who empties the folder first would meet it again from a slower rank
        before = {name: local.clone() for name, local in _persistent_locals(subject.model).items()}
        call_author("save", subject, optimizer, folder, beside)
        reshard(subject.model)
        parameters = {name: tensor for name, kind, tensor in named_tensors(subject.model) if kind == "parameter"}
        frozen = [name for name, tensor in parameters.items() if not tensor.requires_grad]
        return with_changes(held, before, _persistent_locals(subject.model), parameters, frozen)
    states = _torch_states(subject.model, optimizer)
    # The trial deletes it soon, so it does not have to survive a crash of the machine: do not wait for the disk.
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    with calling_torch("torch.distributed.checkpoint.save", "save"):
        dcp.save(states if beside is None else {**states, **beside.states()}, storage_writer=writer)
    return held


def _load(subject: Subject, optimizer: Optimizer | None, folder: Path, beside: Beside | None = None) -> None:
    doing("loading what was saved")
    if subject.resume is not None:
        returned = call_author("resume", subject, optimizer, folder, beside)
        if is_scheduler(returned) and beside is not None and beside.scheduler is not None:
            beside.scheduler = returned
        return
    if optimizer is not None:
        train_optimizer(optimizer)  # torch steps a new one, to give it the state that is loaded
    states = _torch_states(subject.model, optimizer)
    kept = {} if beside is None else beside.states()
    if optimizer is not None:
        # A new optimizer has state for all trainable parameters; the checkpoint has none for those without a gradient.
        _drop_unsaved(states["optimizer"]["state"], folder)
    groups = states["optimizer"]["param_groups"] if optimizer is not None and has_stages(current()) else []
    # One list of names is saved for all ranks, but each stage has its own.
    own_names = [group.pop("params") for group in groups]
    with calling_torch("torch.distributed.checkpoint.load", "resume"):
        dcp.load(loading := {**states, **kept}, checkpoint_id=folder)
    for group, names in zip(groups, own_names, strict=True):
        group["params"] = names
    # Another check reports tensors that the state dict leaves out.
    complete = not _left_out(subject.model, states["model"])
    set_model_state_dict(subject.model, states["model"], options=StateDictOptions(strict=complete))
    if optimizer is not None:
        state, groups = states["optimizer"]["state"], states["optimizer"]["param_groups"]
        # torch refuses a state dict that lacks a trainable parameter.
        state.update({name: {} for group in groups for name in group["params"] if name not in state})
        with _stepping_silently(optimizer):
            set_optimizer_state_dict(subject.model, parts_of_optimizer(optimizer), states["optimizer"])
        for parameter in [parameter for parameter, own in optimizer.state.items() if not own]:
            del optimizer.state[parameter]
    if beside is not None:
        beside.load(loading)


def _drop_unsaved(state: dict[str, Any], folder: Path) -> None:
    """Remove from an optimizer's state the entries for which the checkpoint has no key."""
    saved = {
        key[:end]
        for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for end, letter in enumerate(key)
        if letter == "."
    }
    for name in [name for name in state if f"optimizer.state.{name}" not in saved]:
        del state[name]


def _torch_states(model: Module, optimizer: Optimizer | None) -> dict[str, Any]:
    states: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        with _stepping_silently(optimizer):
            states["optimizer"] = optimizer_state(model, optimizer)
    return states


@contextmanager
def _stepping_silently(optimizer: Optimizer) -> Iterator[None]:
    """Call no step hooks: torch creates missing state of an optimizer by a step that is not training."""
    with ExitStack() as stack:
        for part in parts_of_optimizer(optimizer):
            stack.enter_context(without_step_hooks(computing_optimizer(part)))
        yield


def _overwrite(
    subject: Subject, changed: Collection[str] = (), optimizer: Optimizer | None = None, beside: Beside | None = None
) -> None:
    """Overwrite all that a checkpoint must restore, so that loading nothing is noticed.

    Where the author saves, only trained parameters and ``changed`` tensors are overwritten: the author may well restore
    all others from the place that the loader took them from.
    """
    trained = {name for name, tensor in _persistent(subject.model).items() if tensor.requires_grad}
    parts = persistent_parts(subject.model).items()
    memory = [part.local for name, part in parts if subject.save is None or name in trained or name in changed]
    states = [] if optimizer is None else [value for own in optimizer.state.values() for value in own.values()]
    entries = () if beside is None else beside.entries()
    states += [value for name, value in entries if not name.startswith(f"{SCHEDULER}.")]
    memory += [own_memory(value) for value in states if isinstance(value, Tensor)]
    done: set[int] = set()  # inverting the bits of tied tensors twice would restore them
    with torch.no_grad():
        for local in tensors_in(memory):  # what is quantised has its numbers and scales in tensors of its own
            if local.numel() and local.data_ptr() not in done and 0 not in local.stride():
                done.add(local.data_ptr())
                overwrite(local)


def renew_optimizer(subject: Subject, rank: Rank) -> tuple[Optimizer, Beside]:
    """Build the optimizer that is saved and resumed and what is beside it; the rank's state has both.

    Where the author declares no optimizer, it is SGD with momentum, which has state to save.
    """
    if subject.optimizer is None:
        trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
        optimizer: Optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, foreach=False)
        optimizer.register_step_pre_hook(_reduce_partial_gradients)
    else:
        built = make_optimizer(subject)
        assert built is not None, "something is trainable"
        optimizer = built
    rank.state["resumable"] = optimizer
    rank.state["beside"] = beside = make_beside(subject, optimizer)
    return optimizer, beside


def _reduce_partial_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Reduce the gradients that sequence parallelism leaves as parts of a sum.

    Since torch 2.15, momentum is a copy of the gradient with its placements, and torch saves no parts of a sum.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            parameter.grad = without_partial(parameter, parameter.grad)


def _train(rank: Rank, subject: Subject, steps: Sequence[int], until_loss: bool = False) -> TrainingRun:
    """Train on batches that training had as well: the author may not have others."""
    optimizer, beside = rank.state["resumable"], rank.state["beside"]
    rows = batch_slice(subject, rank)
    # Random numbers are no reason for eval() here: what is compared draws from the same seeds.
    rank.state.pop(IN_EVALUATION, None)
    run = train(subject, rank.device, steps, rows, optimizer, beside=beside, until_loss=until_loss)
    reshard(subject.model)
    return run


# Descriptions of what a rank holds.


def _describe_model(subject: Subject) -> RankSaved:
    model = subject.model
    tensors = {name: digest(local) for name, local in _persistent_locals(model).items()}
    left_out = non_persistent(model)
    transient = {name: digest(local_part(value)) for name, value in readable_buffers(model) if name in left_out}
    if subject.save is not None:
        return RankSaved(tensors, transient=transient)
    state = get_model_state_dict(model)
    extra = {key: fingerprint(value) for key, value in state.items() if key.endswith(EXTRA_STATE)}
    return RankSaved(tensors, extra, _left_out(model, state), transient=transient)


def _describe_loaded_model(subject: Subject) -> RankSaved:
    """Describe the model, with the tensors that still hold what ``_overwrite`` wrote."""
    untouched = tuple(name for name, local in _persistent_locals(subject.model).items() if is_untouched(local))
    return replace(_describe_model(subject), untouched=untouched)


def _describe_all(subject: Subject, optimizer: Optimizer, model: RankSaved) -> RankResumed:
    names = _first_names(subject.model)
    state: dict[str, Mapping[str, Fingerprint]] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if own_state := optimizer.state.get(parameter):
            name = names.get(id(parameter), f"(parameter {number} of the optimizer)")
            state[name] = {str(key): fingerprint(placed_like(parameter, value)) for key, value in own_state.items()}
    groups = tuple(
        {key: fingerprint(value) for key, value in group.items() if key not in BY_NAME}
        for group in optimizer.param_groups
    )
    parameters = [(name, tensor) for name, kind, tensor in named_tensors(subject.model) if kind == "parameter"]
    frozen = tuple(name for name, p in parameters if not p.requires_grad)
    beside: Beside = current().state["beside"]
    return RankResumed(
        model,
        state,
        groups,
        frozen=frozen,
        tied=_ties(subject.model, parameters),
        beside=beside.fingerprints(),
        rounded=beside.rounded(subject.model),
        plain=beside.plain(),
        copies=float_copies(subject.model, optimizer, beside.entries()),
    )


def _ties(model: Module, parameters: Iterable[tuple[str, Tensor]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names whose shards on this rank are one memory; an empty shard has none."""
    parts = parts_of(model)  # ZeRO-3 has an empty placeholder in each parameter, except where a forward has gathered it
    keyed = ((memory_key(parts.of(name, parameter).local), name) for name, parameter in parameters)
    names = grouped((key, name) for key, name in keyed if key is not None)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


_EMPTY = "of the optimizer is empty, and torch does not load the settings of an empty group"


def _describe_empty_shard(subject: Subject, rank: Rank) -> str:
    """Return which tensor of FSDP1 keeps torch from loading an optimizer; empty where none does, or the author saves.

    Loading drops a ShardedTensor without a shard on this rank, and then takes the checkpoint for one of torch 2.3.
    """
    if subject.save is not None or not FullyShardedDataParallel.fsdp_modules(subject.model):
        return ""
    for name, value in get_model_state_dict(subject.model).items():
        if hasattr(value, "local_shards") and not value.local_shards():
            return (
                f"FSDP1 without device_mesh=... saves no part of {name} on rank {rank.rank}, and "
                "torch.distributed.checkpoint then cannot load the optimizer"
            )
    return ""


def _persistent(model: Module) -> dict[str, Tensor]:
    transient = non_persistent(model)
    return {name: tensor for name, _, tensor in named_tensors(model) if name not in transient}


def persistent_parts(model: Module) -> dict[str, Part]:
    """Return this rank's parts of what a checkpoint must have, without tensors that are not plain arrays."""
    parts = parts_of(model)
    named = {name: parts.of(name, tensor) for name, tensor in _persistent(model).items()}
    return {name: part for name, part in named.items() if is_array(part.local)}


def _persistent_locals(model: Module) -> dict[str, Tensor]:
    return {name: local_part(part.local) for name, part in persistent_parts(model).items()}


def _left_out(model: Module, keys: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in _persistent(model) if name not in keys)


def _first_names(model: Module) -> dict[int, str]:
    """Map the identity of each tensor to its name; of tied names, to the first."""
    return {id(tensor): name for name, _, tensor in reversed(list(named_tensors(model)))}
