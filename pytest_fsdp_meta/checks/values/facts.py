"""How far training may differ from the reference's, by dtype, where its noise was not measured.

``smallest`` has the tolerances that need no measurement: no check rejects a smaller difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative error of a loss, by the coarsest dtype among the parameters and the dtypes they are cast to."""
GRADIENT_TOLERANCE = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Relative to the gradient's norm."""
UPDATE_TOLERANCE = {"float64": 1e-4, "float32": 2e-3, "float16": 0.2, "bfloat16": 0.35}
"""Relative to how far a parameter moved."""


def smallest(by_dtype: Mapping[str, float], dtypes: Collection[str]) -> float:
    """Return the tolerance of float64 if all of these dtypes have it, else that of float32."""
    return by_dtype["float64" if dtypes and {"float64"}.issuperset(dtypes) else "float32"]
