"""What an import of torchvision asks for on a machine without CUDA, for which torchvision's wheels are built.

Their library of operators cannot be loaded there, and torchvision registers shapes for two of them unasked.
"""

import torch

library = torch.library.Library("torchvision", "FRAGMENT")


def define() -> None:
    if not torch.cuda.is_available():
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
