"""Random numbers in training: alike where ranks compute one thing together, different where rows are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from pytest_fsdp_meta.checks.checkpoint.facts import RankResumed
from pytest_fsdp_meta.checks.random_numbers.facts import OWN_GENERATOR, Draw
from pytest_fsdp_meta.checks.training.facts import RankTrainingMode
from pytest_fsdp_meta.evidence import splits_experts, splits_model, splits_sequence
from pytest_fsdp_meta.judging.expectations import coordinates
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.gates import BLOCKING_CHECKS
from pytest_fsdp_meta.judging.registry import random_numbers_check
from pytest_fsdp_meta.judging.view import Differs, NotDeclared, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import counted, grouped, joined_runs

SEED_BY_SLICE = "torch.manual_seed(seed + <index of the data-parallel slice>)"


class _Pair(NamedTuple):
    """The same draw on two ranks."""

    module: str
    ranks: tuple[int, int]
    draws: tuple[Draw, Draw]


@random_numbers_check(
    promise="in training, ranks draw the same random numbers for the same activation, and different ones for different "
    "rows; each step draws new numbers; replicas stay equal even if each rank draws from a generator of its own",
    needs=["inventory", "training_mode"],
    uses=["reference"],
    after=[*BLOCKING_CHECKS, "replicas_stay_equal"],
    why="With one mask for the rows of all ranks, the noise of dropout does not average out over the batch; with "
    "several masks for one activation, tensor-parallel ranks compute different models. The losses look plausible.",
    cause="the ranks are not seeded by what they compute",
    remedy=f"seed all ranks alike to draw weights; then, before training, {SEED_BY_SLICE}, the same on the ranks that "
    "share a slice",
    references=[
        "huggingface/transformers#31412",
        "pytorch/torchtitan#1946",
        "NVIDIA/Megatron-LM#206",
        "ecmwf/anemoi-core#595",
    ],
)
def random_numbers_follow_the_mesh(view: View) -> Iterable[Finding]:
    steps = _steps_with_draws(view)
    repeating = [(rank, step.repeating[0]) for rank, step in enumerate(steps) if step.repeating]
    for module, ranks in ranks_by(repeating).items():
        yield Finding(module or None, ranks, *_SAME_IN_EACH_STEP, **_SEEDED_IN_EACH_STEP)
    if len(steps) == 1:
        raise NotJudged("there is one rank, so nothing can differ between ranks")
    places = coordinates(view.evidence)
    pairs = [pair for pair in _pairs(steps) if pair.draws[0].operand and pair.draws[1].operand]
    together = [p for p in pairs if _one_computation(steps, places, p.ranks) and _same_operand(p)]
    apart = [p for p in pairs if _other_rows(steps, places, p.ranks) and not _same_operand(p)]
    # One device draws some for all rows at once, and ranks that are seeded alike do the same. On the CPU, DTensor does
    # not give each shard its own numbers.
    apart = [p for p in apart if not any(d.for_all_rows or (d.by_dtensor and d.generator == "cpu") for d in p.draws)]
    judged = [p for p in apart if all(_seeded_for_training(view, draw) for draw in p.draws)]
    alike = [p for p in judged if _same_numbers(p)]
    of_one_slice = {p.ranks for p in alike if len({steps[rank].data_parallel for rank in p.ranks}) == 1}
    explanation = _ALL_ALIKE if len(alike) == len(judged) else _SOME_ALIKE
    unlike = [p for p in together if not _same_numbers(p)]
    yield from _findings(unlike, *_NOT_ALIKE)
    if not unlike:
        yield from _diverged_replicas(view, steps)
    yield from _findings([p for p in alike if p.ranks not in of_one_slice], *_SAME_ON_OTHER_ROWS, explanation)
    yield from _findings([p for p in alike if p.ranks in of_one_slice], *_SAME_ON_OTHER_TOKENS)
    if len(judged) < len(apart):
        raise PartlyJudged(_UNSEEDED) if together or judged else NotJudged(_UNSEEDED)
    if not together and not judged:
        raise NotJudged("no two ranks draw numbers for the same activation, or for different rows")


_UNSEEDED = (
    "how training seeds the ranks is unknown, because the loader does not seed them, or last with the seed that the "
    "reference is built with; to have the numbers of ranks with other rows judged, seed the ranks in the loader or "
    f"train_step as your training does, such as by {SEED_BY_SLICE}"
)


def _seeded_for_training(view: View, draw: Draw) -> bool:
    """Return whether the author seeded the generator for more than building the model.

    A loader in a test often builds the reference too, as a stand-in for a checkpoint, with a seed of its own.
    """
    reference = view.evidence.reference
    return draw.seeded and (draw.generator == OWN_GENERATOR or reference is None or draw.seed != reference.seed)


def _steps_with_draws(view: View) -> Sequence[RankTrainingMode]:
    steps = view.evidence.training_mode or ()
    if not any(step.draws for step in steps):
        if any(step.hidden for step in steps):
            raise NotJudged(
                "no operator draws random numbers in training mode, but a generator changes: kernels may draw that "
                "torch does not show"
            )
        raise NotJudged("the model draws no random numbers in training mode")
    return steps


def _pairs(steps: Sequence[RankTrainingMode]) -> Iterator[_Pair]:
    """Yield each draw that two ranks have in common, in the order in which the first rank draws."""
    by_key = grouped(
        ((draw.module, draw.call, draw.operator, draw.generator), (rank, draw))
        for rank, step in enumerate(steps)
        for draw in step.draws
    )
    for (module, *_), drawn in by_key.items():
        for (rank, draw), (other, its) in combinations(drawn, 2):
            yield _Pair(module, (rank, other), (draw, its))


def _one_computation(
    steps: Sequence[RankTrainingMode], places: Mapping[int, Mapping[str, int]], ranks: tuple[int, int]
) -> bool:
    """Return whether two ranks have the same rows and tokens, along dimensions that split the model.

    Ranks with other experts draw for these, whatever they are given.
    """
    dims = _differing_dims(places, ranks)
    return (
        steps[ranks[0]].data_parallel == steps[ranks[1]].data_parallel
        and any(map(splits_model, dims))
        and not any(splits_experts(dim) or splits_sequence(dim) for dim in dims)
    )


def _other_rows(
    steps: Sequence[RankTrainingMode], places: Mapping[int, Mapping[str, int]], ranks: tuple[int, int]
) -> bool:
    """Return whether two ranks have other rows of the batch, or other tokens of the same rows.

    Tensor-parallel ranks may have other parts of an activation too. Equal numbers do little harm there, and DTensor on
    the CPU draws no others.
    """
    dims = _differing_dims(places, ranks)
    other_tokens = any(map(splits_sequence, dims)) and all(splits_sequence(d) or not splits_model(d) for d in dims)
    return steps[ranks[0]].data_parallel != steps[ranks[1]].data_parallel or other_tokens


def _differing_dims(places: Mapping[int, Mapping[str, int]], ranks: tuple[int, int]) -> list[str]:
    first, second = (places.get(rank, {}) for rank in ranks)
    return [dim for dim in {**first, **second} if first.get(dim) != second.get(dim)]


def _same_operand(pair: _Pair) -> bool:
    return pair.draws[0].operand == pair.draws[1].operand


def _same_numbers(pair: _Pair) -> bool:
    return pair.draws[0].state == pair.draws[1].state


def _diverged_replicas(view: View, steps: Sequence[RankTrainingMode]) -> Iterator[Finding]:
    """Yield parameters whose replicas differ after the step, which starts from each rank's own random state.

    Other numbers in the forward, where one is computed together, explain that too: they are reported instead.
    """
    after = [{} if step.after is None else step.after.by_name for step in steps]
    for name, tensors in view.tensors("parameter", only=set().union(*after)):
        replicas = ranks_by((rank, tensor.held) for rank, tensor in tensors if tensor.numel and name in after[rank])
        apart = [r for ranks in replicas.values() if len({after[r][name].digest for r in ranks}) > 1 for r in ranks]
        if apart:
            actual = "replicas differ after a step from the random state that the loader left"
            yield Finding(name, tuple(sorted(apart)), actual, "bit-identical", **_OWN_NUMBERS)


_OWN_NUMBERS: Explanation = {
    "cause": "the optimizer's step draws from each rank's own generator (stochastic rounding, noise), so the replicas "
    "of one weight get different numbers",
    "remedy": "draw for a weight from a generator that all its replicas seed alike, and only its shards differently",
}
_SAME_IN_EACH_STEP = "draws the same random numbers in each step", "other numbers in the next step"
_SEEDED_IN_EACH_STEP: Explanation = {
    "cause": "train_step, or the model, sets a seed that does not depend on the step",
    "remedy": "set the seed once, before training, or let it depend on the step as well",
}
_NOT_ALIKE: tuple[str, str, Explanation] = (
    "draws different random numbers for the same activation",
    "the same numbers, because these ranks compute one result together",
    {
        "cause": "the ranks along a dimension that splits the model are seeded by their rank, or one of them has drawn "
        "more than the others (a DataLoader draws its base seed where it is iterated)",
        "remedy": "seed the ranks that share a data-parallel slice alike, as late as possible: "
        f"{SEED_BY_SLICE}; let draws that only some ranks make use a generator of their own",
    },
)
_SAME_ON_OTHER_ROWS = "draws the same random numbers for different rows", "other numbers on ranks with other rows"
_ALL_ALIKE: Explanation = {
    "cause": "all ranks are seeded alike (torch.manual_seed(42), accelerate's or transformers' set_seed(42)), which is "
    "right for drawing weights and wrong for training",
    "remedy": f"after the model is built, {SEED_BY_SLICE}; accelerate has set_seed(seed, device_specific=True), which "
    "also makes tensor-parallel ranks different",
}
_SOME_ALIKE: Explanation = {
    "cause": "the seed depends on some dimensions of the mesh that divide the batch and not on all of them, such as "
    "dp_shard without dp_replicate; or it depends on the rank within one machine",
    "remedy": f"{SEED_BY_SLICE}, counted over all dimensions that divide the batch",
}
_SAME_ON_OTHER_TOKENS: tuple[str, str, Explanation] = (
    "draws the same random numbers for different tokens of their rows",
    "other numbers on ranks with other tokens",
    {
        "cause": "the ranks that divide the sequence are seeded alike",
        "remedy": "seed by the index along the dimension that divides the sequence as well, where their parts differ",
    },
)


def _findings(pairs: Sequence[_Pair], actual: str, expected: str, explanation: Explanation) -> Iterator[Finding]:
    """Yield one finding for all pairs: a seed is wrong for all modules of the model, which share the generator."""
    if not pairs:
        return
    modules = list(dict.fromkeys(pair.module for pair in pairs))
    ranks = tuple(sorted({rank for pair in pairs for rank in pair.ranks}))
    first = pairs[0]
    more = len(modules) - 1
    others = f"; so {'does' if more == 1 else 'do'} {counted(more, 'other module')}" if more else ""
    shape = "x".join(map(str, first.draws[0].shape))
    detail = f"{first.draws[0].operator} of {shape} elements, first on ranks {joined_runs(first.ranks)}{others}"
    yield Finding(first.module or None, ranks, actual, expected, detail, **explanation)


@random_numbers_check(
    promise="resume() restores the random state that each rank had when it saved",
    needs=["inventory", "training_mode", "continued", "resumed"],
    after=[*BLOCKING_CHECKS, "optimizer_owns_parameters"],
    why="A resumed run otherwise repeats the masks of the first steps, or gives all ranks those of rank 0, and no loss "
    "can be compared with that of an uninterrupted run.",
    cause="resume() restores another random state than the one of its rank",
    remedy="let every rank save torch.get_rng_state() and its device's state under its own name, and restore them last",
    references=[
        "radixark/miles#3187",
        "NVIDIA/Megatron-LM#6858",
        "NVIDIA-NeMo/Automodel#3437",
        "modelscope/ms-swift#9935",
    ],
    fields=["save"],
)
def random_numbers_resume(view: View) -> Iterable[Finding]:
    steps = _steps_with_draws(view)
    if "save" not in view.evidence.subject.declared:
        raise NotDeclared("save", "; without it, torch.distributed.checkpoint saves, which keeps no random state")
    used = {draw.generator for step in steps for draw in step.draws}
    if used == {OWN_GENERATOR}:
        raise NotJudged("the model draws from a generator of its own, whose state only the model knows")
    saved, resumed = view.evidence.continued or (), view.evidence.resumed or ()
    problems = {
        kind: [(rank, _problem(kind, saved, resumed, rank)) for rank in range(len(resumed))]
        for kind in sorted(used - {OWN_GENERATOR})
    }
    for by_rank in problems.values():
        yield from view.findings_for(None, (pair for pair in by_rank if pair[1] != _SEEDED_AGAIN))
    if any(problem == _SEEDED_AGAIN for by_rank in problems.values() for _, problem in by_rank):
        raise Differs("resume() seeds the generators with other seeds instead of restoring their states")


def _problem(kind: str, saved: Sequence[RankResumed], resumed: Sequence[RankResumed], rank: int) -> Mismatch | None:
    """Return what is wrong with the random state of a rank after resuming.

    save() may draw numbers itself, and take the state before or after that.
    """
    own, now = saved[rank].generators[kind], resumed[rank].generators[kind]
    if now.after in (own.before, own.after):
        return None
    generator = f"(generator of {'the CPU' if kind == 'cpu' else kind})"
    if now.after == now.before:
        return Mismatch(f"the random state {generator} is not restored: resume() does not change it", _OWN, **_LOST)
    for other, run in enumerate(saved):
        if now.after in (run.generators[kind].before, run.generators[kind].after):
            return Mismatch(f"the random state of rank {other} {generator} after resuming", _OWN, **_ONE_FOR_ALL)
    if now.seed != own.seed:
        return _SEEDED_AGAIN
    return Mismatch(f"another random state {generator} after resuming", _OWN, **_CHANGED_AFTERWARDS)


_OWN = "the one that the rank had when it saved"
_SEEDED_AGAIN = Mismatch("seeded again", _OWN)
_LOST: Explanation = {
    "cause": "the checkpoint has no random state, or none of the generator from which the model draws; or resume() "
    "passes over one that it cannot read",
    "remedy": "let every rank save torch.get_rng_state(), and torch.cuda.get_rng_state() on a GPU, under its own name",
}
_ONE_FOR_ALL: Explanation = {
    "cause": "one rank saves its random state, and all ranks that resume load it",
    "remedy": "let every rank save its own state: a file for each rank, or a key with the rank in its name",
}
_CHANGED_AFTERWARDS: Explanation = {
    "cause": "something draws or seeds after the state is restored, such as a loader of batches that is built then",
    "remedy": "restore the random state last in resume()",
}


@random_numbers_check(
    promise="where backward computes a part of the forward again, it draws the same random numbers",
    needs=["inventory", "training_mode"],
    after=BLOCKING_CHECKS,
    why="With another mask in the second computation, gradients belong to no forward that took place: with usual "
    "dropout they are off by a fifth, and the loss still falls.",
    cause="checkpointing does not restore the random state before it computes again",
    remedy="leave preserve_rng_state=True in torch.utils.checkpoint.checkpoint(), or give dropout a mask that is an "
    "argument of the part that is computed again",
    references=["allenai/OLMo-core#828", "allenai/OLMo#702"],
)
def recomputation_draws_alike(view: View) -> Iterable[Finding]:
    steps = _steps_with_draws(view)
    if not any(draw.again for step in steps for draw in step.draws):
        raise NotJudged("backward draws no random numbers again")
    found = [(rank, draw.module) for rank, step in enumerate(steps) for draw in _other_numbers(step.draws)]
    for module, ranks in ranks_by(dict.fromkeys(found)).items():
        yield Finding(module or None, ranks, "draws other random numbers in backward than in the forward", "the same")


def _other_numbers(draws: Sequence[Draw]) -> Iterator[Draw]:
    """Yield the draws of the backward that repeat one of the forward with other numbers.

    A draw of an operator on a shape that the forward lacks repeats nothing, such as noise on a gradient. Modules are
    not compared: where a function is computed again, and not a module, none is running.
    """
    states: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for draw in draws:
        if not draw.again:
            states.setdefault((draw.operator, draw.shape), set()).add(draw.state)
    return (d for d in draws if d.again and d.state not in states.get((d.operator, d.shape), {d.state}))
