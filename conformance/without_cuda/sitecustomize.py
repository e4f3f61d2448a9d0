"""Python imports this at its start where the folder is in PYTHONPATH: a recipe does not define operators itself."""

import torchvision_operators

torchvision_operators.define()
