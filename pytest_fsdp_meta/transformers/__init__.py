"""Tiny models, checkpoints and subjects of Hugging Face transformers; it needs the extra ``transformers``.

Importing this imports transformers, which importing pytest_fsdp_meta does not.
"""

from pytest_fsdp_meta.transformers.subjects import reference_model, subject, token_batch

__all__ = ["reference_model", "subject", "token_batch"]
