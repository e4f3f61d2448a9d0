"""The families of the built-in checks: ``@check`` with the family, and the observations that most of its judges need.

A check that needs others says so by ``needs``, as it would with ``@check`` itself.
"""

from __future__ import annotations

from functools import partial

from pytest_fsdp_meta.judging.registry import check

LOADED = ["inventory"]

structure_check = partial(check, family="structure", needs=[*LOADED, "reference"])
materialisation_check = partial(check, family="materialisation", needs=LOADED)
sharding_check = partial(check, family="sharding", needs=LOADED)
values_check = partial(check, family="values", needs=[*LOADED, "reference", "values"])
tying_check = partial(check, family="tying", needs=LOADED)
memory_check = partial(check, family="memory", needs=LOADED)
scale_check = partial(check, family="scale", needs=[*LOADED, "simulation"])
communication_check = partial(check, family="communication", needs=[*LOADED, "collectives"])
training_check = partial(check, family="training", needs=[*LOADED, "reference", "training"])
random_numbers_check = partial(check, family="random numbers")
data_check = partial(check, family="data")
checkpoint_check = partial(check, family="checkpoint")
