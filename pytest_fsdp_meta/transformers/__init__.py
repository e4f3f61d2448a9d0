"""Tiny models, checkpoints and subjects for Hugging Face transformers; requires the extra ``transformers``.

Importing this package imports transformers; importing pytest_fsdp_meta does not.
"""

from pytest_fsdp_meta.transformers.subjects import reference_model, subject, token_batch
from pytest_fsdp_meta.transformers.tiny import CAUSAL_LMS, tiny_checkpoint, tiny_config

__all__ = ["CAUSAL_LMS", "reference_model", "subject", "tiny_checkpoint", "tiny_config", "token_batch"]
